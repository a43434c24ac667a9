"""Ranks that a signal has stopped (SIGSTOP): they are continued when the run ends, so that they end, too.

A stopped process keeps its memory and its GPU until it is continued.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

from fedsim.core.run_lock import name_of_machine


def identity() -> str:
    """Return a line that only ranks of this machine, in the same container, can use: see :func:`continue_process`."""
    return f"{name_of_machine()} {os.getpid()}"


def continue_process(process_identity: str) -> None:
    """Continue the process of an :func:`identity`, if it is stopped on this machine."""
    machine, _, pid = process_identity.rpartition(" ")
    if machine == name_of_machine() and pid.isdecimal() and is_stopped(int(pid)):
        with suppress(OSError):  # it has ended
            os.kill(int(pid), signal.SIGCONT)


def is_stopped(pid: int) -> bool:
    """Whether a process has been stopped by a signal."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except (OSError, IndexError):
        return False
