"""``fedsim sweep``: the runs of a sweep file as command lines, and a table of their results."""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from tabulate import tabulate

from fedsim.core.errors import ConfigError, DataError
from fedsim.core.metrics import comparable, score_text
from fedsim.core.names import one_line
from fedsim.core.readable import has_file
from fedsim.papers.files import with_paper
from fedsim.parsing.command_line import given
from fedsim.parsing.config_files import read_sections, with_shipped
from fedsim.parsing.options import check_arguments, check_options
from fedsim.report import Rule, compare_with, group_runs
from fedsim.report.layout import short_names
from fedsim.report.run_files import read_json
from fedsim.report.runs import Run
from fedsim.sweep.sampling import Sample, Sweep, command_of, samples

_read = cache(read_sections)  # runs of a sweep name the same files


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep: its settings, command and folder."""

    sample: Sample
    command: tuple[str, ...]
    """starts the run, or continues it from its checkpoint"""
    folder: Path
    """its run directory"""
    goes_on: bool = False
    """whether it is to go on although a limit of an earlier command has finished it"""

    @property
    def log(self) -> Path:
        """The file with its output."""
        return self.folder.with_name(f"{self.folder.name}.log")

    @property
    def options(self) -> str:
        """Its settings in one line."""
        return " ".join(f"{name}={value}" for name, value in self.sample.items())

    def summary(self) -> dict[str, Any]:
        """Return the content of its summary.json; empty if there is none.

        Raises:
            DataError: if the file cannot be read, or its scores are no numbers.
        """
        path = self.folder / "summary.json"
        content = read_json(path) if path.is_file() else {}
        for name in ("final", "best"):
            metrics = of_round.get("metrics", {}) if isinstance(of_round := content.get(name) or {}, Mapping) else None
            scores = metrics.values() if isinstance(metrics, Mapping) else ["no mapping"]
            if not all(score is None or type(score) in (int, float) for score in scores):
                raise DataError(f"{path}: {name} is not a round with its metrics; was it edited?")
        return content

    def claim(self) -> int | None:
        """Return the log, open and locked; None if another call runs this run.

        The run inherits the lock, so that a log is free when both have ended.
        """
        self.log.parent.mkdir(parents=True, exist_ok=True)
        has_file(self.log)  # a pipe would not open
        log = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(log)
            return None
        return log


def check_names(command: Sequence[str]) -> None:
    """Refuse options that ``fedsim fit`` lacks, also in configs; those of other programs are not checked.

    Raises:
        ConfigError: if there is no such option.
        DataError: if a config cannot be read.
    """
    for position, (program, first) in enumerate(itertools.pairwise(command)):
        if Path(program).name == "fedsim" and first == "fit":
            words = with_shipped(with_paper(command[position + 2 :]))
            check_options([word for word in command if word.startswith("--")], "fit")
            check_arguments(given(words, _read), "fit")


def check_varied(sweep: Sweep) -> None:
    """Refuse options and configs behind the varied ones that would replace their values, so that all runs were one."""
    words = [*sweep.command]
    while (place := next((i for i, word in enumerate(words) if word.startswith("${args")), None)) is not None:
        words = words[place + 1 :]
    if len(words) == len(sweep.command):
        return  # a command without the varied options
    varied = {next(given([f"--{name}=0"])).setting: name for name in sweep.parameters if name != "config"}
    with suppress(DataError):  # check_names names the file
        for entry in given(with_shipped(with_paper(words)), _read):
            if entry.setting in varied:
                option = varied[entry.setting]
                origin = entry.file or "an option"
                raise ConfigError(
                    f"{sweep.name}: --{option}: {origin} behind the varied options sets it, too, for all runs; "
                    "leave it out there"
                )


@dataclass(frozen=True)
class Result:
    """The result of a run."""

    run: SweepRun
    code: int
    """exit code of its process; 0 also for a run that was finished before"""
    summary: dict[str, Any]
    is_stopped: bool = False
    """whether its search has stopped it, because others were better"""
    fault: str = ""
    """of its summary, which cannot be read"""

    @classmethod
    def of(cls, run: SweepRun, code: int = 0, is_stopped: bool = False) -> Result:
        """Return the result of a run that has ended with ``code``; a summary that cannot be read is a failure."""
        try:
            return cls(run, code, run.summary(), is_stopped)
        except DataError as error:
            return cls(run, code or 1, {}, is_stopped, str(error))

    @property
    def is_pruned(self) -> bool:
        """Whether the run was stopped before its end: one that ended at the same moment is complete."""
        return self.is_stopped and not (self.code == 0 and self.summary.get("finished"))

    @property
    def reason(self) -> str:
        """Why the run failed: the fault of its summary, the error message in its log, or the log's last line."""
        lines = [line for line in self.run.log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("fedsim: error: ")]
        last = (errors or lines or ["its log is empty"])[-1]
        return self.fault or one_line(last.removeprefix("fedsim: error: "))

    @property
    def marks(self) -> list[str]:
        """The reasons why its scores are not those of its settings; see :attr:`fedsim.report.runs.Run.marks`."""
        return Run(self.run.folder, self.summary).marks

    def score(self, metric: str, evaluation: str = "final") -> float | None:
        """Return a score of the last evaluation (``final``) or of the round with the best val/mAP (``best``)."""
        value = (self.summary.get(evaluation) or {}).get("metrics", {}).get(metric)
        return None if value is None else float(value)


