"""Files and folders that are read: whether they are there, of the right kind, and may be read."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Literal

from fedsim.core.errors import DataError

Holds = Literal["file", "folder", "checkpoint or run directory"]
"""what a path leads to"""


def problem_of_kind(mode: int, holds: Holds) -> str:
    """Return in which way a file of this ``mode`` is of another kind; empty if it is of this one."""
    if stat.S_ISDIR(mode):
        return "is a folder, not a file" if holds == "file" else ""
    if not stat.S_ISREG(mode):
        return f"is a pipe or a device, no {holds}"
    return "is no folder" if holds == "folder" else ""


def problem_of_reading(path: Path, holds: Holds) -> str:
    """Return why a path cannot be read; empty if it can."""
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return "is a link to nothing" if os.path.islink(path) else f"is not there: no such {holds}"
    except OSError as error:
        return _refused(error.errno, error.strerror)
    if problem := problem_of_kind(mode, holds):
        return problem
    can_read = os.access(path, os.R_OK | os.X_OK if stat.S_ISDIR(mode) else os.R_OK)
    return "" if can_read else _refused(errno.EACCES, os.strerror(errno.EACCES))


def _refused(number: int | None, reason: str | None) -> str:
    remedy = "; give yourself the right to read it" if number == errno.EACCES else ""
    return f"cannot be read ({reason}){remedy}"


def has_file(path: Path) -> bool:
    """Return whether a file that fedsim writes is there; raise DataError if it cannot be read, or is something else.

    A pipe would let its reader wait without end.
    """
    return _has(path, "file")


def files_in(folder: Path, pattern: str) -> list[Path]:
    """Return the files in a folder that fedsim writes, sorted; none without the folder; for errors see `has_file`."""
    return [path for path in sorted(folder.glob(pattern)) if has_file(path)] if has_folder(folder) else []


def has_folder(path: Path) -> bool:
    """Return whether a folder that fedsim writes is there; for errors see :func:`has_file`."""
    return _has(path, "folder")


def _has(path: Path, holds: Holds) -> bool:
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except PermissionError:
        path, holds = path.parent, "folder"
    except OSError:
        pass  # the check below says why
    if problem := problem_of_reading(path, holds):
        raise DataError(f"{path}: {problem}" + ("" if "; " in problem else "; move it away"))
    return True
