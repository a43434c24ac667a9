"""Folders of files that ranks share, removed with their owner: they may fill the machine's memory.

The owner holds the lock of a file in the folder for as long as it lives; the kernel releases the lock of a process that
ends in any way. So three ways remove a folder: its owner; the owner's end by a signal, or by another thread; and, after
a kill, the next process that calls :func:`remove_abandoned_folders`. A lock also holds in another container, in which
a process id means nothing.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

_OWNER = "owner"
_PATTERN = f"fedsim-*/{_OWNER}"
_SIGNALS = (signal.SIGTERM, signal.SIGHUP)  # without a handler they end a process at once

_owned: dict[Path, int] = {}  # folder -> its locked file
_handlers: dict[int, Any] = {}  # signal -> its handler before
_process = os.getpid()  # a fork has the same variables, but owns nothing


def make_owned_folder(folder: Path) -> None:
    """Make a folder that belongs to this process, until :func:`remove_owned_folder`; raise OSError if it exists."""
    global _process
    if _process != os.getpid():
        _owned.clear()
        _handlers.clear()
        _process = os.getpid()
    _catch_signals()
    while True:
        folder.mkdir(mode=0o700)
        with suppress(FileNotFoundError):  # another process took it for an abandoned one before it was locked
            file = os.open(folder / _OWNER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            with suppress(OSError):  # a file system without locks: then nothing but this process removes the folder
                fcntl.flock(file, fcntl.LOCK_EX)
            os.write(file, f"{os.getpid()}\n".encode())
            if (folder / _OWNER).exists():
                _owned[folder] = file
                return
            os.close(file)


def remove_owned_folder(folder: Path) -> None:
    """Remove a folder of this process; files in it that a process has opened stay usable."""
    shutil.rmtree(folder, ignore_errors=True)
    if (file := _owned.pop(folder, None)) is not None:
        os.close(file)
    if not _owned and threading.current_thread() is threading.main_thread():
        while _handlers:
            number, handler = _handlers.popitem()
            if signal.getsignal(number) is _end_by_signal:
                signal.signal(number, handler)


def remove_owned_folders() -> None:
    """Remove all folders of this process, before an end without the usual way out."""
    if _process == os.getpid():
        for folder in [*_owned]:
            shutil.rmtree(folder, ignore_errors=True)


def remove_abandoned_folders(places: Iterable[Path]) -> int:
    """Remove the folders in ``places`` whose owners have ended, and return their number. Other users' ones stay."""
    removed = 0
    for path in {path for parent in places for path in parent.glob(_PATTERN)}:
        with suppress(OSError):  # another user's, or one that its owner removes now
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: the owner lives
                shutil.rmtree(path.parent, ignore_errors=True)
                removed += 1
            finally:
                os.close(file)
    return removed


def _catch_signals() -> None:
    if threading.current_thread() is not threading.main_thread():  # Python refuses handlers there
        return
    for number in _SIGNALS:
        if signal.getsignal(number) is signal.SIG_DFL:
            _handlers[number] = signal.signal(number, _end_by_signal)


def _end_by_signal(number: int, _: FrameType | None) -> None:
    """Remove the folders, and end as without a handler."""
    remove_owned_folders()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
