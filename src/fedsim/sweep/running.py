"""Jobs in processes of their own: one after another, or some side by side, each with its share of the machine."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from fedsim.core.errors import ConfigError, RunStoppedError
from fedsim.sweep.local import Result, SweepRun, outcome_of

log = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_OF_ANOTHER_RUN = ("WANDB_RUN_ID", "WANDB_SWEEP_ID", "WANDB_SWEEP_PARAM_PATH")
_LOOK_EVERY = 0.1  # seconds between two looks at the processes
_END_OF_LOG = 4096  # bytes; the last line about a round is in them


@dataclass
class _Running:
    """A job's process."""

    number: int
    job: SweepRun
    process: subprocess.Popen[bytes]
    share: dict[str, str]
    began: float
    spoke: float
    """when a line was last written about it"""

    def round(self) -> str:
        """Return the last line about a round in its log, or nothing."""
        with self.job.log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _END_OF_LOG))
            found: list[str] = re.findall(r"^round \d+/.*", file.read().decode(errors="replace"), re.MULTILINE)
        return found[-1].strip() if found else ""


def run_jobs(
    jobs: Sequence[SweepRun], metric: str, parallel: int = 1, noun: str = "draw", line_interval: float = 60.0
) -> list[Result]:
    """Run jobs, ``parallel`` of them at once. A finished one is skipped, an interrupted one continued.

    ``metric`` is shown after each job, which a ``noun`` names. A line every ``line_interval`` seconds says how far each
    is.

    Raises:
        RunStoppedError: if a signal asked to end; the running jobs have ended in order, too.
        ConfigError: if the program cannot be started.
    """
    results: dict[int, Result] = {}
    waiting, free = deque(enumerate(jobs)), deque(shares_of_machine(parallel))
    running: list[_Running] = []

    def where(number: int) -> str:
        return f"{noun} {number + 1}/{len(jobs)}"

    with _passing_signals_on(running) as heard:
        while running or (waiting and not heard):
            while waiting and free and not heard:
                number, job = waiting.popleft()
                if job.summary().get("finished"):
                    results[number] = Result(job, 0, job.summary())
                    told = f"finished before, {outcome_of(results[number], metric)}"
                    log.info("%s: %s: %s", where(number), job.options, told)
                    continue
                log.info("%s: %s -> %s", where(number), job.options, job.folder)
                running.append(_started(number, job, free.popleft()))
            for each in [each for each in running if each.process.poll() is not None]:
                running.remove(each)
                free.append(each.share)
                results[each.number] = Result(each.job, each.process.returncode, each.job.summary())
                seconds = time.monotonic() - each.began
                log.info("%s: %s, %.0f s", where(each.number), outcome_of(results[each.number], metric), seconds)
            for each in running:
                if time.monotonic() - each.spoke >= line_interval:
                    each.spoke = time.monotonic()
                    log.info("%s: %s", where(each.number), each.round() or "before its first round")
            if running:
                time.sleep(_LOOK_EVERY)
    if heard:
        raise RunStoppedError(heard[0])
    return [results[number] for number in sorted(results)]


def shares_of_machine(parallel: int) -> list[dict[str, str]]:
    """Return the variables of the environment that give each of ``parallel`` processes its share of the machine.

    GPUs are dealt; where there are fewer than processes, some share one. Libraries get equal parts of the cores. One
    process gets all, so it needs no variables.
    """
    if parallel == 1:
        return [{}]
    threads = str(max(1, len(os.sched_getaffinity(0)) // parallel))
    cores = {name: threads for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if name not in os.environ}
    gpus = _gpus()
    if not gpus:
        return [cores] * parallel
    dealt = [gpus[i::parallel] or [gpus[i % len(gpus)]] for i in range(parallel)]
    return [{**cores, "CUDA_VISIBLE_DEVICES": ",".join(own)} for own in dealt]


def _gpus() -> list[str]:
    """Return names of the GPUs that this process may use, without torch, whose import takes seconds."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name.strip() for name in chosen.split(",") if name.strip()]
    with suppress(OSError, subprocess.SubprocessError):
        query = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]
        found = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout
        return [line.strip() for line in found.splitlines() if line.startswith("GPU-")]
    return []


def _started(number: int, job: SweepRun, share: dict[str, str]) -> _Running:
    """Start a job's process; its output goes to its log."""
    job.folder.parent.mkdir(parents=True, exist_ok=True)
    with job.log.open("w") as file:
        try:  # in a process group of its own, Ctrl-C reaches it once: from here
            process = subprocess.Popen(
                job.command, stdout=file, stderr=subprocess.STDOUT, env={**_environment(job), **share}, process_group=0
            )
        except OSError as error:
            raise ConfigError(f"command: cannot run {job.command[0]} ({error.strerror})") from error
    now = time.monotonic()
    return _Running(number, job, process, share, now, now)


@contextmanager
def _passing_signals_on(running: Sequence[_Running]) -> Iterator[list[int]]:
    """Pass signals on to the running processes, and yield a list of those heard; an error ends the processes."""
    heard: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the signature of handlers
        heard.append(number)
        for each in running:
            each.process.send_signal(number)

    previous = {number: signal.signal(number, pass_on) for number in _SIGNALS}
    try:
        yield heard
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        for each in running:  # none, unless there was an error
            each.process.terminate()
            each.process.wait()


def _environment(job: SweepRun) -> dict[str, str]:
    """This process's own, in which the running Python and its fedsim are found first, and W&B needs no server."""
    environment = {name: value for name, value in os.environ.items() if name not in _OF_ANOTHER_RUN}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", os.defpath)])
    environment.setdefault("WANDB_MODE", "offline")
    environment.setdefault("WANDB_RUN_GROUP", job.folder.parent.name)
    return environment
