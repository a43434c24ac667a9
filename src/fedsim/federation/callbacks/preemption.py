"""End of a run by a signal of a scheduler or a user, at the cost of at most the running round."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from lightning import LightningModule, Trainer

from fedsim.core.arguments import ChecksArguments
from fedsim.core.errors import ConfigError, RunStoppedError
from fedsim.core.slurm_job import requeue
from fedsim.core.versions import current_version
from fedsim.federation.callbacks.summary import federation_of
from fedsim.federation.events import RoundCallback, strategy_of, was_stopped
from fedsim.strategy.strategy import FederatedStrategy
from fedsim.training.client import BatchReport

log = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class Preemption(ChecksArguments, RoundCallback, option="trainer.callbacks"):
    """Handles signals while a fit runs, instead of Lightning's own handlers.

    Lightning's handlers save and broadcast at any point of the training. Here a handler only sets a flag. All ranks
    exchange it at the end of the round, and the run ends with a checkpoint. If the round is predicted to take longer
    than the grace period, it is abandoned, and the last checkpoint remains. A process whose main thread is stuck, in a
    reader or a disk, ends ten seconds after the grace period.

    SIGTERM and SIGUSR1 give ``grace`` seconds. Ctrl-C gives none; a second Ctrl-C ends the process at once. After
    SIGUSR1, which Slurm sends to a job whose time limit is near (``--signal=USR1@300``), rank 0 asks Slurm to start the
    job again. After SIGTERM it does not: the sender restarts the job, or the job must end.

    Args:
        grace: seconds from the signal to the forced end, minus the time of a checkpoint.
        requeue: whether a Slurm job starts again after SIGUSR1.
    """

    def __init__(self, grace: float = 120.0, requeue: bool = True) -> None:
        if not grace >= 0:
            raise ConfigError(f"trainer.callbacks: Preemption: grace must not be negative, got {grace}")
        self.grace, self.requeue = grace, requeue
        self._previous: dict[int, Any] = {}
        self._costs: Mapping[str, float] = {}
        self._clients: list[str] = []
        self._started = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Install the signal handlers; Lightning has installed its own before."""
        federation = federation_of(pl_module)
        self._strategy: FederatedStrategy = federation.strategy
        self._strategy.watch_for_stop(partial(self._say_and_ask, trainer))
        self._costs = federation.parts.costs
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
            # without Lightning's handlers its flag is never set, but all ranks would exchange it in each round
            trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign] # see above

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            if self._strategy.stop_signal == number:
                raise KeyboardInterrupt
            self._strategy.request_stop(number, time.monotonic())
        elif self._strategy.stop_signal is None:
            self._strategy.request_stop(number, time.monotonic() + self.grace)

    def on_round_start(self, round_: int, clients: list[str]) -> None:
        """Abandon the round at once if a signal has arrived before it."""
        self._clients, self._started = clients, time.monotonic()
        if self._strategy.stop_signal is not None:
            self._strategy.abandon_round()

    def on_batch_before_stop(self, report: BatchReport) -> None:
        """Abandon the round if it is predicted to miss the deadline."""
        deadline = self._strategy.stop_deadline
        assert deadline is not None, "the run has no deadline"
        costs = [self._costs[name] for name in self._clients]
        position = self._clients.index(report.client)
        share = (sum(costs[:position]) + report.share * costs[position]) / sum(costs)
        now = time.monotonic()
        if now + (now - self._started) * (1 - share) / share > deadline:
            self._strategy.abandon_round()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save the last round at once: an evaluation after it may take longer than the grace period."""
        if trainer.should_stop and self._strategy.stop_signal is not None and trainer.checkpoint_callbacks:
            trainer.save_checkpoint(Path(trainer.default_root_dir) / "checkpoints" / "last.ckpt")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the signal handlers."""
        self._end(trainer, self._strategy.stop_signal)
        if was_stopped(trainer):
            self._ask_to_start_again(trainer, self._strategy.stop_signal)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Restore the signal handlers."""
        number = exception.signum if isinstance(exception, RunStoppedError) else None
        self._end(trainer, number)
        self._ask_to_start_again(trainer, number)

    def _end(self, trainer: Trainer, number: int | None) -> None:
        """Restore the handlers; after signal ``number``, if there was one, log the command that continues the run."""
        strategy_of(trainer).end_watch()  # also of a fit that failed before it began to train
        if self._previous:
            del trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor  # the replacement by on_train_start
        while self._previous:
            caught, handler = self._previous.popitem()
            signal.signal(caught, handler if handler is not None else signal.SIG_DFL)
        if number is not None:
            self._say_how_to_continue(trainer)

    def _say_how_to_continue(self, trainer: Trainer) -> None:
        last = Path(trainer.default_root_dir) / "checkpoints" / "last.ckpt"
        if current_version(last) is not None:
            log.info("continue with: fedsim fit --ckpt_path %s", trainer.default_root_dir)

    def _say_and_ask(self, trainer: Trainer, number: int) -> None:
        """Do before a forced end of the process the part of :meth:`_end` that needs no main thread."""
        self._say_how_to_continue(trainer)
        self._ask_to_start_again(trainer, number)

    def _ask_to_start_again(self, trainer: Trainer, number: int | None) -> None:
        if self.requeue and number == signal.SIGUSR1 and trainer.is_global_zero and (remark := requeue()):
            log.warning(remark)
