"""Signals of schedulers outside the training of a fit, which has the callback Preemption: the command ends in order."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from fedsim.core.errors import StopSignal

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_PATIENCE = 60.0
"""seconds for a command to end in order; then its main thread is stuck, in a disk or in foreign code"""


@contextmanager
def listening(to_the_end: bool) -> Iterator[None]:
    """Let a signal raise :class:`StopSignal` in a block, in the main thread; handlers of other code stay.

    ``to_the_end``: the process ends after the block. Signals are then ignored, since nothing is left to be stopped.
    """
    is_main = threading.current_thread() is threading.main_thread()
    numbers = [number for number in _SIGNALS if is_main and signal.getsignal(number) is signal.SIG_DFL]
    owner, timers = os.getpid(), list[threading.Timer]()

    def stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - a handler's
        if os.getpid() != owner:  # a fork, which has no command to end
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        for each in numbers:  # what ends the command is not interrupted
            signal.signal(each, signal.SIG_IGN)
        timers.append(threading.Timer(_PATIENCE, _end, [number]))
        timers[-1].daemon = True
        timers[-1].start()
        raise StopSignal(number)

    for number in numbers:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()
        for number in numbers:
            signal.signal(number, signal.SIG_IGN if to_the_end else signal.SIG_DFL)


def _end(number: int) -> None:
    sys.stderr.write(f"fedsim: error: {StopSignal(number)}; its main thread was stuck\n")
    sys.stderr.flush()
    os._exit(128 + number)
