"""Lightning's Trainer with fedsim's strategy and defaults, for federations that are built in Python."""

from __future__ import annotations

import hashlib
import inspect
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning
from lightning import Callback
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar
from lightning.pytorch.strategies import Strategy

from fedsim.core.annotations import check_arguments
from fedsim.core.checked import checked
from fedsim.core.devices import check_accelerator
from fedsim.core.errors import ConfigError
from fedsim.core.false_alarms import ignore_false_alarms
from fedsim.core.paths import expanded
from fedsim.core.replaced_run import bring_back
from fedsim.core.versions import holding
from fedsim.evaluation.summary import score_rows
from fedsim.federation.callbacks import (
    FolderStart,
    KeepConfig,
    MetricsFile,
    Preemption,
    RoundProgress,
    RunSummary,
    ScoreLastRound,
    describe_script,
    in_run_folder,
)
from fedsim.federation.checks.compatibility import check_callbacks, check_one_batch, check_trainer
from fedsim.federation.events import as_list, callbacks_of
from fedsim.federation.federation import Federation
from fedsim.settings.changes import Change
from fedsim.settings.configuration import line_of_idle
from fedsim.settings.options import trainer_defaults
from fedsim.strategy.checkpoint_files import read_checkpoint
from fedsim.strategy.launch import check_place
from fedsim.strategy.run_checkpoints import Resumed, check_rounds, checkpoint_at, checkpoint_named, resumed_at
from fedsim.strategy.sharing import gpus_for
from fedsim.strategy.strategy import FederatedStrategy

log = logging.getLogger(__name__)

_WAYS = "give another one, resume=True to continue it, or overwrite=True to replace it"


