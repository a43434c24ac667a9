"""The trials of a search on this machine: Optuna's study in the folder of the sweep, one line per change."""

from __future__ import annotations

import fcntl
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.storages.journal import JournalFileBackend, JournalStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from fedsim.core.errors import DataError, first_line
from fedsim.report.runs import STUDY_FILE

_NAME = "sweep"


class FileLock:
    """A lock between processes, as Optuna's journal wants it; its holder may take it again.

    It is a lock of the operating system, so that a killed process leaves it free. Optuna's own locks are files.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file, self._depth = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), 0
        except OSError as error:
            raise DataError(
                f"{path}: cannot be locked ({error.strerror}); remove it, or name another folder"
            ) from error

    def acquire(self) -> bool:
        """Wait until no other process has the lock; return True."""
        if not self._depth:
            fcntl.flock(self._file, fcntl.LOCK_EX)
        self._depth += 1
        return True

    def release(self) -> None:
        """Give the lock back."""
        self._depth -= 1
        if not self._depth:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


@dataclass(frozen=True, kw_only=True)
class TrialRow:
    """A trial of a search, for tables and figures."""

    number: int
    """Optuna's, from 0"""
    state: str
    """complete, pruned, failed, running or waiting"""
    score: float | None
    """of a complete trial, at its last evaluation; NaN if the run has diverged"""
    seen: Mapping[int, float]
    """evaluation, from 1 -> score"""
    settings: Mapping[str, Any]
    """option -> value, of the options that differ"""
    folder: Path
    same_as: int | None
    """the earlier trial with these settings, whose result it has"""
    error: str
    """of a failed one"""


@dataclass(frozen=True, kw_only=True)
class SearchTrials:
    """All trials of a search."""

    study: optuna.Study
    metric: str
    maximize: bool
    rows: tuple[TrialRow, ...]
    """by number; without failed trials that a later one repeats"""
    distributions: Mapping[str, BaseDistribution]
    """option -> its range or list"""

    @property
    def complete(self) -> list[TrialRow]:
        """The trials with a score, by number."""
        return [row for row in self.rows if row.score is not None and not math.isnan(row.score)]

    @property
    def records(self) -> list[TrialRow]:
        """The trials that were better than all before, by number; the last one is the best."""
        records = list[TrialRow]()
        for row in self.complete:
            if not records or self._value(row) > self._value(records[-1]):
                records.append(row)
        return records

    def _value(self, row: TrialRow) -> float:
        score = row.score or 0.0
        return score if self.maximize else -score


def open_study(folder: Path, maximize: bool, lock: FileLock) -> optuna.Study:
    """Open the study in a folder, or make one. A half line, which a power cut may have left at its end, is removed."""
    path = folder / STUDY_FILE
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # else a line for each change
    with lock, _reading(path):
        if path.is_file():
            journal = path.read_bytes()
            if not journal.endswith(b"\n"):
                os.truncate(path, journal.rfind(b"\n") + 1)
        of_journal: Any = lock  # of no class of Optuna's: that may be missing where types are checked
        storage = JournalStorage(JournalFileBackend(str(path), lock_obj=of_journal))
        direction = StudyDirection.MAXIMIZE if maximize else StudyDirection.MINIMIZE
        return optuna.create_study(storage=storage, study_name=_NAME, direction=direction, load_if_exists=True)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Name the file in an error of the block."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: is not a study of fedsim sweep ({first_line(error)}); was it edited?") from error


def read_trials(folder: Path) -> SearchTrials:
    """Read the trials of a search; raise DataError if the file is damaged."""
    path = folder / STUDY_FILE
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with _reading(path):
        study = optuna.load_study(study_name=_NAME, storage=JournalStorage(JournalFileBackend(str(path))))
        trials, metric = study.get_trials(deepcopy=False), str(study.user_attrs["metric"])
    repeated = {trial.user_attrs.get("repeats") for trial in trials}
    rows = tuple(_row(trial, folder) for trial in trials if trial.number not in repeated)
    return SearchTrials(
        study=study, metric=metric, maximize=study.direction == StudyDirection.MAXIMIZE, rows=rows,
        distributions={name: scale for trial in trials for name, scale in trial.distributions.items()},
    )  # fmt: skip


_STATES = {
    TrialState.COMPLETE: "complete", TrialState.PRUNED: "pruned", TrialState.FAIL: "failed",
    TrialState.RUNNING: "running", TrialState.WAITING: "waiting",
}  # fmt: skip


def _row(trial: FrozenTrial, folder: Path) -> TrialRow:
    attributes = trial.user_attrs
    score = None
    if trial.state == TrialState.COMPLETE and trial.value is not None:
        score = trial.value if math.isfinite(trial.value) else math.nan
    return TrialRow(
        number=trial.number, state=_STATES[trial.state], score=score, seen=trial.intermediate_values,
        settings=trial.params, folder=folder / str(attributes.get("folder", "")),
        same_as=attributes.get("same_as"), error=str(attributes.get("error", "")),
    )  # fmt: skip
