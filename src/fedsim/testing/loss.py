"""``check_loss``: whether a loss can be ``model.objective.metric``."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedsim.models.reid import Features
from fedsim.testing.backbone import compare_fits
from fedsim.testing.findings import Findings
from fedsim.testing.fingerprint import changed, global_settings, global_streams, moved, num_hooks, state_of
from fedsim.testing.trials import BodyAverage, Fit
from fedsim.training.batch_loss import BatchLoss, SeenBatch
from fedsim.training.metric_loss import MetricLoss, as_metric_loss
from fedsim.training.objective import Objective

_IMAGES, _CLASSES, _WIDTH = 8, 4, 6
_PEOPLE = 40
"""identities of a large client"""
_TOLERANCE = 1e-4
"""of a value: sums of another order round differently"""


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
        moves = [_tried(loss, name, batch, findings) for name, batch in _batches().items()]
        if not findings and not any(moves):
            findings.add("its gradient is 0 for each batch: nothing would be learnt")
        if isinstance(loss, nn.Module):
            findings.try_elsewhere(lambda: _value(copy.deepcopy(loss).to("meta"), _on_meta(_batch())))
    findings.settle()
    if fits:
        with tempfile.TemporaryDirectory(prefix="fedsim-check-") as folder:
            settings = {"objective": Objective(metric=loss)}
            compare_fits(Fit(BodyAverage(), Path(folder) / "one", settings), findings)
    findings.settle()


def _batches() -> dict[str, SeenBatch]:
    """Return batches as clients have them, some of them rarely, by what is special about them."""
    usual = _batch()
    return {
        "": usual,
        "one identity": _batch(labels=[2] * _IMAGES),
        "2 images of 2 identities": _batch(labels=[0, 1], classes=2),
        "2 images of one identity": _batch(labels=[0, 0]),
        "one image": _batch(labels=[1]),
        "one camera": usual._replace(cameras=torch.zeros_like(usual.cameras)),
        f"labels up to {_PEOPLE - 1}": _batch(labels=[*range(0, _PEOPLE, 3), _PEOPLE - 1], classes=_PEOPLE),
        "equal features": _scaled(_batch(), lambda tensor: torch.ones_like(tensor) * tensor[:1]),
        "features of 0": _scaled(_batch(), torch.zeros_like),
        "features of a length of 70": _scaled(_batch(), lambda tensor: 30 * tensor),
        "the first round": _batch()._replace(round=0),
        "round 1,000": _batch()._replace(round=999),
    }


def _scaled(seen: SeenBatch, change: Callable[[Tensor], Tensor]) -> SeenBatch:
    """Return a batch with other features and logits."""

    def leaf(tensor: Tensor) -> Tensor:
        return change(tensor.detach()).requires_grad_()

    views = tuple(Features(*map(leaf, view)) for view in seen.views)
    return seen._replace(views=views, logits=leaf(seen.logits))


def _batch(labels: list[int] | None = None, classes: int = _CLASSES) -> SeenBatch:
    """Return a batch of random features for a loss; its floating-point tensors are leaves with gradient."""
    stream = torch.Generator().manual_seed(0)
    numbers = torch.tensor([0, 0, 1, 1, 2, 2, 3, 0] if labels is None else labels)
    count = len(numbers)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=stream).requires_grad_()

    views = tuple(Features(leaf(count, _WIDTH), leaf(count, _WIDTH)) for _ in range(4))
    cameras = torch.arange(count) % 2
    return SeenBatch(views, numbers, cameras, leaf(count, classes), leaf(classes, _WIDTH), 3)


def _value(loss: nn.Module | MetricLoss, seen: SeenBatch) -> Tensor:
    if isinstance(loss, BatchLoss):
        value: Tensor = loss(seen._replace(views=seen.views[: loss.views]))
        return value
    return as_metric_loss(loss)(seen.features, seen.labels, seen.head)


def _tried(loss: nn.Module | MetricLoss, name: str, seen: SeenBatch, findings: Findings) -> bool:
    """Check a batch; return whether its gradient is other than 0."""
    of_batch = Findings(name)
    with of_batch.trying(f"a batch of {len(seen.labels)} images of {len(seen.labels.unique())} identities"):
        _check_batch(loss, seen, of_batch)
    if name:
        findings.add_all(f"{sentence}, in a batch with {name}" for sentence in of_batch if sentence not in findings)
    else:
        findings.add_all(of_batch)
    return any(leaf.grad is not None and bool(leaf.grad.any()) for leaf in _leaves(seen))


def _check_batch(loss: nn.Module | MetricLoss, seen: SeenBatch, findings: Findings) -> None:
    kept, streams, settings, before = state_of(loss), global_streams(), global_settings(), _copies(seen)
    value = _value(loss, seen)
    _check_value(loss, value, seen, findings)
    for library, state in global_streams().items():
        if state != streams[library]:
            findings.add(
                f"it draws from the global random stream of {library}; a loss must depend on its arguments alone"
            )
    for setting in moved(settings, global_settings()):
        findings.add(f"it changes {setting}, which all parts of a run share")
    for state_name in changed(kept, state_of(loss)):
        findings.add(f"it changes {state_name}: what it keeps is of other clients, and in no checkpoint")
    if any(map(num_hooks, _leaves(seen))):
        findings.add("it leaves a hook on the batch's tensors, which changes the gradients of other losses, too")
    if any(not torch.equal(a, b) for a, b in zip(before, _copies(seen), strict=True)):
        findings.add("it changes the batch in place, which other losses see, too")


def _check_value(loss: nn.Module | MetricLoss, value: Any, seen: SeenBatch, findings: Findings) -> None:
    if not isinstance(value, Tensor) or value.dim() != 0:
        shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        findings.add(f"it returns {shape}, not a scalar tensor")
        return
    if value.dtype is not torch.float32:
        findings.add(f"it returns {value.dtype}, not torch.float32")
    _check_gradient(value, seen, findings)
    if not value.isfinite():
        findings.add(f"its value is {value.item()} for labels {seen.labels.tolist()}; it must be finite")
    elif not torch.equal(value, _value(loss, seen)):
        findings.add("two calls with the same batch differ: it draws random numbers, or keeps something")
    elif abs(value - _value(loss, _mixed(seen))) > _TOLERANCE * (1 + abs(value)):
        findings.add("its value depends on the order of the images, which has no meaning in a batch")


def _check_gradient(value: Tensor, seen: SeenBatch, findings: Findings) -> None:
    if not value.requires_grad:
        findings.add("its value has no gradient: nothing would be learnt")
        return
    leaves = _leaves(seen)
    gradients = torch.autograd.grad(value, leaves, allow_unused=True)
    for leaf, gradient in zip(leaves, gradients, strict=True):
        leaf.grad = gradient
        if gradient is not None and not gradient.isfinite().all():
            findings.add(f"a gradient is not finite for labels {seen.labels.tolist()}")
    if all(gradient is None for gradient in gradients):
        findings.add("its value does not depend on features, logits or head: nothing would be learnt")


def _leaves(seen: SeenBatch) -> list[Tensor]:
    """Return the tensors with a gradient."""
    return [*(tensor for view in seen.views for tensor in view), seen.logits, seen.head]


def _on_meta(seen: SeenBatch) -> SeenBatch:
    """Return a batch of shapes without data."""
    views = tuple(Features(*(tensor.to("meta") for tensor in view)) for view in seen.views)
    tensors = {name: getattr(seen, name).to("meta") for name in ("labels", "cameras", "logits", "head")}
    return seen._replace(views=views, **tensors)


def _mixed(seen: SeenBatch) -> SeenBatch:
    """Return a batch with its images in another order."""
    order = torch.arange(len(seen.labels)).roll(3).flip(0)
    views = tuple(Features(*(tensor[order] for tensor in view)) for view in seen.views)
    return seen._replace(views=views, labels=seen.labels[order], cameras=seen.cameras[order], logits=seen.logits[order])


def _copies(seen: SeenBatch) -> list[Tensor]:
    tensors = [*(t for view in seen.views for t in view), seen.labels, seen.cameras, seen.logits, seen.head]
    return [tensor.detach().clone() for tensor in tensors]
