"""Memory of tensors: keeping freed memory for the next batch, that of CUDA graphs, recognising that it ran out."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence

import torch

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # numbers of glibc's options, <malloc.h>


def prepare_memory(device: torch.device) -> None:
    """Set up the process's memory for training on ``device``.

    On a CPU see :func:`keep_freed_memory`. With deterministic algorithms torch fills all new memory, to show programs
    that read it too early: on GPUs two of three kernels of a step. Nothing here does so, and it is switched off.
    """
    if device.type == "cpu":
        keep_freed_memory()
    if torch.are_deterministic_algorithms_enabled():
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined] # not in its stub


def keep_freed_memory() -> bool:
    """Let the process keep memory that it will need again with the next batch.

    By default glibc returns large blocks to the system at once, and fetches and zeroes each page of the next batch
    again: half the cost of augmenting a batch. Blocks above 32 MB (glibc's limit) are still returned, and the peak
    memory stays the same. Returns False with other C libraries, or if the user has settings (``MALLOC_...``).
    """
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # not glibc
        return False
    return bool(mallopt(_MMAP_THRESHOLD, 32 << 20)) and bool(mallopt(_TRIM_THRESHOLD, 2**31 - 1))


class GraphMemory:
    """The memory that CUDA graphs share if they run one after another, and the stream on which they are recorded.

    Memory of a graph cannot be used by anything else. torch gives a pool up with its last graph, so the last one stays
    until the next is recorded. ``device`` is a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self.last: torch.cuda.CUDAGraph | None = None
        """the last one that was recorded"""
        self.gave_up = False
        """whether a recording has failed, so that nobody tries again"""

    def record(self, generators: Sequence[torch.Generator], work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Return ``work`` as a graph. The host runs it, the GPU does not; random numbers come from ``generators``.

        Raises:
            RuntimeError: if the host waits for the GPU meanwhile, or does another thing that a graph cannot hold.
        """
        graph = torch.cuda.CUDAGraph()
        for generator in generators:
            graph.register_generator_state(generator)
        pool = None if self.last is None else self.last.pool()
        # other threads may ask the GPU for something meanwhile: those of NCCL, of page-locked memory
        with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
            work()
        self.last = graph
        return graph

    def on_its_stream(self, work: Callable[[], None]) -> None:
        """Do ``work`` as usual, but on the stream of recordings: autograd and libraries then know that one."""
        around = torch.cuda.current_stream()
        self._stream.wait_stream(around)
        with torch.cuda.stream(self._stream):
            work()
        around.wait_stream(self._stream)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a GPU or the machine ran out of memory; for the machine, torch has no error type of its own."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