def runs_of_sweep(sweep: Sweep, root: Path, count: int | None = None, seed: int = 0) -> list[SweepRun]:
    """Return the distinct runs of a sweep; ``count`` and ``seed`` as in :func:`samples`.

    A run directory, in ``root``, is named after a hash of the command line, so that another call, or a file with more
    values, finds the finished runs.
    """
    runs = (run_of_sample(sweep, sample, root) for sample in samples(sweep, count, seed))
    return list({run.folder: run for run in runs}.values())


def run_of_sample(sweep: Sweep, sample: Sample, root: Path) -> SweepRun:
    """Return the run with these settings, in a folder of ``root``; if there is such a folder, it is continued."""
    folder = root / hashlib.sha256("\0".join(command_of(sweep, sample)).encode()).hexdigest()[:8]
    directory = {"run_dir": folder} | ({"ckpt_path": "last"} if folder.is_dir() else {})
    return SweepRun(sample, tuple(command_of(sweep, sample | directory)), folder)


def table_of(results: Sequence[Result], sweep: Sweep) -> str:
    """Return a table of the runs, the best first and failed ones last, with a line per failure below."""
    metric, shown = sweep.metric, options_that_differ(results)

    def order(result: Result) -> tuple[bool, bool, float]:
        score = result.score(metric)
        best = 0.0 if score is None else comparable(score if sweep.maximize else -score)
        return result.code != 0, score is None, -best

    rows = [
        [score_text(result.score(metric)) if result.code == 0 else "failed", score_text(result.score(metric, "best")),
         *(_value(result.run.sample[name]) for name in shown), ", ".join([str(result.run.folder), *result.marks])]
        for result in sorted(results, key=order)
    ]  # fmt: skip
    headers = [metric, "in best round", *short_names(shown), "run directory"]
    alignment = ("right", "right", *["left"] * (len(shown) + 1))
    notes = [f"failed: {r.run.options}: {r.reason} ({r.run.log})" for r in results if r.code]
    if results and not notes and all(result.score(metric) is None for result in results):
        notes.append(f"no run has {metric}: is the name right, and is it evaluated?")
    table = tabulate(rows, headers=headers, disable_numparse=True, colalign=alignment)
    legend = f"{metric}: at the last evaluation, and at the round with the best val/mAP"
    return "\n".join([table, "", legend, *notes])


def compare_results(results: Sequence[Result], table: str) -> str:
    """Return a table of the successful runs and a paper's numbers; runs that differ only in the seed are averaged.

    ``table`` names the paper, or its table, as for :func:`fedsim.report.compare_with`.
    """
    runs = {result.run.folder: result.run for result in results if result.code == 0}
    shown = [name for name in options_that_differ(results) if name != "seed_everything"]
    groups = [
        replace(group, label=", ".join([label, *group.runs[0].marks]) if label else group.label)
        for group in group_runs(list(runs))
        for label in [label_of(runs[group.runs[0].folder].sample, shown)]
    ]
    return compare_with(table, groups, "mAP", Rule(), is_given=False)


def options_that_differ(results: Sequence[Result]) -> list[str]:
    """Return the names of the settings that are not the same in all runs of a sweep."""
    names = results[0].run.sample if results else ()
    return [name for name in names if len({str(result.run.sample[name]) for result in results}) > 1]


def label_of(sample: Sample, shown: Sequence[str]) -> str:
    """Return a short text for a run: its settings, config files and rows of papers by name."""
    words = [
        Path(sample[name]).stem if name in ("config", "paper") else f"{short}={_value(sample[name])}"
        for name, short in zip(shown, short_names(shown), strict=True)
    ]
    return " ".join(words)


def outcome_of(result: Result, metric: str) -> str:
    """Return a short text for a result: its score or its error."""
    if result.is_pruned:
        return "stopped early, others are better"
    if result.code:
        return f"failed with exit code {result.code}: {result.reason}"
    return ", ".join([f"{metric} {score_text(result.score(metric))}", *result.marks])


def _value(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
