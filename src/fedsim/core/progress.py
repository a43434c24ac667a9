"""Progress of this process's main thread: a count that only grows, which other threads read.

Every batch, decoded part, block of queries, scored model and wait for other ranks counts. A rank whose count stands
still hangs, so a method with a long step of its own calls :func:`note_progress` in it.
"""

from __future__ import annotations

_count = 0


def note_progress() -> None:
    """Count a finished piece of work, at almost no cost."""
    global _count
    _count += 1


def progress_count() -> int:
    """Return the number of pieces of work so far."""
    return _count
