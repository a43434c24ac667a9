"""Atomic versions of a directory that several processes write: a reader sees a whole old version or a whole new one.

``NAME/`` holds versions ``v1``, ``v2``, ... and a file ``current`` with the name of the newest. A version is written
under a partial name, flushed to the disk, renamed, and then becomes current. Whenever the writers are killed, either
the old version is current or the new one is complete.

A reader holds a version by a shared lock on it (:func:`holding`); writers leave it until the reader has ended, or, of a
fit, until it begins to train.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedsim.core.files import flush_file, replacing

_POINTER = "current"
_removals: list[threading.Thread] = []


def begin_version(folder: Path) -> Path:
    """Make an empty partial version and return its path; leftovers of killed writers are removed."""
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob("v*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)
    partial = folder / f"v{max((_number(p) for p in _versions(folder)), default=0) + 1}.tmp"
    partial.mkdir()
    return partial


def publish_version(partial: Path) -> Path:
    """Make a partial version with flushed files the current one, remove older ones, and return its final path."""
    folder = partial.parent
    flush_file(partial)
    version = partial.with_suffix("")
    partial.rename(version)
    flush_file(folder)
    with replacing(folder / _POINTER) as pointer:
        pointer.write_text(version.name + "\n")
    for old in _versions(folder):
        if old != version and (file := _locked(old, fcntl.LOCK_EX)) is not None:
            # renamed first: a removal that is killed then leaves no half of a version
            doomed = old.rename(old.with_name(old.name + ".tmp"))
            os.close(file)
            # in a thread: removing gigabytes takes a noticeable time
            _removals.append(thread := threading.Thread(target=shutil.rmtree, args=(doomed, True)))
            thread.start()
    return version


def end_removals() -> None:
    """Wait until replaced versions are gone: who copies a finished run meets no half of one."""
    while _removals:
        _removals.pop().join()


_held: dict[Path, tuple[Path, int]] | None = None
"""in a block of :func:`holding`: directory -> the version that it has found first, and the open file of its lock"""


@contextmanager
def holding() -> Iterator[None]:
    """Let a reader find the same versions in the whole block, though a fit writes the next ones meanwhile."""
    global _held
    if _held is not None:
        yield
        return
    _held = {}
    try:
        yield
    finally:
        let_go()


def let_go() -> None:
    """End the block of :func:`holding` early: a fit that has read a checkpoint writes the next ones itself."""
    global _held
    for _, file in (_held or {}).values():
        os.close(file)
    _held = None


def _locked(version: Path, operation: int) -> int | None:
    """Return an open file of a version with a lock; None if others hold it, or it has been removed.

    A file system without locks gives it unlocked.
    """
    try:
        file = os.open(version, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(file, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return None
    except OSError:
        return file
    if version.is_dir() and os.path.samestat(os.fstat(file), version.stat()):
        return file
    os.close(file)
    return None


def current_version(folder: Path) -> Path | None:
    """Return the newest complete version in ``folder``, or None if there is none; see :func:`holding`."""
    if _held is None:
        return _newest(folder)
    real_folder = Path(os.path.realpath(folder))  # a link that leads to itself is no error
    while real_folder not in _held and (version := _newest(folder)) is not None:
        if (file := _locked(version, fcntl.LOCK_SH)) is not None:
            _held[real_folder] = version, file
    return _held[real_folder][0] if real_folder in _held else None


def _newest(folder: Path) -> Path | None:
    try:
        pointer = folder / _POINTER
        name = pointer.read_text().strip() if pointer.is_file() else ""  # a pipe would not end
    except (OSError, UnicodeDecodeError):
        name = ""
    if re.fullmatch(r"v[0-9]{1,18}", name) and (folder / name).is_dir():  # others may be too long for a file's name
        return folder / name
    return max(_versions(folder), key=_number, default=None)


def _versions(folder: Path) -> list[Path]:
    return [path for path in folder.glob("v*") if re.fullmatch(r"v[0-9]{1,18}", path.name) and os.path.isdir(path)]


def _number(version: Path) -> int:
    return int(version.name[1:])
