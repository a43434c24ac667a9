"""The end of a command's process, without the one of Python that takes apart each module and each object.

After an import of PyTorch and Lightning that takes 1.8 s of CPU time, as much as a third of a short command.
"""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress
from functools import cache

_codes: dict[int, int] = {}
"""process -> its exit code, once it is known: a fork has none"""


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
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # without a reader, closed, or None
            stream.flush()
    os._exit(code)
