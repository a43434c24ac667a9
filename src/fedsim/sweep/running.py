"""Execute runs as subprocesses: one after another, or several at once, each with its share of the machine."""

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
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from fedsim.core.errors import ConfigError, RunsFailedError, RunStoppedError
from fedsim.core.parents import following
from fedsim.core.readable import has_file
from fedsim.sweep.finished import refuse_changed
from fedsim.sweep.local import Result, SweepRun, outcome_of

log = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
_GRACE = 300.0  # seconds for a run to end in order after an error of this process
_OF_ANOTHER_RUN = ("WANDB_RUN_ID", "WANDB_SWEEP_ID", "WANDB_SWEEP_PARAM_PATH")
_CHECK_EVERY = 0.1  # seconds between two checks of the processes
_END_OF_LOG = 4096  # bytes; they contain the last line about a round


class RunSource(Protocol):
    """Runs that are executed one after another, or several at once: a list, or a search that chooses each."""

    def take(self) -> tuple[int, SweepRun] | None:
        """Return the next run with its number; None if there is none at the moment."""

    def open_log(self, number: int, run: SweepRun) -> Any:
        """Open the file for the output of a run, empty, as a context manager."""

    def stops(self, number: int) -> bool:
        """Whether a running run is to end now, because others are better."""

    def finish(self, number: int, result: Result) -> None:
        """Receive the result of a run."""

    def title(self, number: int) -> str:
        """Return a short text for a run, for messages."""


class _Listed:
    """The runs of a list."""

    def __init__(self, runs: Sequence[SweepRun]) -> None:
        self._waiting, self._total = deque(enumerate(runs)), len(runs)
        self._results, self._logs = dict[int, Result](), dict[int, int]()

    @property
    def results(self) -> list[Result]:
        return [self._results[number] for number in sorted(self._results)]

    def take(self) -> tuple[int, SweepRun] | None:
        while self._waiting:
            number, run = self._waiting.popleft()
            if run.summary().get("finished") and not run.goes_on:
                return number, run
            if (log_file := run.claim()) is not None:
                self._logs[number] = log_file
                return number, run
            log.info("%s: %s: runs in another call", self.title(number), run.options)
        return None

    def open_log(self, number: int, run: SweepRun) -> Any:  # noqa: ARG002 - of the protocol
        os.truncate(self._logs[number], 0)
        return os.fdopen(self._logs.pop(number), "w")

    def stops(self, number: int) -> bool:  # noqa: ARG002 - of the protocol
        return False

    def finish(self, number: int, result: Result) -> None:
        self._results[number] = result
        if (log_file := self._logs.pop(number, None)) is not None:  # another call has finished the run meanwhile
            os.close(log_file)

    def title(self, number: int) -> str:
        return f"run {number + 1}/{self._total}"


@dataclass
class _Running:
    number: int
    run: SweepRun
    process: subprocess.Popen[bytes]
    share: dict[str, str]
    started: float
    """seconds, of time.monotonic"""
    last_logged: float
    """time of the last log line about it, in seconds"""
    is_stopped: bool = False
    """whether its source stops it"""

    def round(self) -> str:
        """Return the last line about a round in its log; empty if there is none."""
        with self.run.log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _END_OF_LOG))
            lines: list[str] = re.findall(r"^round \d+/.*", file.read().decode(errors="replace"), re.MULTILINE)
        return lines[-1].strip() if lines else ""


def execute_runs(runs: Sequence[SweepRun], metric: str, parallel: int = 1, line_interval: float = 60.0) -> list[Result]:
    """Execute runs, ``parallel`` of them at once. Finished runs of the same settings are skipped, others continued.

    Those that another call runs have no result.

    The score ``metric`` is logged after each run, and the progress of running ones every ``line_interval`` seconds.

    Raises:
        RunStoppedError: after a signal; the running processes have ended in order, too.
        ConfigError: if the program cannot be started, or a finished run has other settings.
    """
    going_on = refuse_changed(runs)
    for run in runs:
        has_file(run.log)  # an error before the first run is trained
    listed = _Listed([replace(run, goes_on=run.folder in going_on) for run in runs])
    execute(listed, metric, parallel, line_interval)
    return listed.results


def refuse_elsewhere(results: Sequence[Result], runs: Sequence[SweepRun]) -> None:
    """Raise RunsFailedError if runs have no result, because another call runs them."""
    if number := len(runs) - len(results):
        raise RunsFailedError(f"{number} of {len(runs)} runs run in another call; call again when it has ended")


