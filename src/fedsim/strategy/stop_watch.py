"""The end of a process that a signal asked to end, also while its main thread is stuck: in a disk, a lock, a reader."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from fedsim.core.errors import RunStoppedError

PATIENCE = 10.0
"""seconds from the deadline of a stop to the forced end of a process whose main thread does not hear it"""
_PERIOD = 0.2  # seconds between two looks


class StopWatch:
    """A thread that calls ``end`` once, :data:`PATIENCE` seconds after the deadline, unless it is closed before.

    Args:
        deadline: returns the time.monotonic() at which the round must end; None: no signal came.
        waits: returns whether the main thread is at work that should not be cut short, such as a checkpoint.
        end: ends the process.
    """

    def __init__(
        self, deadline: Callable[[], float | None], waits: Callable[[], bool], end: Callable[[], object]
    ) -> None:
        self._deadline, self._waits, self._end = deadline, waits, end
        self._closing = threading.Event()
        threading.Thread(target=self._watch, name="fedsim stop", daemon=True).start()

    def close(self) -> None:
        """Stop watching."""
        self._closing.set()

    def _watch(self) -> None:
        while not self._closing.wait(_PERIOD):
            deadline = self._deadline()
            if deadline is not None and time.monotonic() > deadline + PATIENCE and not self._waits():
                if not self._closing.is_set():
                    self._end()
                return


def hear_sigterm(ask: Callable[[int], object], is_alone: bool) -> None:
    """Let SIGTERM end a test or a prediction, until Lightning restores the handlers: its own one only sets a flag.

    A rank alone leaves at once; one of several calls ``ask`` with the signal, so that all leave together.
    """

    def stop(number: int, _: FrameType | None) -> None:
        if is_alone:
            raise RunStoppedError(number)
        ask(number)

    if threading.current_thread() is threading.main_thread():
        handler: Any = stop
        signal.signal(signal.SIGTERM, handler)
