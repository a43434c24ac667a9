"""Seconds, CPU-seconds and memory of a process that trains round after round; needs NumPy only."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np


class RoundClock:
    """Notes time and resident memory, from now on: those of the assembly, then those of each round."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        self.megabytes: list[float] = []
        self.before = resident_megabytes()
        self._mark()

    def begin_rounds(self) -> None:
        """The assembly is over."""
        self.assembly = (time.perf_counter() - self.now, time.process_time() - self.cpu)
        self.start_megabytes = resident_megabytes()
        self._mark()

    def end_round(self) -> None:
        """A round is over."""
        self.seconds.append(time.perf_counter() - self.now)
        self.cpu_seconds.append(time.process_time() - self.cpu)
        self.megabytes.append(resident_megabytes())
        self._mark()

    def result(self, clients: int) -> dict[str, float]:
        """Return medians over the rounds after the first fifth, and the memory."""
        skip = len(self.seconds) // 5
        slope = np.polyfit(np.arange(skip, len(self.seconds)), self.megabytes[skip:], 1)[0]
        return {
            "assembly_seconds": self.assembly[0],
            "assembly": self.assembly[1],
            "kb": 1024 * (self.start_megabytes - self.before) / clients,
            "cpu": float(np.median(self.cpu_seconds[skip:])),
            "seconds": float(np.median(self.seconds[skip:])),
            "peak": peak_megabytes(),
            "slope": float(slope),
        }

    def _mark(self) -> None:
        self.now, self.cpu = time.perf_counter(), time.process_time()


def resident_megabytes() -> float:
    """Memory of this process that is in RAM."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def peak_megabytes() -> float:
    """The largest resident memory of this process so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 2**10
