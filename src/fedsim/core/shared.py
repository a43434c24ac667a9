"""Memory that the processes of one machine share: folders in memory, arrays in them, and a counter.

All of it is files. A write is visible to the other processes at once, because all use the same pages of the kernel.
"""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import struct
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedsim.core.store import locked

_MEMORY = Path("/dev/shm")


def memory_folder() -> Path:
    """Return the folder whose files are in memory; if there is none, the temporary folder."""
    return _MEMORY if os.access(_MEMORY, os.W_OK) else slow_folder()


def slow_folder() -> Path:
    """Return the temporary folder."""
    return Path(tempfile.gettempdir())


def is_roomy(num_bytes: float) -> bool:
    """Whether files of this size, and as much again, fit into :func:`memory_folder`."""
    return shutil.disk_usage(memory_folder()).free > 2 * num_bytes


@contextmanager
def shared_array(folder: Path, name: str, shape: tuple[int, ...]) -> Iterator[tuple[Tensor, bool]]:
    """Yield the uint8 array of this name and shape in a folder, and whether it is new.

    The block must fill a new array; after the block, other processes can map it. If there is no room for the array, it
    is private to this process.
    """
    path = folder / hashlib.sha256(name.encode()).hexdigest()[:16]
    if path.exists():
        yield torch.from_numpy(np.memmap(path, np.uint8, "c", shape=shape)), False
        return
    partial = path.with_suffix(f".{os.getpid()}")
    try:
        with partial.open("xb") as file:  # allocated now: without room, a later write into the map kills the process
            os.posix_fallocate(file.fileno(), 0, math.prod(shape))
        pixels = torch.from_numpy(np.memmap(partial, np.uint8, "r+", shape=shape))
    except OSError:
        partial.unlink(missing_ok=True)
        yield torch.empty(shape, dtype=torch.uint8), True
        return
    yield pixels, True
    partial.replace(path)


class Counter:
    """Counts from 0 in each of many queues, for all processes that have opened the same ``path``.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     a, b = Counter(Path(folder) / "counter"), Counter(Path(folder) / "counter")
    ...     [a.take(1), b.take(1), b.take(1), a.take(2)]
    [0, 1, 2, 0]
    """

    _FORMAT = struct.Struct("<qq")  # the queue, and its next number

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        weakref.finalize(self, os.close, self._file)

    def take(self, queue: int) -> int:
        """Return the next number of ``queue``; queues are numbered from 1, and used one after another.

        The first call for a queue ends the queue before it. Late calls for a queue that has ended return 2**62.
        """
        with locked(self._file):
            content = os.pread(self._file, self._FORMAT.size, 0)
            current, number = self._FORMAT.unpack(content) if content else (0, 0)
            if current > queue:
                return 2**62
            number = number if current == queue else 0
            os.pwrite(self._file, self._FORMAT.pack(queue, number + 1), 0)
        return number