def execute(source: RunSource, metric: str, parallel: int = 1, line_interval: float = 60.0) -> None:
    """Execute the runs of a source, as :func:`execute_runs`; after a signal it receives no result of an unfinished run.

    Raises:
        RunStoppedError: after a signal; the running processes have ended in order, too.
        ConfigError: if the program cannot be started, or the source refuses a run.
    """
    free, running = deque(shares_of_machine(parallel)), list[_Running]()
    with _passing_signals_on(running) as signals:
        while True:
            while free and not signals and (taken := source.take()) is not None:
                number, run = taken
                if run.summary().get("finished") and not run.goes_on:
                    _end(source, number, Result.of(run), metric, "finished before, ")
                    continue
                log.info("%s: %s -> %s", source.title(number), run.options, run.folder)
                running.append(_started(source, number, run, free.popleft()))
            if not running:
                break
            for each in [each for each in running if each.process.poll() is not None]:
                running.remove(each)
                free.append(each.share)
                result = Result.of(each.run, each.process.returncode, each.is_stopped)
                if not signals or not result.code or each.is_stopped:
                    seconds = time.monotonic() - each.started
                    _end(source, each.number, result, metric, after=f", {seconds:.0f} s")
            for each in running:
                _look_after(each, source, line_interval)
            time.sleep(_CHECK_EVERY if running else 0)
    if signals:
        raise RunStoppedError(signals[0])


def _end(source: RunSource, number: int, result: Result, metric: str, before: str = "", after: str = "") -> None:
    """Give a result to its source, and log it in one line."""
    settings = f"{result.run.options}: " if before else ""
    log.info("%s: %s%s%s%s", source.title(number), settings, before, outcome_of(result, metric), after)
    source.finish(number, result)


def _look_after(each: _Running, source: RunSource, line_interval: float) -> None:
    """Stop a running run if its source says so, and log its progress every ``line_interval`` seconds."""
    if not each.is_stopped and source.stops(each.number):
        each.is_stopped = True
        _signal(each.process, signal.SIGTERM)
    if time.monotonic() - each.last_logged >= line_interval:
        each.last_logged = time.monotonic()
        log.info("%s: %s", source.title(each.number), each.round() or "before its first round")


def shares_of_machine(parallel: int) -> list[dict[str, str]]:
    """Return environment variables that give each of ``parallel`` processes its share of the machine.

    GPUs are distributed over the processes; if there are too few, processes share a GPU. Each process gets an equal
    part of the cores. A single process gets everything and needs no variables.
    """
    if parallel == 1:
        return [{}]
    threads = str(max(1, len(os.sched_getaffinity(0)) // parallel))
    cores = {name: threads for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if name not in os.environ}
    gpus = _gpus()
    if not gpus:
        return [cores] * parallel
    parts = [gpus[i::parallel] or [gpus[i % len(gpus)]] for i in range(parallel)]
    return [{**cores, "CUDA_VISIBLE_DEVICES": ",".join(part)} for part in parts]


def _gpus() -> list[str]:
    """Return the names of the GPUs that this process may use, without importing torch, which takes seconds."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name.strip() for name in chosen.split(",") if name.strip()]
    with suppress(OSError, subprocess.SubprocessError):
        query = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]
        output = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout
        return [line.strip() for line in output.splitlines() if line.startswith("GPU-")]
    return []


def _started(source: RunSource, number: int, run: SweepRun, share: dict[str, str]) -> _Running:
    """Start a run's process; its output goes to its log."""
    run.folder.parent.mkdir(parents=True, exist_ok=True)
    with source.open_log(number, run) as file:
        try:  # in its own process group, it receives Ctrl-C only once: from this process
            process = subprocess.Popen(
                run.command, stdout=file, stderr=subprocess.STDOUT, env={**_environment(run), **share}, process_group=0,
                preexec_fn=following(signal.SIGTERM),  # a killed parent cannot pass a signal on
            )  # fmt: skip
        except OSError as error:
            raise ConfigError(f"command: cannot run {run.command[0]} ({error.strerror})") from error
    now = time.monotonic()
    return _Running(number, run, process, share, now, now)


@contextmanager
def _passing_signals_on(running: Sequence[_Running]) -> Iterator[list[int]]:
    """Pass signals on to the running processes, and yield the list of received ones; an error ends the processes."""
    signals: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the signature of handlers
        signals.append(number)
        for each in running:  # a closed terminal ends a fit at once, SIGTERM after its round
            _signal(each.process, signal.SIGTERM if number == signal.SIGHUP else number)

    heard = [number for number in _SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
    previous = {number: signal.signal(number, pass_on) for number in heard}  # nohup ignores SIGHUP
    try:
        yield signals
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        for each in running:  # only after an error
            _signal(each.process, signal.SIGTERM)
        for each in running:
            try:
                each.process.wait(_GRACE)
            except subprocess.TimeoutExpired:
                each.process.kill()


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal, and continue the process in case that it is stopped: it would not hear it."""
    process.send_signal(number)
    process.send_signal(signal.SIGCONT)


def _environment(run: SweepRun) -> dict[str, str]:
    """This process's environment, with its Python and fedsim first in the PATH, and W&B offline by default."""
    environment = {name: value for name, value in os.environ.items() if name not in _OF_ANOTHER_RUN}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", os.defpath)])
    environment.setdefault("WANDB_MODE", "offline")
    environment.setdefault("WANDB_RUN_GROUP", run.folder.parent.name)
    return environment
