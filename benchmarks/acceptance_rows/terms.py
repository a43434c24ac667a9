"""The words that all rows share: bench, outcome, and the ways to time and to compare."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch


class NotHereError(Exception):
    """This machine cannot show the promise; the message says why."""


@dataclass(frozen=True)
class Bench:
    """The machine that a row runs on."""

    device: torch.device
    gpus: int
    folder: Path
    """for fits, which several rows look at"""
    reduced: bool = False
    """small sizes: the rows are tried, speed is not judged"""

    @property
    def is_gpu(self) -> bool:
        """Whether the work is done by a GPU."""
        return self.device.type == "cuda"

    def need_gpu(self, why: str) -> None:
        """Leave the row on a machine without a GPU."""
        if not self.is_gpu:
            raise NotHereError(f"needs a GPU: {why}")

    def wait(self) -> None:
        """Wait for the device."""
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def median_ms(self, function: Callable[[], object], repeats: int) -> float:
        """Return the median of a call's times, in milliseconds, after one call to warm up."""
        times = []
        for _ in range(repeats + 1):
            self.wait()
            start = time.perf_counter()
            function()
            self.wait()
            times.append(1e3 * (time.perf_counter() - start))
        return statistics.median(times[1:])

    def forget_peak(self) -> None:
        """Begin to watch the GPU's memory: what is not used is given back first."""
        gc.collect()
        if self.is_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def used(self) -> int:
        """Return the bytes of tensors on the GPU."""
        return torch.cuda.memory_allocated(self.device) if self.is_gpu else 0

    def peak(self) -> int:
        """Return the most bytes of tensors on the GPU since :meth:`forget_peak`."""
        return torch.cuda.max_memory_allocated(self.device) if self.is_gpu else 0


@dataclass(frozen=True)
class Outcome:
    """The result of a row."""

    figure: str
    bar: str
    """what the figure is held against; empty: it is only shown"""
    holds: bool = True
    of_speed: bool = False
    """a figure of a GPU's speed or memory: on another machine it is shown and not judged"""


@dataclass(frozen=True)
class Row:
    """One promise."""

    name: str
    promise: str
    where: str
    """the document that makes it"""
    seconds: float
    """it may take; then it has failed"""
    check: Callable[[Bench], Outcome]
    quick: bool = True
    """whether its reduced form takes seconds"""
    gpus: int = 1
    """that it needs, where there are any"""
