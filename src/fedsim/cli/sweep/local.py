"""``fedsim sweep``: the draws of a sweep file as command lines, or run one after another on this machine."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from tabulate import tabulate

from fedsim.cli.report import Rule, compare_with, group_runs
from fedsim.cli.sweep.file import Draw, Sweep, command_of, draws
from fedsim.cli.verdicts import one_line
from fedsim.core.errors import ConfigError, RunStoppedError

log = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_OF_ANOTHER_RUN = ("WANDB_RUN_ID", "WANDB_SWEEP_ID", "WANDB_SWEEP_PARAM_PATH")


@dataclass(frozen=True)
class Job:
    """One draw and where it goes."""

    draw: Draw
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

    job: Job
    code: int
    """of its process; 0 also for a draw that was finished before"""
    summary: dict[str, Any]

    def score(self, metric: str, which: str = "final") -> float | None:
        """Return a score of the last evaluation (``final``) or of the round with the best val/mAP (``best``)."""
        value = (self.summary.get(which) or {}).get("metrics", {}).get(metric)
        return None if value is None else float(value)


def plan_jobs(sweep: Sweep, root: Path, count: int | None = None, seed: int = 0) -> list[Job]:
    """Return one job per draw, equal ones once; ``count`` and ``seed`` are those of :func:`draws`.

    A run directory, in ``root``, is named after a hash of the command line, so that another call, or a file with more
    values, finds the draws that are done.
    """
    jobs: dict[Path, Job] = {}
    for draw in draws(sweep, count, seed):
        folder = root / hashlib.sha256("\0".join(command_of(sweep, draw)).encode()).hexdigest()[:8]
        own = {"run_dir": folder} | ({"ckpt_path": "last"} if folder.is_dir() else {})
        jobs[folder] = Job(draw, tuple(command_of(sweep, draw | own)), folder)
    return list(jobs.values())


def run_jobs(jobs: Sequence[Job], metric: str) -> list[Result]:
    """Run jobs one after another. A finished one is skipped, an interrupted one continued from its last checkpoint.

    ``metric`` is shown after each.

    Raises:
        RunStoppedError: if a signal asked to end; the running draw has ended in order, too.
        ConfigError: if the program cannot be started.
    """
    results = []
    for number, job in enumerate(jobs, 1):
        where = f"draw {number}/{len(jobs)}"
        if job.summary().get("finished"):
            result = Result(job, 0, job.summary())
            log.info("%s: %s: finished before, %s", where, job.options, _outcome(result, metric))
        else:
            log.info("%s: %s -> %s", where, job.options, job.folder)
            started = time.monotonic()
            code = _run(job)
            result = Result(job, code, job.summary())
            log.info("%s: %s, %.0f s", where, _outcome(result, metric), time.monotonic() - started)
        results.append(result)
    return results


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

    ``which`` names the paper, or its table, as for :func:`fedsim.cli.report.compare_with`.
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


def _label(draw: Draw, shown: Sequence[str]) -> str:
    """A draw in few words: of a config file, or a paper's row, its name."""
    words = [
        Path(draw[name]).stem if name in ("config", "paper") else f"{short}={_value(draw[name])}"
        for name, short in zip(shown, _short_names(shown), strict=True)
    ]
    return " ".join(words)


def _run(job: Job) -> int:
    """Run a job's process to its end, and return its exit code; signals are passed on to it."""
    heard: list[int] = []
    job.folder.parent.mkdir(parents=True, exist_ok=True)
    with job.log.open("w") as file:
        try:  # in a process group of its own, Ctrl-C reaches it once: from here
            process = subprocess.Popen(
                job.command, stdout=file, stderr=subprocess.STDOUT, env=_environment(job), process_group=0
            )
        except OSError as error:
            raise ConfigError(f"command: cannot run {job.command[0]} ({error.strerror})") from error

        def pass_on(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the signature of handlers
            heard.append(number)
            process.send_signal(number)

        previous = {number: signal.signal(number, pass_on) for number in _SIGNALS}
        try:
            code = process.wait()
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
    if heard:
        raise RunStoppedError(heard[0])
    return code


def _environment(job: Job) -> dict[str, str]:
    """This process's own, in which the running Python and its fedsim are found first, and W&B needs no server."""
    environment = {name: value for name, value in os.environ.items() if name not in _OF_ANOTHER_RUN}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", os.defpath)])
    environment.setdefault("WANDB_MODE", "offline")
    environment.setdefault("WANDB_RUN_GROUP", job.folder.parent.name)
    return environment


def _outcome(result: Result, metric: str) -> str:
    failed = f"failed with exit code {result.code}"
    return f"{failed}: {_reason(result.job)}" if result.code else f"{metric} {_text(result.score(metric))}"


def _reason(job: Job) -> str:
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
