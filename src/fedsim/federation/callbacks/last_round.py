"""The last round of a fit is scored, whatever the interval of evaluations."""

from __future__ import annotations

from lightning import Callback, LightningModule, Trainer


class ScoreLastRound(Callback):
    """Lets an evaluation follow the last round: a run without scores of its last model would have to be tested again.

    An interval that is longer than the run still means that there is no evaluation.
    """

    def __init__(self) -> None:
        self._every: int | None = None

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the interval 1 in the last round; before it, clients are told whether their models are kept."""
        every, last = trainer.check_val_every_n_epoch, trainer.max_epochs
        if every is not None and last is not None and every <= last == trainer.current_epoch + 1:
            self._every, trainer.check_val_every_n_epoch = every, 1

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Give the trainer its interval back."""
        if self._every is not None:
            self._every, trainer.check_val_every_n_epoch = None, self._every
