"""Ends a command's process without Python's own end, which takes apart each module and each object.

Once PyTorch and Lightning are imported, Python's end takes 1.6 to 2.0 s of CPU time: up to a third of a short command.
"""

from __future__ import annotations

import atexit
import gc
import io
import os
import sys
from contextlib import suppress
from functools import cache

_codes: dict[int, int] = {}
"""process -> its exit code, once it is known: a fork has none"""
_BUFFERED = {io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom}


@cache
def prepare_quick_end() -> None:
    """Let this process end as soon as its exit handlers have run that are registered later, if its code is known."""
    atexit.register(_end)


def end_quickly(code: int) -> None:
    """Set the exit code of a process that has nothing left to do."""
    _codes[os.getpid()] = code


def _end() -> None:
    if (code := _codes.get(os.getpid())) is None:  # by an error, or in a fork
        return
    files = [thing for thing in gc.get_objects() if type(thing) in _BUFFERED]  # which users' parts have left open
    for stream in (*files, sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # without a reader, closed, or None
            stream.flush()
    os._exit(code)
