"""``fedsim sweep``: the draws of a sweep file as command lines, and a table of how they ended."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tabulate import tabulate

from fedsim.parsing.error_lines import one_line
from fedsim.report import Rule, compare_with, group_runs
from fedsim.sweep.file import Sample, Sweep, command_of, draws


@dataclass(frozen=True)
class SweepRun:
    """One draw and where it goes."""

    draw: Sample
    command: tuple[str, ...]
    """starts it, or continues it where a checkpoint was left"""
    folder: Path
    """its run directory"""

    @property
    def log(self) -> Path:
        """What it prints."""
        return self.folder.with_name(f"{self.folder.name}.log")

    @property
    def options(self) -> str:
        """The draw, for people."""
        return " ".join(f"{name}={value}" for name, value in self.draw.items())

    def summary(self) -> dict[str, Any]:
        """Return the content of its summary.json; empty where there is none."""
        path = self.folder / "summary.json"
        return dict(json.loads(path.read_text())) if path.is_file() else {}


@dataclass(frozen=True)
class Result:
    """How a draw ended."""

    job: SweepRun
    code: int
    """of its process; 0 also for a draw that was finished before"""
    summary: dict[str, Any]

    def score(self, metric: str, which: str = "final") -> float | None:
        """Return a score of the last evaluation (``final``) or of the round with the best val/mAP (``best``)."""
        value = (self.summary.get(which) or {}).get("metrics", {}).get(metric)
        return None if value is None else float(value)


def plan_jobs(sweep: Sweep, root: Path, count: int | None = None, seed: int = 0) -> list[SweepRun]:
    """Return one job per draw, equal ones once; ``count`` and ``seed`` are those of :func:`draws`.

    A run directory, in ``root``, is named after a hash of the command line, so that another call, or a file with more
    values, finds the draws that are done.
    """
    jobs: dict[Path, SweepRun] = {}
    for draw in draws(sweep, count, seed):
        folder = root / hashlib.sha256("\0".join(command_of(sweep, draw)).encode()).hexdigest()[:8]
        own = {"run_dir": folder} | ({"ckpt_path": "last"} if folder.is_dir() else {})
        jobs[folder] = SweepRun(draw, tuple(command_of(sweep, draw | own)), folder)
    return list(jobs.values())


def table_of(results: Sequence[Result], sweep: Sweep) -> str:
    """Return a table, best draw first, failed ones last, with a line per failure below."""
    metric, shown = sweep.metric, _differing(results)

    def order(result: Result) -> tuple[bool, bool, float]:
        score = result.score(metric)
        return result.code != 0, score is None, 0.0 if score is None else -score if sweep.maximize else score

    rows = [
        [_text(result.score(metric)) if result.code == 0 else "failed", _text(result.score(metric, "best")),
         *(_value(result.job.draw[name]) for name in shown), str(result.job.folder)]
        for result in sorted(results, key=order)
    ]  # fmt: skip
    headers = [metric, "in best round", *_short_names(shown), "run directory"]
    alignment = ("right", "right", *["left"] * (len(shown) + 1))
    failures = [f"failed: {r.job.options}: {_reason(r.job)} ({r.job.log})" for r in results if r.code]
    table = tabulate(rows, headers=headers, disable_numparse=True, colalign=alignment)
    legend = f"{metric}: at the last evaluation, and at the round with the best val/mAP"
    return "\n".join([table, "", legend, *failures])


def compare_results(results: Sequence[Result], which: str) -> str:
    """Return the draws that have not failed beside a paper's numbers, those that differ in the seed alone as one.

    ``which`` names the paper, or its table, as for :func:`fedsim.report.compare_with`.
    """
    jobs = {result.job.folder: result.job for result in results if result.code == 0}
    shown = [name for name in _differing(results) if name != "seed_everything"]
    groups = [
        replace(group, label=_label(jobs[group.runs[0].folder].draw, shown) or group.label)
        for group in group_runs(list(jobs))
    ]
    return compare_with(which, groups, "mAP", Rule(), is_given=False)


def _differing(results: Sequence[Result]) -> list[str]:
    """Options that are not the same in all draws."""
    names = results[0].job.draw if results else ()
    return [name for name in names if len({str(result.job.draw[name]) for result in results}) > 1]


def _label(draw: Sample, shown: Sequence[str]) -> str:
    """A draw in few words: of a config file, or a paper's row, its name."""
    words = [
        Path(draw[name]).stem if name in ("config", "paper") else f"{short}={_value(draw[name])}"
        for name, short in zip(shown, _short_names(shown), strict=True)
    ]
    return " ".join(words)


def outcome_of(result: Result, metric: str) -> str:
    """Return a result in a few words."""
    failed = f"failed with exit code {result.code}"
    return f"{failed}: {_reason(result.job)}" if result.code else f"{metric} {_text(result.score(metric))}"


def _reason(job: SweepRun) -> str:
    """The error message in a job's log, or its last line."""
    lines = [line for line in job.log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("fedsim: error: ")]
    return one_line((errors or lines or ["it said nothing"])[-1].removeprefix("fedsim: error: "))


def _text(score: float | None) -> str:
    return "-" if score is None else f"{score:.4f}"


def _value(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _short_names(names: Sequence[str]) -> list[str]:
    """The last part of each option's name, where that is not ambiguous."""
    last = Counter(name.rpartition(".")[2] for name in names)
    return [short if last[short := name.rpartition(".")[2]] == 1 else name for name in names]
