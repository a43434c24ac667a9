"""Searches on this machine: Optuna chooses the settings of a trial from the results of others, or stops it early.

A trial is a run of the sweep with Optuna's number. The study is a file in the folder of the sweep, and each trial's log
is locked by its sweep and its run, which inherits the lock. So several sweeps can share a study, and a trial whose
log is free was left by a killed sweep: the next one continues it.
"""

from __future__ import annotations

import csv
import fcntl
import io
import json
import logging
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import optuna
from optuna.pruners import NopPruner, SuccessiveHalvingPruner
from optuna.storages.journal import JournalFileBackend, JournalStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from fedsim.core.errors import ConfigError, DataError
from fedsim.core.files import make_folder
from fedsim.core.metrics_rows import METRICS_FILE
from fedsim.core.readable import has_file
from fedsim.core.seeding import derive_seed
from fedsim.report.runs import STUDY_FILE
from fedsim.report.trials import STUDY, reading_study
from fedsim.sweep.finished import REMEDY, refuse_changed
from fedsim.sweep.local import Result, SweepRun, run_of_sample
from fedsim.sweep.sampling import Sample, Sweep, samples
from fedsim.sweep.space import choices_of, params_of, sample_of, space_of, suggest

log = logging.getLogger(__name__)

_LOCK_FILE = "trials.lock"
_WITH_RESULT = (TrialState.COMPLETE, TrialState.PRUNED)


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


def open_study(folder: Path, maximize: bool, lock: FileLock) -> optuna.Study:
    """Open the study in a folder, or make one. A half line, which a power cut may have left at its end, is removed."""
    path = folder / STUDY_FILE
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # else a line for each change
    is_begun = has_file(path)
    with lock, reading_study(path):
        if is_begun:
            journal = path.read_bytes()
            if not journal.endswith(b"\n"):
                os.truncate(path, journal.rfind(b"\n") + 1)
        of_journal: Any = lock  # of no class of Optuna's: that may be missing where types are checked
        storage = JournalStorage(JournalFileBackend(str(path), lock_obj=of_journal))
        direction = StudyDirection.MAXIMIZE if maximize else StudyDirection.MINIMIZE
        return optuna.create_study(storage=storage, study_name=STUDY, direction=direction, load_if_exists=True)


@dataclass
class _Claim:
    """A trial that this process runs."""

    trial: optuna.Trial
    run: SweepRun
    lock: int
    """the open log of the run, locked"""
    num_seen: int
    """evaluations that are in the study"""
    read_at: int = 0
    """time of the log of its evaluations when it was read, in ns"""

    def new_scores(self, metric: str) -> list[float]:
        """Return the scores of evaluations that are not in the study; nothing is read if the log is as before."""
        path = self.run.folder / METRICS_FILE
        changed = path.stat().st_mtime_ns if has_file(path) else 0
        if changed == self.read_at:
            return []
        self.read_at = changed
        return scores_in(path, metric)[self.num_seen :]


