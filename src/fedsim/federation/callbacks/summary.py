"""The results of a run in its directory: ``summary.json``, ``config.yaml``, and scores of the last round."""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from lightning import Callback, LightningModule, Trainer
from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter

from fedsim._version import __version__
from fedsim.core.files import naming, replacing
from fedsim.core.metrics import comparable
from fedsim.core.metrics_rows import METRICS_FILE, RowsDigest, metrics_files, rows_before, write_rows
from fedsim.core.replaced_run import QUERIES_FILE
from fedsim.evaluation.summary import MAX_LISTED, write_queries
from fedsim.federation.checks.compatibility import data_of
from fedsim.federation.events import ended_by, num_rounds
from fedsim.settings.changes import Change, fingerprint_after, read_changes
from fedsim.settings.identity import changed_content, sealed
from fedsim.strategy.checkpoint_files import CONFIG_KEY

if TYPE_CHECKING:
    from fedsim.federation.federation import Federation

CONFIG_FILE = "config.yaml"

log = logging.getLogger(__name__)


def federation_of(pl_module: LightningModule) -> Federation:
    """Return the module with its type: fedsim's callbacks are only used with federations."""
    return cast("Federation", pl_module)


class _Writer(ExperimentWriter):
    """Writes ``metrics.csv`` below the rows that are in it: FolderStart.prepare has moved another run's away."""

    def __init__(self, log_dir: str) -> None:
        super().__init__(log_dir)
        self.written = RowsDigest()
        """of all rows in the file"""

    def save(self) -> None:
        """Write the rows that are not in the file yet."""
        rows = self.metrics
        super().save()  # which begins another list
        self.written.add(rows)

    def _check_log_dir_exists(self) -> None:
        """Remove no file, and warn of none."""

    def continue_with(self, rounds: int) -> None:
        """Keep the rows of the run's first ``rounds`` rounds, from all of its files, in this one."""
        folder, target = Path(self.log_dir), Path(self.metrics_file_path)
        earlier = metrics_files(folder)
        rows = rows_before(folder, rounds)
        self.metrics_keys = write_rows(target, rows)
        self.written = RowsDigest(rows)
        for path in earlier:
            if path != target:
                path.unlink()


