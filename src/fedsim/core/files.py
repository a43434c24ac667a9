"""Atomic writes: a reader sees the old file or the new one, never half of it, even after a power cut."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fedsim.core.errors import ConfigError


def problem_of_folder(path: Path) -> str:
    """Return why a folder for results cannot be made or written to; empty if it can."""
    existing = next(folder for folder in (path, *path.absolute().parents) if os.path.lexists(folder))
    if not os.path.isdir(existing):
        return "cannot be a folder (File exists)" if existing == path else f"cannot be a folder ({existing} is none)"
    return "" if os.access(existing, os.W_OK | os.X_OK) else "cannot be a folder that is written (Permission denied)"


def check_folder(path: Path, setting: str) -> None:
    """Raise ConfigError, see :func:`make_folder`, if a folder for results cannot be made or written to."""
    if problem := problem_of_folder(path):
        raise ConfigError(f"{setting}: {path} {problem}; name another")


def make_folder(path: Path, setting: str) -> None:
    """Make a folder for results, which may exist, and its parents, before there are results.

    Raises:
        ConfigError: if it cannot be made or written to, naming the ``setting`` that holds the path.
    """
    check_folder(path, setting)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{setting}: {path} cannot be a folder ({error.strerror}); name another") from error


def missing_folders(*paths: Path) -> list[Path]:
    """Return the folders of ``paths`` and above that do not exist yet, inner ones first, for :func:`remove_empty`."""
    folders = dict.fromkeys(folder for path in paths for folder in (path, *path.parents))
    return sorted((path for path in folders if not os.path.lexists(path)), key=lambda path: -len(path.parts))


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove ``folders``, inner ones first, up to one that is not empty: others may be on the way to it (a/../b)."""
    with suppress(OSError):
        for folder in folders:
            with suppress(FileNotFoundError):  # it was never made
                folder.rmdir()


@contextmanager
def naming(path: Path, partial: Path | None = None) -> Iterator[None]:
    """Give an OSError of the block the name of the file, not of its ``partial`` one; that of a full disk has none."""
    try:
        yield
    except OSError as error:
        if error.filename in (None, partial and str(partial)) and error.errno is not None:
            error.filename = str(path)
        raise


@contextmanager
def replacing(path: Path, *, new: bool = False) -> Iterator[Path]:
    """Yield a path to write to. The file replaces ``path`` when the block ends, and vanishes when the block fails.

    Missing folders are created. With ``new``, raises FileExistsError instead of replacing a file, even one that another
    process wrote during the block.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if os.path.isdir(path):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    # another process, on this machine or another one, may write the same file
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with naming(path, partial):
            yield partial
            flush_file(partial)
        if new:
            path.hardlink_to(partial)
        else:
            partial.replace(path)
        flush_file(path.parent)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a folder to write to. It becomes ``path`` when the block ends, or moves its files into one that is there.

    Such a one has no file of their names. It may be the working directory or a mount, which nothing can replace.
    """
    path, mark = Path(os.path.realpath(path)), secrets.token_hex(4)
    is_there = os.path.isdir(path)
    partial = path / f"{mark}.tmp" if is_there else path.with_name(f"{path.name}.{mark}.tmp")
    partial.mkdir(parents=True)
    try:
        with naming(path):
            yield partial
            for file in partial.iterdir():
                flush_file(file)
        flush_file(partial)
        if is_there:
            for file in sorted(partial.iterdir()):
                file.rename(path / file.name)
        else:
            partial.replace(path)
        flush_file(path if is_there else path.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def follow_umask(path: Path) -> None:
    """Give a file the rights that new files of this process have."""
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)


def flush_file(path: Path) -> None:
    """Wait until a file's content, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
