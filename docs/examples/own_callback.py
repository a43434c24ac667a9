"""A callback of your own: a file with the last loss of each client in each round, a line for each."""

import json
from pathlib import Path

from lightning import LightningModule, Trainer

from fedsim.federation.callbacks import RoundCallback
from fedsim.training.session import BatchReport


class LastLosses(RoundCallback):
    """Writes a line when a client has trained; each rank writes a file of its own, ``losses-0.jsonl`` and so on.

    Args:
        folder: of the files; it must be there.
    """

    def __init__(self, folder: str = ".") -> None:
        self.folder, self.round, self.rank = Path(folder), 0, 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Keep the number of this rank."""
        self.rank = trainer.global_rank

    def on_round_start(self, round_: int, clients: list[str]) -> None:
        """Keep the number of the round, from 1 as in tables."""
        self.round = round_ + 1

    def on_client_batch(self, report: BatchReport) -> None:
        """Write a line after the last batch; only then is the loss read, as that waits for the device."""
        if report.share >= 1:
            line = {"round": self.round, "client": report.client, "loss": float(report.loss)}
            with (self.folder / f"losses-{self.rank}.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