class MetricsFile(CSVLogger):
    """Lightning's logger of metrics.csv; an error names the file.

    Args:
        folder: the run directory.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, name="", version="", flush_logs_every_n_steps=1)
        self._rounds: int | None = None
        self._trainer: Trainer | None = None
        self.is_open = True
        """whether numbers are written: those of a test after the fit belong to no round"""
        self._writer: _Writer | None = None

    def begin(self, trainer: Trainer, rounds: int | None) -> None:
        """Take the rounds from a trainer, and keep the rows of the ``rounds`` that its fit continues; None: none."""
        self._trainer, self._rounds = trainer, rounds

    @property
    @rank_zero_experiment
    def experiment(self) -> _Writer:
        """Lightning's writer."""
        if self._writer is None:
            with naming(Path(self.log_dir) / METRICS_FILE):
                self._writer = _Writer(log_dir=self.log_dir)
                if self._rounds is not None:
                    self._writer.continue_with(self._rounds)
        return self._writer

    @property
    def record(self) -> dict[str, Any] | None:
        """The number of rows in the file, and their digest; None before the first one."""
        return None if self._writer is None else self._writer.written.record()

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Keep numbers, and write them; those of a callback that names no epoch are of the latest round."""
        if self.is_open:
            begun = 0 if self._trainer is None else self._trainer.fit_loop.epoch_progress.current.ready
            super().log_metrics({"epoch": max(begun - 1, 0), **metrics}, step)

    def save(self) -> None:
        """Write the metrics so far."""
        if not self.is_open:
            return
        with naming(Path(self.log_dir) / METRICS_FILE):
            super().save()


class RunSummary(Callback):
    """Writes the final and the best scores, bytes, seconds, versions and seed after each round and evaluation.

    In a second file, it writes the scores of single queries in the last evaluation. "Best" is by ``val/mAP``, or
    ``val/top1``, never by a test score.

    Args:
        folder: the run directory.
        fingerprint: hash of the configuration without the seed; runs with the same fingerprint are repetitions.
        changes: the settings that a fit changes when it continues a run; earlier ones are in the checkpoint. They
            change the fingerprint.
        identity: hashes of all settings, and of the files and the code that they name; empty: they are not known.
    """

    def __init__(
        self,
        folder: str,
        fingerprint: str,
        changes: Sequence[Change] = (),
        identity: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.path, self.fingerprint, self.identity = Path(folder) / "summary.json", fingerprint, dict(identity)
        self._new_changes, self.changes = list(changes), list(changes)
        self.final: dict[str, Any] | None = None
        self.best: dict[str, Any] | None = None
        self.totals = {"seconds": 0.0}
        self.data: dict[str, Any] | None = None
        """the identity of the data, on the first rank; None: a checkpoint of an earlier version has none"""
        self._earlier_identity: Mapping[str, Any] = {}
        self._is_new = True

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Describe the data; other data than those of a resumed run are a changed setting."""
        if not trainer.is_global_zero:
            return
        earlier, self.data = self.data, data_of(trainer).identity(MAX_LISTED)
        if earlier is not None and earlier["digest"] != self.data["digest"]:
            self._add_change(trainer, "data", earlier, self.data, _changed_sets(earlier, self.data))
        for name, (old, new) in changed_content(self._earlier_identity, self.identity).items():
            self._add_change(trainer, name, {"digest": old}, {"digest": new})

    def _add_change(
        self, trainer: Trainer, name: str, old: Mapping[str, Any], new: Mapping[str, Any], parts: Sequence[str] = ()
    ) -> None:
        """Note, and log, that a resumed run goes on with another content: of its data, a file, or the user's code."""
        change = Change(trainer.current_epoch, name, old["digest"], new["digest"])
        self.changes.append(change)
        log.warning("%s", ": ".join([str(change), *parts]))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Add the round to the sums, before an evaluation or a checkpoint reads them.

        The first round of a fit has taken the run directory, and its log: the summary of a run that goes on follows.
        """
        if self._is_new and trainer.current_epoch and self.path.exists():
            self._write(trainer, pl_module, trainer.current_epoch)
        self._is_new = False
        metrics = federation_of(pl_module).round_metrics
        self.totals["seconds"] += metrics["time/round_seconds"]
        if "time/simulated_seconds" in metrics:
            simulated = self.totals.get("simulated_seconds", 0.0)
            self.totals["simulated_seconds"] = simulated + metrics["time/simulated_seconds"]

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the summary of the rounds so far."""
        self._write(trainer, pl_module, trainer.current_epoch + 1)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Store the scores of a round."""
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        federation = federation_of(pl_module)
        scores = dict(federation.scores)
        self.final = {"round": trainer.current_epoch + 1, "metrics": scores}
        if trainer.is_global_zero:
            write_queries(self.path.with_name(QUERIES_FILE), federation.evaluator.queries, trainer.current_epoch + 1)
        monitor = federation.settings.evaluation.monitor
        best = self.best
        if monitor in scores and (best is None or comparable(scores[monitor]) > comparable(best["metrics"][monitor])):
            self.best = self.final

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Mark the run as finished, unless a signal ended it."""
        self._write(trainer, pl_module, trainer.current_epoch, ended_by(trainer))

    def state_dict(self) -> dict[str, Any]:
        """Return the scores and sums from which a resumed run continues."""
        changes = [change.as_json() for change in self.changes]
        scores = {"final": self.final, "best": self.best}
        return {**scores, "totals": self.totals, "changes": changes, "data": self.data, "identity": self.identity}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.final, self.best = state_dict["final"], state_dict["best"]
        self.changes = [*read_changes(state_dict.get("changes", [])), *self._new_changes]
        self.data, self._earlier_identity = state_dict.get("data"), state_dict.get("identity", {})
        sums = state_dict["totals"]
        self.totals = {name: sums[name] for name in ("seconds", "simulated_seconds") if name in sums}

    def _write(self, trainer: Trainer, pl_module: LightningModule, rounds: int, end: str | None = None) -> None:
        if not trainer.is_global_zero:
            return
        federation = federation_of(pl_module)
        settings, parts = federation.settings, federation.parts
        content = {
            "finished": end not in (None, "signal"),
            **({} if end is None else {"ended_by": end}),
            "method": type(settings.method).__name__,
            "fingerprint": fingerprint_after(self.fingerprint, self.changes),
            "identity": self.identity,
            "seed": settings.training_seed,
            "rounds": rounds,
            "changes": [change.as_json() for change in self.changes],
            **_listed(parts.names),
            "unseen": list(parts.federated.unseen),
            "data": self.data,
            "primary": federation.evaluator.primary,
            "final": self.final,
            "best": self.best,
            **{f"bytes_{name}": total for name, total in parts.ledger.totals.items()},
            **self.totals,
            **{name: value for listener in federation.listeners for name, value in listener.summary().items()},
            "logged": next((logger.record for logger in trainer.loggers if isinstance(logger, MetricsFile)), None),
            "ranks": trainer.world_size,
            "threads": settings.threads,
            "device": str(federation.device),
            "versions": versions(),
            "written": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }
        with replacing(self.path) as partial:
            partial.write_text(json.dumps(sealed(content), indent=2) + "\n")


