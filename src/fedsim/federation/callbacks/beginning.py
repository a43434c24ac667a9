"""The moment at which a run takes its directory: when its first round has trained, and not before.

Until then a fit may still be refused, or fail, and an older run in the directory is whole.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.loggers import Logger, MLFlowLogger, WandbLogger
from lightning.pytorch.loggers.logger import DummyLogger

from fedsim.core.errors import DataError
from fedsim.core.replaced_run import bring_back, drop_replaced
from fedsim.core.run_lock import RunLock, message_of_change
from fedsim.federation.callbacks.run_folder import FolderStart
from fedsim.federation.callbacks.summary import KeepConfig, MetricsFile
from fedsim.federation.callbacks.tracking import join_mlflow_run, join_run, reach_mlflow, reach_wandb
from fedsim.federation.events import RoundCallback, callbacks_of, strategy_of
from fedsim.settings.changes import Change

log = logging.getLogger(__name__)


class HeldLoggers(DummyLogger):
    """Stands for a trainer's loggers, which write as soon as they are used; keeps the numbers for them.

    Args:
        loggers: at least one.
    """

    def __init__(self, loggers: list[Logger]) -> None:
        super().__init__()
        self.loggers = loggers
        self._rows: list[tuple[Mapping[str, float], int | None]] = []

    @property
    def name(self) -> str:
        """The name of the first logger: ModelCheckpoint derives a folder from it."""
        return self.loggers[0].name or ""

    @property
    def version(self) -> str:
        """The version of the first logger."""
        version = self.loggers[0].version
        return version if isinstance(version, str) else f"version_{version}"

    @property
    def save_dir(self) -> str | None:
        """The folder of the first logger."""
        return self.loggers[0].save_dir

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Keep numbers."""
        self._rows.append((dict(metrics), step))

    def release(self, trainer: Trainer, module: LightningModule) -> None:
        """Give the trainer its loggers, and these the numbers that were kept."""
        for logger in sorted(self.loggers, key=lambda logger: isinstance(logger, MetricsFile)):
            # last the file, which drops the rows of rounds that are repeated: what fails before has changed no file
            if hasattr(logger, "experiment"):  # as Lightning begins loggers
                _ = logger.experiment
            logger.log_graph(module)
            logger.save()
        trainer.loggers = self.loggers
        for metrics, step in self._rows:
            for logger in self.loggers:
                logger.log_metrics(dict(metrics), step)


class RunBeginning(RoundCallback):
    """Takes the run directory, with loggers and config, when the first round has trained.

    Args:
        lock: of the run directory.
        start: makes room in the run directory.
        config: the resolved configuration, for MLflow.
        at_once: begin before the first round, which an agent of W&B needs to start a preempted run again; called then.
    """

    def __init__(
        self,
        lock: RunLock,
        start: FolderStart,
        config: Mapping[str, Any] | None = None,
        at_once: Callable[[], object] | None = None,
    ) -> None:
        self._lock, self._folder, self._config, self._at_once = lock, start, config or {}, at_once
        self._has_begun = False
        self._held: HeldLoggers | None = None

    def join(self, trainer: Trainer) -> None:
        """Become the first callback of a trainer; take its loggers away, before Lightning begins them."""
        callbacks_of(trainer).insert(0, self)
        if trainer.loggers:
            self._held = HeldLoggers(trainer.loggers)
            trainer.loggers = [self._held]

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Reach the servers: a missing key, or a server that does not answer, is reported before the first round."""
        with strategy_of(trainer).together():
            for logger in self._held.loggers if self._held is not None and trainer.is_global_zero else ():
                if isinstance(logger, WandbLogger):
                    reach_wandb(logger)
                elif isinstance(logger, MLFlowLogger):
                    reach_mlflow(logger)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin, if that cannot wait."""
        if self._at_once is not None:
            self._begin(trainer, pl_module)

    def on_round_trained(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin with the first round; before each, make sure that the run directory is still ours."""
        if not self._has_begun:
            self._begin(trainer, pl_module)
        elif trainer.is_global_zero:
            self._lock.check()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remove a replaced run when the new one has a checkpoint."""
        if self._has_begun and trainer.is_global_zero:
            self._folder.settle()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remove a replaced run, also where checkpoints are switched off."""
        if self._has_begun and trainer.is_global_zero:
            self._folder.settle(ends=not trainer.checkpoint_callbacks)

    def _begin(self, trainer: Trainer, module: LightningModule) -> None:
        """Take the run directory; if that fails on rank 0, all ranks stop."""
        with strategy_of(trainer).together():
            if trainer.is_global_zero:
                self._lock.check()
                self._folder.prepare(lambda: self._start(trainer, module))
            elif self._held is not None:
                self._held.release(trainer, module)
        self._has_begun = True

    def leave(self, trainer: Trainer) -> None:
        """Give a trainer what :meth:`join` has taken, also if the run has not begun."""
        if self in callbacks_of(trainer):
            callbacks_of(trainer).remove(self)
        if self._held is not None:
            trainer.loggers = self._held.loggers

    def _start(self, trainer: Trainer, module: LightningModule) -> None:
        folder = Path(trainer.default_root_dir)
        if self._at_once is not None:
            self._at_once()
        if self._held is not None:
            for logger in self._held.loggers:
                if isinstance(logger, MLFlowLogger):
                    join_mlflow_run(logger, folder, self._config)
                elif isinstance(logger, WandbLogger):
                    join_run(logger, folder)
                elif isinstance(logger, MetricsFile):
                    logger.begin(trainer, self._folder.rounds if self._folder.continues else None)
            self._held.release(trainer, module)
        for callback in callbacks_of(trainer):
            if isinstance(callback, KeepConfig):
                callback.write(folder)


@contextmanager
def in_run_folder(
    trainer: Trainer, start: FolderStart, changes: Iterable[Change] = (), **options: Any
) -> Iterator[None]:
    """Let a fit begin or continue in a run directory, which the first rank holds during the block.

    ``changes`` are the settings that it changes, for the log; ``options`` are those of :class:`RunBeginning`.

    Raises:
        ConfigError: if another fit runs in the directory, or it cannot be written.
        DataError: if files of the run are removed meanwhile.
    """
    lock, is_first = RunLock(start.folder), trainer.is_global_zero
    beginning = RunBeginning(lock, start, **options)
    try:
        if is_first:
            lock.acquire()
            start.check_free()  # again: another fit may have ended in between
            for change in changes:
                log.warning("%s", change)
        if not trainer.fast_dev_run:  # type: ignore[attr-defined] # Lightning sets it; such a fit writes nothing
            beginning.join(trainer)
        yield
        if is_first:
            drop_replaced(start.folder)  # also of a run without a checkpoint, whose clients never answer
    except OSError as error:
        if message := message_of_change(start.folder, error):
            raise DataError(message) from error
        raise
    finally:
        beginning.leave(trainer)
        lock.release()
        if is_first:
            bring_back(start.folder)
