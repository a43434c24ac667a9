"""Lightning's Trainer with fedsim's strategy and defaults, for federations that are built in Python."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning
from lightning import Callback
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar
from lightning.pytorch.loggers import CSVLogger

from fedsim.core.devices import check_accelerator
from fedsim.core.errors import ConfigError, DataError
from fedsim.core.false_alarms import ignore_false_alarms
from fedsim.core.files import expanded
from fedsim.core.run_lock import RunLock, message_of_change
from fedsim.evaluation.summary import score_rows
from fedsim.federation.callbacks import HoldRunDirectory, Preemption, RoundProgress, RunSummary, ScoreLastRound
from fedsim.strategy.launch import check_place
from fedsim.strategy.sharing import gpus_for
from fedsim.strategy.strategy import FederatedStrategy

DEFAULTS = {
    "use_distributed_sampler": False,
    "num_sanity_val_steps": 0,
    "log_every_n_steps": 1,
    "max_epochs": 100,
    "enable_model_summary": False,
}
"""Defaults of Lightning's settings for a federation; the command line has the same."""


class Trainer(lightning.Trainer):
    """Lightning's Trainer for a :class:`~fedsim.federation.federation.Federation`.

    ``max_epochs`` is the number of rounds, ``devices`` the number of ranks, ``check_val_every_n_epoch`` the interval of
    evaluation; all other arguments of Lightning keep their meaning.

    Args:
        run_dir: folder in which a fit writes ``metrics.csv``, ``summary.json`` and ``checkpoints``, for fedsim report
            and export; ``~`` and variables are replaced. A fit keeps other fits out of it, and makes it. None: nothing
            is written.
        options: Lightning's arguments; they override :data:`DEFAULTS`.

    Raises:
        ConfigError: if ``run_dir`` holds a run already, or the GPUs of this machine are asked for and cannot be used.
    """

    def __init__(self, *, run_dir: str | Path | None = None, **options: Any) -> None:
        self._lock: RunLock | None = None
        callbacks = _as_list(options.pop("callbacks", None))
        if options.get("enable_progress_bar") is not False and not any(isinstance(c, ProgressBar) for c in callbacks):
            callbacks.append(RoundProgress())
        options["enable_progress_bar"] = any(isinstance(c, ProgressBar) for c in callbacks)
        callbacks += [ScoreLastRound(), Preemption()]
        if run_dir is None:
            options = {"logger": False, "enable_checkpointing": False} | options
        else:
            folder = Path(expanded(str(run_dir), "run_dir")).absolute()  # the working directory may change before a fit
            if (folder / "summary.json").exists():
                raise ConfigError(f"run_dir: {folder} holds a run already; give another one, or remove it")
            self._lock = RunLock(folder)
            callbacks += [
                HoldRunDirectory(self._lock),
                *_of_run(folder),
                *_checkpoints(folder, options.get("enable_checkpointing"), callbacks),
            ]
            options = {"logger": CSVLogger(folder, name="", version=""), "default_root_dir": str(folder)} | options
        check_place()
        arguments: dict[str, Any] = {"strategy": FederatedStrategy()} | DEFAULTS | options
        if isinstance(strategy := arguments["strategy"], FederatedStrategy):
            arguments["devices"] = gpus_for(arguments.get("devices", "auto"), strategy.ranks_per_device)
        check_accelerator(arguments.get("accelerator", "auto"))
        with _without_false_alarms():
            super().__init__(**arguments, callbacks=callbacks)

    @property
    def scores(self) -> list[dict[str, str | float]]:
        """The last evaluation as a table: a row per split, kind of model and data set; scores are fractions of 1."""
        return score_rows({name: float(value) for name, value in self.callback_metrics.items()})

    def fit(self, *args: Any, **kwargs: Any) -> None:
        """Train a federation; the arguments are Lightning's.

        Raises:
            ConfigError: if another fit runs in ``run_dir``, or it cannot be written.
            DataError: if files of the run are removed meanwhile.
        """
        with _without_false_alarms(), self._held():
            super().fit(*args, **_with_path(kwargs))

    @contextmanager
    def _held(self) -> Iterator[None]:
        """Hold the run directory, if there is one, on the first rank."""
        lock = self._lock if self.is_global_zero else None
        try:
            if lock is not None:
                lock.acquire()
            yield
        except OSError as error:
            if self._lock is not None and (message := message_of_change(self._lock.folder, error)):
                raise DataError(message) from error
            raise
        finally:
            if lock is not None:
                lock.release()

    def validate(self, *args: Any, **kwargs: Any) -> Any:
        """Score the clients' validation data; the arguments are Lightning's, the table is in :attr:`scores`."""
        with _without_false_alarms():
            return super().validate(*args, **{"verbose": False} | _with_path(kwargs))

    def test(self, *args: Any, **kwargs: Any) -> Any:
        """Score the test sets; the arguments are Lightning's, the table is in :attr:`scores`."""
        with _without_false_alarms():
            return super().test(*args, **{"verbose": False} | _with_path(kwargs))


def _with_path(options: dict[str, Any]) -> dict[str, Any]:
    """Replace ``~`` and variables in ``ckpt_path``."""
    path = options.get("ckpt_path")
    return options if path is None else options | {"ckpt_path": expanded(str(path), "ckpt_path")}


def _of_run(folder: Path) -> list[Callback]:
    # settings made in Python have no text to compare, so each run gets its own fingerprint
    return [RunSummary(str(folder), hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:12])]


def _checkpoints(folder: Path, wanted: bool | None, callbacks: list[Callback]) -> list[Callback]:
    if wanted is False or any(isinstance(callback, ModelCheckpoint) for callback in callbacks):
        return []
    path = folder / "checkpoints"
    return [ModelCheckpoint(path, filename="last", save_on_train_epoch_end=True, enable_version_counter=False)]


@contextmanager
def _without_false_alarms() -> Iterator[None]:
    with warnings.catch_warnings():
        ignore_false_alarms()
        yield


def _as_list(callbacks: Any) -> list[Any]:
    return [] if callbacks is None else list(callbacks) if isinstance(callbacks, list) else [callbacks]
