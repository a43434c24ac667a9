"""Lightning's Trainer with one more entry point: ``describe``."""

from __future__ import annotations

import sys

from lightning import Trainer

from fedsim.data.datamodule import FederatedDataModule
from fedsim.describe import describe_federation
from fedsim.federation import Federation

__all__ = ["FederatedTrainer"]


class FederatedTrainer(Trainer):
    """A Trainer that can also describe what it would do."""

    def describe(self, model: Federation, datamodule: FederatedDataModule) -> None:
        """Show what a config shares, who holds what, and what a run will cost."""
        sys.stdout.write(describe_federation(model, datamodule, self.world_size, self.max_epochs or 0) + "\n")
