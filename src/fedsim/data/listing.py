"""Lists of image files, and what their names say."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedsim.core.errors import DataError
from fedsim.data.images import ImageFiles, Split

__all__ = ["Label", "label_images", "list_images"]

_SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".tif", ".tiff", ".webp"}


class Label(NamedTuple):
    """What a file's name says."""

    pid: int
    camid: int
    """from 0"""


def list_images(folder: Path, expected: str) -> list[Path]:
    """Return a folder's image files, sorted by name.

    Args:
        folder: which.
        expected: an example of a name, for messages.
    """
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder")
    paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in _SUFFIXES)
    if not paths:
        raise DataError(f"{folder}: holds no images; expected names like {expected}")
    return paths


def label_images(
    paths: Sequence[Path], pattern: str, expected: str, label: Callable[[re.Match[str]], Label] | None = None
) -> Split:
    """Read identities and cameras from names of files.

    Args:
        paths: in the order that they shall have.
        pattern: regular expression for the beginning of a name, with groups ``pid`` and maybe ``cam`` (from 1).
        expected: an example of a name, for messages.
        label: what a match says, where that is not all.

    Raises:
        DataError: naming the first file whose name does not fit.
    """
    compiled = re.compile(pattern)
    pids, camids = np.empty(len(paths), dtype=np.int64), np.empty(len(paths), dtype=np.int64)
    for row, path in enumerate(paths):
        match = compiled.match(path.name)
        if match is None:
            raise DataError(f"{path}: the name does not begin like {expected}")
        pids[row], camids[row] = label(match) if label else (int(match["pid"]), int(match["cam"]) - 1)
        if camids[row] < 0:
            raise DataError(f"{path}: cameras are numbered from 1, as in {expected}")
    return Split(ImageFiles(paths), pids, camids)
