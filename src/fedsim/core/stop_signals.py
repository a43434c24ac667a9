"""Signals of schedulers outside the training of a fit, which has the callback Preemption: the command ends in order."""

from __future__ import annotations

import inspect
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

from fedsim.core.errors import StopSignal

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_UNHEARD = 10.0
"""seconds after which a main thread that has not heard a signal is stuck, in a disk or in foreign code"""
_AGAIN = 0.05
"""seconds until a signal that met an import is heard again"""
_PATIENCE = 60.0
"""seconds for a command to end in order after it has heard a signal, and for an import before that"""


@contextmanager
def listening(to_the_end: bool) -> Iterator[None]:
    """Let a signal raise :class:`StopSignal` in a block, in the main thread; handlers of other code stay.

    Within an import, a signal waits for the import's end, and so does Ctrl-C: C code of libraries ignores errors of its
    imports, and would go on with half a module.

    ``to_the_end``: the process ends after the block. Signals are then ignored, since nothing is left to be stopped.
    """
    is_main = threading.current_thread() is threading.main_thread()
    numbers = [number for number in _SIGNALS if is_main and signal.getsignal(number) is signal.SIG_DFL]
    if not numbers:
        yield
        return
    owner, around = os.getpid(), _imports(inspect.currentframe())
    heard, left, met_import = threading.Event(), threading.Event(), threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:  # a fork, which has no command to end
            _end_by(number)
            return
        if _waits(number, frame, around):
            met_import.set()
            return
        _handle(numbers, signal.SIG_IGN)  # what ends the command is not interrupted
        heard.set()
        raise StopSignal(number)

    def watch(number: int) -> None:
        if number not in numbers or not (heard.is_set() or signal.getsignal(number) is stop):
            return  # another one's, such as Preemption's
        if not (_is_heard(heard, met_import) and left.wait(_PATIENCE)) and not left.is_set():
            sys.stderr.write(f"fedsim: error: {StopSignal(number)}; its main thread was stuck\n")
            sys.stderr.flush()
            os._exit(128 + number)

    with _watched(watch), _whole_modules(around):
        _handle(numbers, stop)
        try:
            yield
        finally:
            left.set()
            _handle(numbers, signal.SIG_IGN if to_the_end else signal.SIG_DFL)


def _handle(numbers: Iterable[int], handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> None:
    for number in numbers:
        signal.signal(number, handler)


def _is_heard(heard: threading.Event, met_import: threading.Event) -> bool:
    """Wait until the main thread has heard a signal; return whether it has."""
    return heard.wait(_UNHEARD) or (met_import.is_set() and heard.wait(_PATIENCE))


def _end_by(number: int) -> None:
    """End this process as a signal without a handler does."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


@contextmanager
def _whole_modules(around: int) -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt outside imports only, of which ``around`` were going on before."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        if not _waits(number, frame, around):
            raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is interrupt:
            signal.signal(signal.SIGINT, before)


def _waits(number: int, frame: FrameType | None, around: int) -> bool:
    """Return whether a signal met an import in the main thread, and send it again soon if so."""
    if is_within := _imports(frame) > around:
        main = threading.main_thread().ident
        again = threading.Timer(_AGAIN, lambda: signal.pthread_kill(main, number) if main else None)
        again.daemon = True
        again.start()
    return is_within


def _imports(frame: FrameType | None) -> int:
    """Count the frames of Python's import system from ``frame`` outwards."""
    count = 0
    while frame is not None:
        count += frame.f_code.co_filename.startswith("<frozen importlib")
        frame = frame.f_back
    return count


@contextmanager
def _watched(watch: Callable[[int], None]) -> Iterator[None]:
    """Call ``watch`` in a thread with each signal, also while foreign code runs in the main thread, and no handler."""
    receiver, sender = os.pipe()
    os.set_blocking(sender, False)
    before = signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
    if before != -1:  # an event loop's, as in notebooks
        signal.set_wakeup_fd(before)
    _senders.append(sender)

    def receive() -> None:
        while number := os.read(receiver, 1):
            watch(number[0])
        os.close(receiver)

    threading.Thread(target=receive, name="fedsim signals", daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        _senders.remove(sender)
        os.close(sender)


_senders: list[int] = []
"""pipes on which this process notes its signals"""


_forking = threading.local()
"""the signals that a thread blocks, while it forks"""


def _hold_signals() -> None:
    """Let a signal of a fork wait until the fork has left its parent's pipe."""
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS if _senders else ())


def _release_signals() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _begin_fork() -> None:
    """Let a fork leave its parent's pipe alone: its signals are its own."""
    before = signal.set_wakeup_fd(-1) if _senders else -1
    if before not in (-1, *_senders):
        signal.set_wakeup_fd(before)
    _release_signals()


os.register_at_fork(before=_hold_signals, after_in_parent=_release_signals, after_in_child=_begin_fork)