class Trainer(lightning.Trainer):
    """Lightning's Trainer for a :class:`~fedsim.federation.federation.Federation`.

    ``max_epochs`` is the number of rounds, ``devices`` the number of ranks, ``check_val_every_n_epoch`` the interval of
    evaluation; all other arguments of Lightning keep their meaning.

    Args:
        run_dir: folder in which a fit writes ``config.yaml``, ``metrics.csv``, ``summary.json`` and ``checkpoints``,
            for all commands of fedsim; ``~`` and variables are replaced. A fit keeps other fits out of it, and changes
            nothing in it before its first round has trained. None: nothing is written.
        resume: a fit continues the run in ``run_dir``; if there is none, or none with a checkpoint, it begins.
        overwrite: a fit replaces the run in ``run_dir``.
        options: Lightning's arguments; they override those of fedsim.

    Raises:
        ConfigError: if an option is not of its type, ``run_dir`` holds a run already, or the GPUs of this machine are
            asked for and cannot be used.
    """

    @checked()
    def __init__(
        self, *, run_dir: str | Path | None = None, resume: bool = False, overwrite: bool = False, **options: Any
    ) -> None:
        check_arguments(lightning.Trainer, "trainer", (), {n: v for n, v in options.items() if not _is_twin(v)})
        check_one_batch(options.get("limit_train_batches"))
        callbacks = as_list(options.pop("callbacks", None))
        check_callbacks(callbacks)
        of_user = [*callbacks]
        if options.get("enable_progress_bar") is not False and not any(isinstance(c, ProgressBar) for c in callbacks):
            callbacks.append(RoundProgress())
        options["enable_progress_bar"] = any(isinstance(c, ProgressBar) for c in callbacks)
        callbacks += [ScoreLastRound(), Preemption()]
        self._start: FolderStart | None = None
        self._resumed: Resumed | None = None
        if run_dir is None:
            if resume or overwrite:
                raise ConfigError(f"{'resume' if resume else 'overwrite'}: is for a run_dir; name one")
            options = {"logger": False, "enable_checkpointing": False} | options
        else:
            folder = Path(expanded(run_dir, "run_dir")).absolute()  # the working directory may change before a fit
            self._start = FolderStart(folder, overwrite, restart=resume, ways=_WAYS)
            self._start.check_way("resume", "overwrite")
            callbacks += _checkpoints(folder, options.get("enable_checkpointing"), callbacks)
            wanted = options.get("logger")
            loggers = False if wanted is False else [MetricsFile(folder), *as_list(wanted)]
            options = {"default_root_dir": str(folder)} | options | {"logger": loggers}
        options = trainer_defaults() | options
        if options.get("strategy", "auto") == "auto":
            options["strategy"] = FederatedStrategy()
        self._options = {name: value for name, value in options.items() if name != "enable_progress_bar"}
        check_place()
        arguments = dict(options)
        if not isinstance(arguments["strategy"], Strategy):
            raise ConfigError(f"trainer.strategy: {arguments['strategy']} is not fedsim's; leave it out")
        if arguments.get("barebones"):
            raise ConfigError("trainer.barebones: a federation needs loggers and callbacks; leave it out")
        if isinstance(strategy := arguments["strategy"], FederatedStrategy):
            arguments["devices"] = gpus_for(arguments.get("devices", "auto"), strategy.ranks_per_device)
        check_accelerator(arguments.get("accelerator", "auto"))
        with _without_false_alarms():
            super().__init__(**arguments, callbacks=callbacks)
        self._of_fedsim = [callback for callback in callbacks_of(self) if callback not in of_user]
        self._as_made = self._plain_options()
        self._open_metrics(False)
        if self._start is not None and not resume and self.is_global_zero:  # others may start when it has begun
            self._start.check_free()

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
        options = _with_path(kwargs)
        model = args[0] if args else options.get("model")
        if not isinstance(model, Federation):
            raise ConfigError(
                f"model: fedsim.Trainer trains a Federation, and this is {type(model).__name__}; give "
                "fedsim.Federation(method, model)"
            )
        check_trainer(self)  # before Lightning, whose lines are about the server's step
        with _without_false_alarms(), holding():
            start = None if self._start is None else self._settled(self._start, options)
            with nullcontext() if start is None else self._in_folder(start, args, options):
                super().fit(*args, **options)

    @contextmanager
    def _in_folder(self, start: FolderStart, args: Sequence[Any], options: dict[str, Any]) -> Iterator[None]:
        """Let a fit begin or continue in the run directory, with the callbacks that write its files."""
        added, changes = self._of_run(start, args, options)
        callbacks = callbacks_of(self)
        if not self.fast_dev_run:  # type: ignore[attr-defined] # Lightning sets it; such a fit writes nothing
            callbacks[:0] = added  # before the callbacks that save its state
        self._open_metrics(True)
        try:
            with in_run_folder(self, start, changes):
                yield
        finally:
            callbacks[:] = [callback for callback in callbacks if callback not in added]
            self._open_metrics(False)

    def _open_metrics(self, is_open: bool) -> None:
        """Let numbers into metrics.csv, in a fit only."""
        for logger in self.loggers:
            if isinstance(logger, MetricsFile):
                logger.is_open = is_open

    def _of_run(
        self, start: FolderStart, args: Sequence[Any], options: dict[str, Any]
    ) -> tuple[list[Callback], list[Change]]:
        """Return the callbacks that write a run's files, and the settings that a resume changes."""
        module = args[0] if args else options["model"]
        resumed = self._resumed
        of_user = [callback for callback in callbacks_of(self) if callback not in self._of_fedsim]
        made = {name: repr(value) for name, value in self._as_made.items()}  # 1 is not 1.0
        changed = {name: value for name, value in self._plain_options().items() if repr(value) != made[name]}
        settings = describe_script(module, options.get("datamodule"), self._options | changed, of_user)
        if resumed is None and getattr(module, "has_trained", False):
            settings = settings._replace(config=None, unwritable="model: has trained before; build it anew")
        changes = resumed.changes(settings.config) if resumed and settings.config else []
        # settings that have no text cannot be compared: such a run is of a kind of its own
        fingerprint = settings.fingerprint or hashlib.sha256(str(start.folder.resolve()).encode()).hexdigest()[:12]
        if settings.unwritable:
            name = "no config.yaml" if settings.config is None else "not in config.yaml"
            log.info("%s: %s", name, settings.unwritable)
        if settings.config is not None and (remark := line_of_idle(settings.config)):
            log.info(remark)
        summary = RunSummary(str(start.folder), fingerprint, changes, settings.identity)
        return [summary, KeepConfig(settings.text)], changes

    def _plain_options(self) -> dict[str, Any]:
        """Return the options that are plain attributes, which a script may change before a fit."""
        values = {name: getattr(self, name, None) for name in inspect.signature(lightning.Trainer).parameters}
        return {name: value if isinstance(value, bool | int | float | str) else None for name, value in values.items()}

    def _settled(self, start: FolderStart, options: dict[str, Any]) -> FolderStart:
        """Return the start of a fit with its checkpoint, which is added to the ``options`` of the fit."""
        path = options.get("ckpt_path")
        if self.is_global_zero:
            bring_back(start.folder)
        if path is None and start.restart:
            path = checkpoint_named(start.folder, "last")
        if path is None:
            self._resumed = None
            return start
        path = checkpoint_at(Path(path), fitting=True)
        self._resumed = resumed_at(path, read_checkpoint(path))
        options["ckpt_path"] = str(path)
        if not check_rounds(path, self._resumed.rounds, self.max_epochs):
            log.warning("nothing to train: %s is of round %d, the last; raise max_epochs", path, self._resumed.rounds)
        start = replace(start, ckpt_path=str(path), rounds=self._resumed.rounds)
        start.check_way("ckpt_path", "overwrite")
        return start

    def validate(self, *args: Any, **kwargs: Any) -> Any:
        """Score the clients' validation data; the arguments are Lightning's, the table is in :attr:`scores`."""
        with _without_false_alarms(), holding():
            return super().validate(*args, **{"verbose": False} | _with_path(kwargs))

    def test(self, *args: Any, **kwargs: Any) -> Any:
        """Score the test sets; the arguments are Lightning's, the table is in :attr:`scores`."""
        with _without_false_alarms(), holding():
            return super().test(*args, **{"verbose": False} | _with_path(kwargs))


def _is_twin(value: Any) -> bool:
    """Return whether callbacks or loggers are of ``pytorch_lightning``, whose classes Lightning's annotations lack."""
    return any(type(part).__module__.partition(".")[0] == "pytorch_lightning" for part in as_list(value))


def _with_path(options: dict[str, Any]) -> dict[str, Any]:
    path = options.get("ckpt_path")
    return options if path is None else options | {"ckpt_path": expanded(path, "ckpt_path")}


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
