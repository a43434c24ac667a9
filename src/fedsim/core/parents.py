"""Processes that end with their parent, also if it is killed: the kernel sends them a signal then (Linux)."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable
from functools import partial

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_prctl = getattr(ctypes.CDLL(None), "prctl", None)  # looked up here: a forked child should load nothing


def follow_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Let this process, a child of ``parent``, receive the signal ``number`` when the parent has ended.

    The setting stays through ``exec``; children of this process do not inherit it.
    """
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, int(number))
    if os.getppid() != parent:  # it has ended before the call
        os.kill(os.getpid(), number)


def following(number: int = signal.SIGKILL) -> Callable[[], None]:
    """Return the ``preexec_fn`` of a child that receives the signal ``number`` when this process has ended."""
    return partial(follow_parent, os.getpid(), number)
