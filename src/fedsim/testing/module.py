"""``check_module``: whether a LightningModule of one's own can be the clients of a federation."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule
from torch import Tensor, nn

from fedsim.methods import FedAvg
from fedsim.methods.base import Method
from fedsim.testing.backbone import check_evaluation, check_layers, compare_fits
from fedsim.testing.findings import Findings
from fedsim.testing.fingerprint import changed, global_settings, hashed, moved, state_of
from fedsim.testing.pythons import Question
from fedsim.testing.trials import Fit
from fedsim.training.own_module.assembly import TrialTraining
from fedsim.training.own_module.blueprint import Blueprint, MakesModule
from fedsim.training.own_module.inner_trainer import Horizon, Options, package_of, train
from fedsim.training.own_module.module_batch import BatchForm, PairBatch
from fedsim.training.own_module.network import features_of
from fedsim.training.settings import LocalTraining


def check_module(
    module: LightningModule | MakesModule,
    size: tuple[int, int] = (32, 16),
    *,
    method: Method | None = None,
    **settings: Any,
) -> None:
    """Refuse a LightningModule that is not fit for clients, with a sentence for each finding.

    Small fits, in processes of their own, on the CPU, take some seconds; one more is on a GPU, if there is one.
    They begin with the trial step of every fit, which names what a module lacks and what cannot be simulated. Then
    the checkpoints are compared bit by bit: of one rank and of two, and of a run that goes on after a pause. A
    module whose loss depends on the rank, on other clients or on what it keeps outside its tensors differs there.
    The module itself stays as it is.

    Args:
        module: an instance, a class or a functools.partial of one, as it is given to Federation.
        size: height and width of the images.
        method: the federated method; None: FedAvg.
        settings: further arguments of Federation, such as ``client=LocalTraining(...)`` or ``private=[...]``.

    Raises:
        PartRefusedError: an AssertionError with all findings.
    """
    findings = Findings(_name_of(module))
    if package_of(module) is None and (isinstance(module, nn.Module) or not callable(module)):
        findings.add(f"{findings.name} is no LightningModule of lightning or pytorch_lightning; give one")
    findings.settle()
    with tempfile.TemporaryDirectory(prefix="fedsim-check-") as folder:
        options = {**settings, "backbone": module}
        whole = Fit(method or FedAvg(), Path(folder) / "one", options, size=size, is_drawn=True)
        compare_fits(whole, findings)
    findings.settle()
    question = Question(_sessions, module, size, settings.get("module_batch") or PairBatch(), hashes=(0,))
    try:
        _check_features(module, size, findings)
        for sentences in question.answers("training two sessions", findings):
            findings.add_all(sentences)
    finally:
        question.end()
    findings.settle()


def _name_of(module: Any) -> str:
    return str(getattr(getattr(module, "func", module), "__name__", type(module).__name__))


def _check_features(module: LightningModule | MakesModule, size: tuple[int, int], findings: Findings) -> None:
    """Check that features are a function of the weights and each image alone."""
    with findings.trying("building it again"):
        made = Blueprint(module, 0, _CLASSES).first
        check_layers(made, findings)
        embed = partial(features_of, made)
        with torch.random.fork_rng(devices=[]):
            check_evaluation(made, embed, size, findings)


def _sessions(module: LightningModule | MakesModule, size: tuple[int, int], form: BatchForm) -> list[str]:
    """Train two sessions: the second one with what the first one left beside tensors, and without; return findings."""
    findings = Findings(_name_of(module))
    blueprint, settings = Blueprint(module, 0, _CLASSES), global_settings()
    first = blueprint.build(_CLASSES)
    shared, start = _shared_state(first), {name: p.detach().clone() for name, p in first.named_parameters()}
    values = _trained(first, {}, 0, (size, form), findings)
    going_on, anew = (_trained(part, values, 1, (size, form), findings) for part in (first, blueprint.build(_CLASSES)))
    for name in (name for name, tensor in anew.items() if not torch.equal(tensor, going_on[name])):
        findings.add(
            f"{name} depends on what an earlier session has left on the module beside its tensors, which does not "
            "last; keep it in a buffer"
        )
        break
    if all(torch.equal(tensor, ends[name]) for ends in (values, going_on) for name, tensor in start.items()):
        findings.add("its weights do not move: no optimizer steps; return a loss, or step manually")
    for place in [*moved(settings, global_settings()), *changed(shared, _shared_state(first))]:
        findings.add(f"training changes {place}, which all clients of a rank share, and a pause forgets")
    return [*findings]


def _shared_state(module: LightningModule) -> dict[str, str]:
    """Return the state of the classes and the file of a module, without the module itself."""
    return {place: content for place, content in state_of(module).items() if not place.startswith("self.")}


class _Session(TrialTraining):
    """Begins with ``values``, and notes changes of batches."""

    def __init__(self, values: Mapping[str, Tensor], findings: Findings, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._values, self._findings = values, findings

    def load(self, module: LightningModule) -> None:
        """Set the values."""
        if self._values:
            module.load_state_dict(self._values)

    def training_step(self, step: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Compare the batch before and after the step."""
        before = hashed(args[0])
        output = step(*args)
        if before != hashed(args[0]):
            self._findings.add("training_step changes its batch in place, which methods use again: copy it first")
        return output


def _trained(
    module: LightningModule, values: Mapping[str, Tensor], round_: int, data: tuple[tuple[int, int], BatchForm],
    findings: Findings,
) -> dict[str, Tensor]:  # fmt: skip
    """Train a session on random images; return the tensors at its end."""
    (size, form), device = data, torch.device("cpu")
    settings = LocalTraining(batch_size=8, accumulate=2)
    session = _Session(values, findings, 16, _CLASSES, settings, {"train": size}, form, device)
    train(module, session, Horizon(round_=round_, rounds=2), Options(device), round_)
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


_CLASSES = 4
