"""Memory of tensors: what the C library does with what they give back, and how one sees that there is none left."""

from __future__ import annotations

import ctypes
import os

import torch

__all__ = ["is_out_of_memory", "keep_freed_memory"]

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # numbers of glibc's options, <malloc.h>


def keep_freed_memory() -> bool:
    """Let the process keep memory that it will need again with the next batch.

    By default glibc returns large blocks to the system at once, and each page of the next batch is fetched, and filled
    with zeros, anew: half of what augmenting a batch costs. Blocks above 32 MB, glibc's limit for this, and the peak of
    the memory in use stay as they are.

    Returns:
        whether it did: not with other C libraries, nor against the user's own settings (``MALLOC_...``).
    """
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # not glibc
        return False
    return bool(mallopt(_MMAP_THRESHOLD, 32 << 20)) and bool(mallopt(_TRIM_THRESHOLD, 2**31 - 1))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, that of a GPU or of the machine, for which torch has no type of its own."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
