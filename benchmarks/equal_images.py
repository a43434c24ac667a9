"""The measure of equal work: runs that end when they have trained on as many images as another run.

Rounds, and client rounds, are no such measure: a selection that prefers clients with many images trains on more of them
in each round.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fedsim.federation.events import RoundCallback

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from fedsim.training.client import BatchReport

_FILE = "work.json"


@dataclass(frozen=True)
class Work:
    """Work and traffic of a run, over all clients and rounds."""

    rounds: int = 0
    images: int = 0
    """images trained on"""
    steps: int = 0
    """batches trained on"""
    bytes: int = 0
    """sent by server and clients"""


class CountWork(RoundCallback):
    """Counts the work of a fit on one rank, with one local epoch and no drop-outs, and writes it to the run directory.

    Args:
        images: the fit ends, with an evaluation, after the first round in which this number is reached; null: it has
            all rounds of ``trainer.max_epochs``. Set ``trainer.check_val_every_n_epoch`` to ``trainer.max_epochs``.
    """

    def __init__(self, images: int | None = None) -> None:
        self.images = images
        self.work = Work()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let an evaluation follow if this round is the last: clients keep their models for it while they train."""
        settings, parts = pl_module.settings, pl_module.parts
        selected = settings.selection.select(trainer.current_epoch, parts.names, settings.seed)
        expected = sum(parts.data_of[client].num_images for client in selected)
        if self.images is not None and self.work.images + expected >= self.images:
            trainer.check_val_every_n_epoch = 1

    def on_client_batch(self, report: BatchReport) -> None:
        """Count a batch."""
        self.work = replace(self.work, steps=self.work.steps + 1)

    def on_round_trained(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count the round's images, and end the fit if they are enough."""
        images = self.work.images + sum(int(report.images) for report in pl_module.reports.values())
        sent = pl_module.parts.ledger.total
        self.work = replace(self.work, rounds=self.work.rounds + 1, images=images, bytes=int(sent))
        if self.images is not None and images >= self.images:
            trainer.should_stop = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the work."""
        Path(trainer.default_root_dir, _FILE).write_text(json.dumps(asdict(self.work)), encoding="utf-8")


def read_work(folder: Path) -> Work:
    """Return the work of a run with :class:`CountWork`."""
    return Work(**json.loads((folder / _FILE).read_text(encoding="utf-8")))