class Search:
    """The trials of a sweep, as a :class:`fedsim.sweep.running.RunSource`.

    Args:
        sweep: its method is bayes, or it stops runs early.
        root: folder of the run directories and the study.
        num_trials: largest number of trials, those of earlier calls included; failed ones that are repeated count once.
        seed: of the choices. Trial n draws from a stream of its own, so that a process that goes on repeats no draw.

    Raises:
        ConfigError: if the folder has the study of another sweep, or a finished run has other settings by now.
    """

    def __init__(self, sweep: Sweep, root: Path, num_trials: int, seed: int) -> None:
        self._sweep, self._root, self._num_trials, self._seed = sweep, root, num_trials, seed
        make_folder(root, "--run_dir")
        self._lock = FileLock(root / _LOCK_FILE)
        self._study = open_study(root, sweep.maximize, self._lock)
        self._study.pruner = NopPruner()
        if (stop := sweep.early_stop) is not None:
            self._study.pruner = SuccessiveHalvingPruner(min_resource=stop.first, reduction_factor=stop.eta)
        self._space = space_of(sweep.parameters)
        self._claims: dict[int, _Claim] = {}
        with self._lock:
            self._check_definition()
        drawn = [trial.params for trial in self._trials() if trial.params.keys() == self._space.keys()]
        if ended := refuse_changed([self._run(params) for params in drawn]):
            raise ConfigError(f"{min(ended)}: has ended by another limit than the command has now; {REMEDY}")
        with self._lock:
            self._repeat_failed()

    def take(self) -> tuple[int, SweepRun] | None:
        """Return a trial of a killed process, a failed one that is repeated, or a new one; None if there is none."""
        with self._lock:
            for trial in self._trials(TrialState.RUNNING):
                if trial.number not in self._claims and (claim := self._claim(trial)) is not None:
                    return trial.number, claim.run
            while self._has_next():
                if (claim := self._claim(self._ask())) is not None:
                    return claim.trial.number, claim.run
        return None

    def open_log(self, number: int, run: SweepRun) -> Any:  # noqa: ARG002 - of the protocol
        """Open the log, empty, by a copy of the locked file: so the run holds the lock, too."""
        os.truncate(self._claims[number].lock, 0)
        return os.fdopen(os.dup(self._claims[number].lock), "w")

    def stops(self, number: int) -> bool:
        """Report the run's new evaluations; return whether Optuna's halving stops it after one of them."""
        is_stopped = any(self._compared(number))
        if is_stopped:
            self._claims[number].trial.set_user_attr("stopped", True)
        return is_stopped

    def _compared(self, number: int) -> Iterator[bool]:
        """Report the run's new evaluations one by one; yield whether Optuna's halving would stop it after this one."""
        claim, stop = self._claims[number], self._sweep.early_stop
        for score in claim.new_scores(self._sweep.metric):
            claim.num_seen += 1
            claim.trial.report(score, claim.num_seen)
            is_compared = stop is not None and (stop.last is None or claim.num_seen <= stop.last)
            yield is_compared and claim.trial.should_prune()

    def finish(self, number: int, result: Result) -> None:
        """Write a result into the study; a run without the metric ends the search by a ConfigError."""
        if not result.is_pruned:
            [*self._compared(number)]  # evaluations after the last look: others are compared with all of them
        claim = self._claims.pop(number)
        try:
            if result.is_pruned:
                self._study.tell(number, state=TrialState.PRUNED)
            elif result.code:
                claim.trial.set_user_attr("error", result.reason)
                self._study.tell(number, state=TrialState.FAIL)
            else:
                self._study.tell(number, self._value(result))
        finally:
            os.close(claim.lock)

    def title(self, number: int) -> str:
        """Return the name of a trial."""
        return f"trial {number}"

    def results(self) -> list[Result]:
        """Return the results of all complete trials, also of other processes."""
        runs = {(run := self._run(trial.params)).folder: run for trial in self._trials(TrialState.COMPLETE)}
        return [Result.of(run) for run in runs.values()]

    def num_failed(self) -> int:
        """Return the number of failed trials that none repeats."""
        return len(self._failed())

    def _trials(self, *states: TrialState) -> list[FrozenTrial]:
        trials: list[FrozenTrial] = self._study.get_trials(deepcopy=False, states=states or None)
        return trials

    def _run(self, params: Mapping[str, Any]) -> SweepRun:
        return run_of_sample(self._sweep, self._sample(params), self._root)

    def _sample(self, params: Mapping[str, Any]) -> Sample:
        return sample_of(params, self._sweep.parameters)

    def _check_definition(self) -> None:
        """Write what the search is into the study; refuse a study of another one, by the first difference."""
        sweep = self._sweep
        definition = {
            "method": sweep.method, "metric": sweep.metric, "metric.goal": sweep.maximize, "--seed": self._seed,
            "command": [sweep.program, *sweep.command],
            "early_terminate": sweep.early_stop and asdict(sweep.early_stop),
        } | {f"parameters.{name}": asdict(parameter) for name, parameter in sweep.parameters.items()}  # fmt: skip
        definition = json.loads(json.dumps(definition, default=repr))
        before = self._study.user_attrs.get("definition")
        if before is None:
            self._study.set_user_attr("metric", sweep.metric)  # first: a study with a definition is whole
            self._study.set_user_attr("definition", definition)
        for field in {**definition, **(before or {})}:
            if before is not None and before.get(field) != definition.get(field):
                raise ConfigError(f"{sweep.name}: {field}: is not that of the trials in {self._root}; {REMEDY}")

    def _failed(self) -> list[FrozenTrial]:
        repeated = {trial.user_attrs.get("repeats") for trial in self._trials()}
        return [trial for trial in self._trials(TrialState.FAIL) if trial.number not in repeated]

    def _repeat_failed(self) -> None:
        """Let each failed trial of an earlier call, once, be the next one."""
        for trial in self._failed():
            self._study.enqueue_trial(trial.params, {"repeats": trial.number})

    def _has_next(self) -> bool:
        """Whether a failed trial waits, or there may be another one."""
        if self._has_reached_target():
            return False
        return bool(self._trials(TrialState.WAITING)) or len(self._first_trials()) < self._num_trials

    def _first_trials(self) -> list[FrozenTrial]:
        return [trial for trial in self._trials() if "repeats" not in trial.user_attrs]

    def _has_reached_target(self) -> bool:
        target, sign = self._sweep.target, 1 if self._sweep.maximize else -1
        scores = [trial.value for trial in self._trials(TrialState.COMPLETE) if trial.value is not None]
        return target is not None and any(sign * score >= sign * target for score in scores)

    def _ask(self) -> FrozenTrial:
        """Return a new trial; Optuna's sampler chooses for bayes, and the sweep's own for grid and random."""
        if self._sweep.method != "bayes" and not self._trials(TrialState.WAITING):
            number = len(self._first_trials())
            [sample] = islice(samples(self._sweep, number + 1, self._seed), number, None)
            self._study.enqueue_trial(params_of(sample, self._sweep.parameters))
        number = self._study.ask().number
        return self._trials()[number]

    def _claim(self, frozen: FrozenTrial) -> _Claim | None:
        """Take a trial that no process runs; None if its settings run now, or its result is known."""
        trial = None if frozen.params.keys() == self._space.keys() else self._drawn(frozen)
        run = self._run(frozen.params if trial is None else trial.params)
        if (lock := run.claim()) is None:
            return None
        trial = self._drawn(frozen) if trial is None else trial
        trial.set_user_attr("folder", run.folder.name)
        if self._takes_result(trial) or self._was_stopped(trial, run):
            os.close(lock)
            return None
        self._claims[trial.number] = _Claim(trial, run, lock, len(frozen.intermediate_values))
        return self._claims[trial.number]

    def _drawn(self, frozen: FrozenTrial) -> optuna.Trial:
        """Return a trial with all settings, those that it has and others from its own stream.

        Running trials count as bad ones, so that the next draws differ from them.
        """
        seed = derive_seed(self._seed, frozen.number, "search") % 2**32  # numpy's RandomState takes 32 bits
        self._study.sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
        trial = optuna.Trial(self._study, frozen._trial_id)  # only so can a process go on with another one's trial
        for name, distribution in self._space.items():
            suggest(trial, name, distribution)
        return trial

    def _was_stopped(self, trial: optuna.Trial, run: SweepRun) -> bool:
        """Give a trial the state pruned if a process that was killed then has stopped its run."""
        if not trial.user_attrs.get("stopped") or run.summary().get("finished"):
            return False
        self._study.tell(trial.number, state=TrialState.PRUNED)
        return True

    def _takes_result(self, trial: optuna.Trial) -> bool:
        """Give a trial the result of an earlier one with its settings: a run with the same settings has the same."""
        for earlier in self._trials(*_WITH_RESULT):
            if earlier.params == trial.params:
                log.info("%s: has the settings and the result of trial %d", self.title(trial.number), earlier.number)
                trial.set_user_attr("same_as", earlier.number)
                for step in earlier.intermediate_values.keys() - self._trials()[trial.number].intermediate_values:
                    trial.report(earlier.intermediate_values[step], step)
                value = earlier.value if earlier.state == TrialState.COMPLETE else None
                self._study.tell(trial.number, value, earlier.state)
                return True
        return False

    def _value(self, result: Result) -> float:
        """Return the score of a finished run; one that is not a number, of a diverged run, is the worst of all."""
        score, metric = result.score(self._sweep.metric), self._sweep.metric
        if score is None:
            names = sorted((result.summary.get("final") or {}).get("metrics", {}))
            shown = f"it has {', '.join(names[:8])}" if names else "it has no scores"
            raise ConfigError(f"{self._sweep.name}: metric.name: {result.run.folder} has no {metric}; {shown}")
        return score if not math.isnan(score) else (-math.inf if self._sweep.maximize else math.inf)


def scores_in(path: Path, metric: str) -> list[float]:
    """Return a run's scores by evaluation, as far as its log has whole lines; a repeated round counts once.

    Args:
        path: metrics.csv; if there is none, the run has no scores yet.
        metric: name of a column.
    """
    scores = dict[str, float]()
    with suppress(FileNotFoundError):
        lines = path.read_text(encoding="utf-8").rpartition("\n")[0]  # the last line may be on its way
        for row in csv.DictReader(io.StringIO(lines)):
            with suppress(ValueError):
                scores[row.get("epoch") or ""] = float(row.get(metric) or "")
    return list(scores.values())


def first_samples(sweep: Sweep, seed: int) -> list[Sample]:
    """Return samples with each value of each list at least once, to check their names before the first run."""
    lists = {name: tuple(choices_of(p).values()) for name, p in sweep.parameters.items() if p.values}
    count = max(map(len, lists.values()), default=1)
    random = samples(replace(sweep, method="random", run_cap=None), count, seed)
    return [sample | {name: vs[i % len(vs)] for name, vs in lists.items()} for i, sample in enumerate(random)]
