"""Whether the main thread of this process gets on: other threads look at it, so its rank can end when it hangs.

Work that fedsim counts is progress (:mod:`fedsim.core.progress`). Without it, a thread that neither computes nor wakes
up hangs: it sleeps, or waits for a lock, a pipe or a disk that never answers. A thread that computes may be in a loop
that never ends or in one long step of a method; it has :data:`BUSY` times as long.
"""

from __future__ import annotations

import sys
import sysconfig
import threading
from pathlib import Path

from fedsim.core.progress import progress_count

BUSY = 5
"""a thread that computes without progress hangs after so many times the silence"""
_LIBRARIES = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "<")
"""beginnings of the names of files that are not the user's"""


class MainThread:
    """The thread that creates this object, seen by another one."""

    def __init__(self) -> None:
        self._ident = threading.get_ident()
        self._status = Path(f"/proc/self/task/{threading.get_native_id()}")
        self._count, self._use = -1, ""
        self._looks = 0  # without progress
        self._looks_at_rest = 0  # without progress, and without a sign of work

    def look(self) -> None:
        """Compare the thread with the last look; to be called regularly."""
        count, use = progress_count(), self._used()
        self._looks = self._looks + 1 if count == self._count else 0
        self._looks_at_rest = self._looks_at_rest + 1 if count == self._count and use == self._use else 0
        self._count, self._use = count, use

    def hangs(self, looks: float) -> bool:
        """Whether so many looks in a row, or :data:`BUSY` times as many at a thread that computes, saw no progress."""
        return self._looks_at_rest > looks or self._looks > BUSY * looks

    def place(self) -> str:
        """Return the line at which the thread is, outside Python's and other packages' own code if possible."""
        innermost = frame = sys._current_frames().get(self._ident)
        while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
            frame = frame.f_back
        frame = frame or innermost
        if frame is None:
            return "after its end"
        return f"{Path(frame.f_code.co_filename).name}, line {frame.f_lineno} ({frame.f_code.co_name})"

    def _used(self) -> str:
        """Return a text that changes when the thread computes or wakes up; without /proc, one that always changes."""
        try:
            lines = (self._status / "status").read_text().splitlines()
            ticks = (self._status / "stat").read_text().rpartition(")")[2].split()[11:13]  # utime, stime
        except OSError:
            return f"unknown {self._looks}"
        return " ".join([*ticks, *(line for line in lines if "ctxt_switches" in line)])
