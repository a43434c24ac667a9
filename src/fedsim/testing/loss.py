"""``check_loss``: whether a loss can be ``model.objective.metric``."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

from fedsim.models.reid import Features
from fedsim.testing.backbone import compare_fits, plain_method
from fedsim.testing.findings import Findings
from fedsim.testing.fingerprint import changed, global_streams, state_of
from fedsim.testing.trials import Fit
from fedsim.training.batch_loss import BatchLoss, SeenBatch
from fedsim.training.metric_loss import MetricLoss, as_metric_loss
from fedsim.training.objective import Objective

_IMAGES, _CLASSES, _WIDTH = 8, 4, 6


def check_loss(loss: nn.Module | MetricLoss, *, fits: bool = True) -> None:
    """Refuse a loss that is not fit for an objective, with a sentence for each finding.

    It is a :class:`~fedsim.training.batch_loss.BatchLoss`, a module of features [B, D] and labels [B], or a
    :class:`~fedsim.training.metric_loss.MetricLoss`, which may compare with the identity head. It must
    return a finite float32 scalar with a gradient for features; depend on its arguments alone; leave these, and the
    global random streams, as they are; have no parameters; keep nothing; take batches of any identities and sizes; and
    give the same bits in small fits on one rank, on two, and after a pause, which ``fits`` = False leaves out.

    Raises:
        PartRefusedError: an AssertionError with all findings.
    """
    findings = Findings(loss.name if isinstance(loss, MetricLoss) else type(loss).__name__)
    if isinstance(loss, MetricLoss):  # which refuses parameters itself
        with findings.trying("a first batch, for whose head some losses are made,"):
            _value(loss, _batch())
    elif not isinstance(loss, nn.Module):
        findings.add(f"{type(loss).__name__} is no torch.nn.Module; give an instance of BatchLoss, or of a module")
    else:
        for name, _ in loss.named_parameters():
            findings.add(f"it learns {name}, which no client would keep; compare with the head, or with features")
    findings.settle()
    with torch.random.fork_rng(devices=[]):
        for batch in (_batch(), _batch(labels=[2] * _IMAGES), _batch(labels=[0, 1]), _batch(labels=[0, 0])):
            with findings.trying(f"a batch of {len(batch.labels)} images of {len(batch.labels.unique())} identities"):
                _check_batch(loss, batch, findings)
    findings.settle()
    if fits:
        with tempfile.TemporaryDirectory(prefix="fedsim-check-") as folder:
            settings = {"objective": Objective(metric=loss)}
            compare_fits(Fit(plain_method(), Path(folder) / "one", settings), findings)
    findings.settle()


def _batch(labels: list[int] | None = None) -> SeenBatch:
    """Return a batch of random features for a loss; its floating-point tensors are leaves with gradient."""
    stream = torch.Generator().manual_seed(0)
    numbers = torch.tensor([0, 0, 1, 1, 2, 2, 3, 0] if labels is None else labels)
    count = len(numbers)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=stream).requires_grad_()

    views = tuple(Features(leaf(count, _WIDTH), leaf(count, _WIDTH)) for _ in range(4))
    cameras = torch.arange(count) % 2
    return SeenBatch(views, numbers, cameras, leaf(count, _CLASSES), leaf(_CLASSES, _WIDTH), 3)


def _value(loss: nn.Module | MetricLoss, seen: SeenBatch) -> Tensor:
    if isinstance(loss, BatchLoss):
        value: Tensor = loss(seen._replace(views=seen.views[: loss.views]))
        return value
    return as_metric_loss(loss)(seen.features, seen.labels, seen.head)


def _check_batch(loss: nn.Module | MetricLoss, seen: SeenBatch, findings: Findings) -> None:
    kept, streams, before = state_of(loss), global_streams(), _copies(seen)
    value = _value(loss, seen)
    if not isinstance(value, Tensor) or value.dim() != 0:
        shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        findings.add(f"it returns {shape}, not a scalar tensor")
        return
    if value.dtype is not torch.float32:
        findings.add(f"it returns {value.dtype}, not torch.float32")
    if not value.isfinite():
        findings.add(f"its value is {value.item()} for labels {seen.labels.tolist()}; it must be finite")
    _check_gradient(value, seen, findings)
    for library, state in global_streams().items():
        if state != streams[library]:
            findings.add(
                f"it draws from the global random stream of {library}; a loss must depend on its arguments alone"
            )
    if not torch.equal(value, _value(loss, seen)):
        findings.add("two calls with the same batch differ: it draws random numbers, or keeps something")
    for state_name in changed(kept, state_of(loss)):
        findings.add(f"it changes {state_name}: what it keeps is of other clients, and in no checkpoint")
    if any(not torch.equal(a, b) for a, b in zip(before, _copies(seen), strict=True)):
        findings.add("it changes the batch in place, which other losses see, too")


def _check_gradient(value: Tensor, seen: SeenBatch, findings: Findings) -> None:
    if not value.requires_grad:
        findings.add("its value has no gradient: nothing would be learnt")
        return
    leaves = [tensor for view in seen.views for tensor in view] + [seen.logits, seen.head]
    gradients = torch.autograd.grad(value, leaves, allow_unused=True)
    for gradient in gradients:
        if gradient is not None and not gradient.isfinite().all():
            findings.add(f"a gradient is not finite for labels {seen.labels.tolist()}")
    if all(gradient is None for gradient in gradients):
        findings.add("its value does not depend on features, logits or head: nothing would be learnt")


def _copies(seen: SeenBatch) -> list[Tensor]:
    tensors = [*(t for view in seen.views for t in view), seen.labels, seen.cameras, seen.logits, seen.head]
    return [tensor.detach().clone() for tensor in tensors]
