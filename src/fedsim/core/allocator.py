"""Memory of tensors: keep freed memory for the next batch, share a pool among CUDA graphs, recognise out-of-memory."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence

import torch

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # numbers of glibc's options, <malloc.h>


def prepare_memory(device: torch.device) -> None:
    """Set up the process's memory for training on ``device``.

    On a CPU, see :func:`keep_freed_memory`. With deterministic algorithms, torch fills all new memory, to expose reads
    of uninitialised memory; on GPUs, two of three kernels of a step do only that. fedsim has no such reads, so the
    filling is switched off.
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
    """The memory pool of CUDA graphs that are replayed one after another, and the stream on which they are captured.

    Other work cannot use the memory of a graph. torch frees a pool with its last graph, so the last graph is kept until
    the next one is captured. ``device`` is a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self.last: torch.cuda.CUDAGraph | None = None
        """the graph that was captured last"""
        self.gave_up = False
        """whether a capture has failed; then no further graph is captured"""

    def capture(self, generators: Sequence[torch.Generator], work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Capture ``work`` as a graph and return the graph; random numbers come from ``generators``.

        During the capture the host runs ``work``, but the GPU does not.

        Raises:
            RuntimeError: if the host waits for the device meanwhile, or does anything else that cannot be captured.
        """
        graph = torch.cuda.CUDAGraph()
        for generator in generators:
            graph.register_generator_state(generator)
        pool = None if self.last is None else self.last.pool()
        # other threads may call CUDA meanwhile: those of NCCL and of page-locked memory
        with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
            work()
        self.last = graph
        return graph

    def on_its_stream(self, work: Callable[[], None]) -> None:
        """Run ``work`` without a capture, but on its stream, to which autograd and libraries then adapt."""
        caller_stream = torch.cuda.current_stream()
        self._stream.wait_stream(caller_stream)
        with torch.cuda.stream(self._stream):
            work()
        caller_stream.wait_stream(self._stream)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a GPU or the machine ran out of memory; for the machine, torch has no error type of its own."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