def _changed_sets(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> list[str]:
    """Return the names of the data sets that two runs have not alike, if there are any, in one text."""
    old, new = earlier.get("sets", {}), later.get("sets", {})
    names = [name for name in dict.fromkeys([*old, *new]) if old.get(name) != new.get(name)]
    return [", ".join(names)] if names else []


def _listed(clients: list[str]) -> dict[str, Any]:
    """Return the clients by name; of many, only their number and a hash: the file is written after each round."""
    if len(clients) <= MAX_LISTED:
        return {"clients": clients}
    digest = hashlib.sha256("\n".join(clients).encode()).hexdigest()
    return {"clients": [], "num_clients": len(clients), "clients_sha256": digest}


def versions() -> dict[str, str]:
    """Return the versions of fedsim, of Python and of the libraries that results depend on."""
    numbers = {"fedsim": __version__, "python": platform.python_version()}
    for package in ("torch", "torchvision", "lightning", "numpy"):
        try:
            numbers[package] = version(package)
        except PackageNotFoundError:
            numbers[package] = "unknown"
    return numbers


class KeepConfig(Callback):
    """Keeps the configuration: in every checkpoint, and, when the run begins, in the run directory.

    Args:
        config_text: of config.yaml; None if it cannot be written: then an older file, of another run, is removed.
    """

    def __init__(self, config_text: str | None) -> None:
        self._text = config_text

    def write(self, folder: Path) -> None:
        """Write config.yaml."""
        path = folder / CONFIG_FILE
        if self._text is None:
            path.unlink(missing_ok=True)
            return
        with replacing(path) as partial:
            partial.write_text(self._text)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add the text, which the strategy writes into a file."""
        if self._text is not None:
            checkpoint[CONFIG_KEY] = self._text


class ScoreLastRound(Callback):
    """Schedules an evaluation after the last round, so that every run has scores of its last model.

    Without validation (``trainer.limit_val_batches: 0``) there is no evaluation.
    """

    def __init__(self) -> None:
        self._every: int | None = None

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set the interval to 1 at the start of the last round, which decides whether local models are kept."""
        every, last = trainer.check_val_every_n_epoch, num_rounds(trainer)
        if every is not None and last == trainer.current_epoch + 1:
            self._every, trainer.check_val_every_n_epoch = every, 1

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the trainer's interval."""
        if self._every is not None:
            self._every, trainer.check_val_every_n_epoch = None, self._every
