"""Memory of tensors: keeping freed memory for the next batch, and recognising that memory ran out."""

from __future__ import annotations

import ctypes
import os

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


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a GPU or the machine ran out of memory; for the machine, torch has no error type of its own."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
