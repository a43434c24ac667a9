"""Writing files so that a reader sees the old one or the new one, never half of it, not even after a power cut."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["flush_directory", "flush_file", "replacing"]


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path to write to; it takes the place of ``path`` when the block ends, and vanishes when it fails.

    Folders on the way are created.

    Args:
        path: the file to write.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".tmp")
    try:
        yield partial
        flush_file(partial)
        partial.replace(path)
        flush_directory(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def flush_file(path: Path) -> None:
    """Wait until a file's content is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_directory(path: Path) -> None:
    """Wait until the names in a directory are on the disk."""
    flush_file(path)
