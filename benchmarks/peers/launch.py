"""One run of an engine: started, watched and summed up. Linux only: memory is added up from /proc."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TIMEOUT = 900.0
"""seconds after which a run has failed"""
QUIET = 0.1
"""cores that others may use during a run"""
SCRIPTS = {
    "plain": "plain.py",
    "pfl": "pfl_engine.py",
    "flower": "flower.py",
    "fedlab": "fedlab_engine.py",
    "blazefl": "blazefl_engine.py",
    "fedsim": "fedsim_engine.py",
}
TORCHRUN = {"plain", "pfl"}
"""engines that torchrun starts once per worker; the others start their workers themselves"""
VARIABLES = {
    "CUDA_VISIBLE_DEVICES": "",  # all engines on the CPU, with one thread per worker
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "FLWR_TELEMETRY_ENABLED": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
Case = tuple[str, str, int]
"""engine, model, workers"""


class EngineError(Exception):
    """An engine could not be installed or run; the message says why, in one line."""


@dataclass(frozen=True)
class Run:
    """What one run of an engine showed."""

    seconds: float
    """per round, median over the rounds after the first"""
    startup: float
    """seconds from the start of the process to the first round, with all that the first round does beyond a round"""
    peak: float
    """MB: largest sum of resident memory over the processes of the engine"""
    private: float
    """MB: largest such sum without pages of files and of shared memory"""
    loss: float
    version: str
    torch: str
    others: float
    """cores that were busy with anything but the engine, mean over the run"""


def call(command: Sequence[Any]) -> None:
    """Run a command in this folder.

    Raises:
        EngineError: with the last line of its output, if it fails.
    """
    done = subprocess.run([str(part) for part in command], cwd=HERE, env=environment(), capture_output=True, text=True)
    if done.returncode:
        raise EngineError(last_line(done.stdout + done.stderr))


def environment() -> dict[str, str]:
    """Return the variables of all subprocesses."""
    return {**os.environ, **VARIABLES}


def last_line(output: str) -> str:
    """Return the last line that says something; an error message usually ends with it."""
    lines = [line.strip() for line in output.splitlines() if line.strip(" =-")]
    return lines[-1] if lines else "no output"


def run_engine(python: Path, case: Case, work: Path) -> Run:
    """Run an engine once.

    Raises:
        EngineError: if it fails or takes too long.
    """
    engine, model, workers = case
    result, log = work.with_name("result.json"), work.with_name(f"{engine}-{model}-{workers}.log")
    result.unlink(missing_ok=True)
    many = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
    launcher = many if workers > 1 and engine in TORCHRUN else []
    options = ["--work", work, "--model", model, "--workers", workers, "--result", result]
    command = [str(part) for part in [python, *launcher, SCRIPTS[engine], *options]]
    with log.open("w") as output:
        started, busy = time.monotonic(), busy_seconds()
        process = subprocess.Popen(
            command, cwd=HERE, env=environment(), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        peak, private, cpu_time = watch(process, started + TIMEOUT)
    cores = (busy_seconds() - busy - cpu_time) / (time.monotonic() - started)
    if process.returncode or not result.is_file():
        raise EngineError(f"exit {process.returncode}: {last_line(log.read_text())} (see {log.name})")
    measured = json.loads(result.read_text())
    ends = measured.pop("ends")
    seconds = statistics.median(after - before for before, after in pairwise(ends))
    return Run(
        seconds=seconds, startup=ends[0] - started - seconds, peak=peak, private=private, others=cores, **measured
    )


def watch(process: subprocess.Popen[bytes], deadline: float) -> tuple[float, float, float]:
    """Wait for a process; return the largest memory of it and its descendants, all and private (MB), and CPU time (s).

    A process that takes too long is killed, and so is one when the wait for it is broken off.
    """
    peak, private, cpu_time = 0, 0, 0.0
    try:
        while process.poll() is None and time.monotonic() < deadline:
            pids = list(family(process.pid))
            sizes = [memory_of(pid) for pid in pids]
            peak = max(peak, sum(resident for resident, _ in sizes))
            private = max(private, sum(resident - shared for resident, shared in sizes))
            cpu_time = max(cpu_time, sum(cpu_seconds(pid) for pid in pids))
            time.sleep(0.1)
    finally:
        if process.poll() is None:
            for pid in list(family(process.pid)):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
    return peak / 1e6, private / 1e6, cpu_time


def family(pid: int) -> Iterator[int]:
    """Yield a process and all its descendants."""
    yield pid
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = file.read_text().split()
        except OSError:  # it has just ended
            continue
        for child in children:
            yield from family(int(child))


def memory_of(pid: int) -> tuple[int, int]:
    """Return the resident bytes of a process, and those of files and shared memory among them; 0 if it has ended."""
    try:
        _, resident, shared, *_ = map(int, Path(f"/proc/{pid}/statm").read_text().split())
    except OSError:
        return 0, 0
    size = os.sysconf("SC_PAGE_SIZE")
    return resident * size, shared * size


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process and of its ended children, 0 if it has ended itself."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(int(ticks) for ticks in fields[11:15]) / os.sysconf("SC_CLK_TCK")


def busy_seconds() -> float:
    """Return the CPU time of everything on this machine since it started, time stolen by its host included."""
    user, nice, system, _, _, irq, softirq, steal = Path("/proc/stat").read_text().split()[1:9]
    return sum(int(ticks) for ticks in (user, nice, system, irq, softirq, steal)) / os.sysconf("SC_CLK_TCK")


def wait_until_quiet(patience: float) -> None:
    """Wait until nothing else has worked for a second, but no longer than ``patience`` seconds."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        before = busy_seconds()
        time.sleep(1)
        if busy_seconds() - before < QUIET:
            return
