"""Writing files so that a reader sees the old one or the new one, never half of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["replacing"]


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
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
