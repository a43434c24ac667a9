"""``check_module``: whether a LightningModule of one's own can be the clients of a federation."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from lightning import LightningModule

from fedsim.methods import FedAvg
from fedsim.methods.base import Method
from fedsim.testing.backbone import compare_fits
from fedsim.testing.findings import Findings
from fedsim.testing.trials import ROUNDS, Fit, difference
from fedsim.training.own_module.package import package_of


def check_module(
    module: LightningModule, size: tuple[int, int] = (32, 16), *, method: Method | None = None, **settings: Any
) -> None:
    """Refuse a LightningModule that is not fit for clients, with a sentence for each finding.

    Small fits, in processes of their own, on the CPU, take some seconds. They begin with the trial step of every fit,
    which names what a module lacks and what cannot be simulated. Then the checkpoints are compared bit by bit: of one
    rank and of two, and of a run that goes on after a pause. A module whose loss depends on the rank, on other clients
    or on what it keeps outside its tensors differs there. The module itself stays as it is.

    Args:
        module: an instance, as it is given to Federation.
        size: height and width of the images.
        method: the federated method; None: FedAvg.
        settings: further arguments of Federation, such as ``client=LocalTraining(...)`` or ``private=[...]``.

    Raises:
        PartRefusedError: an AssertionError with all findings.
    """
    findings = Findings(type(module).__name__)
    if package_of(module) is None:
        findings.add(f"{type(module).__name__} is no LightningModule of lightning or pytorch_lightning; give one")
    findings.settle()
    with tempfile.TemporaryDirectory(prefix="fedsim-check-") as folder:
        options = {**settings, "backbone": module}
        whole = Fit(method or FedAvg(), Path(folder) / "one", options, size=size, own_streams=False)
        compare_fits(whole, findings)
        if not findings and not difference(whole.checkpoint(1), whole.checkpoint(ROUNDS)):
            findings.add("its weights do not move: no optimizer steps; return a loss, or step manually")
    findings.settle()
