"""Lists of image files, and the labels in their names."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedsim.core.errors import DataError
from fedsim.data.images import ImageFiles, Split

_SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".tif", ".tiff", ".webp"}


class Label(NamedTuple):
    """Identity and camera of an image."""

    pid: int
    camid: int
    """from 0"""


def named(match: re.Match[str]) -> Label:
    """Return the groups ``pid`` and ``cam`` (from 1) of a name; without such a group, identity 0 or camera 0."""
    groups = match.groupdict()
    return Label(int(groups.get("pid", 0)), int(groups.get("cam", 1)) - 1)


def list_images(folder: Path, expected: str) -> list[Path]:
    """Return a folder's image files, sorted by name; ``expected`` is an example of a name, for messages."""
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder")
    paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in _SUFFIXES)
    if not paths:
        raise DataError(f"{folder}: holds no images; expected names like {expected}")
    return paths


def label_images(
    paths: Sequence[Path], pattern: str, expected: str, label: Callable[[re.Match[str]], Label] = named
) -> Split:
    """Read identities and cameras from names of files.

    Args:
        paths: in the order of the result.
        pattern: regular expression for the beginning of a name.
        expected: an example of a name, for messages.
        label: match -> identity and camera.

    Raises:
        DataError: naming the first file whose name does not fit.
    """
    compiled = re.compile(pattern)
    pids, camids = np.empty(len(paths), dtype=np.int64), np.empty(len(paths), dtype=np.int64)
    for row, path in enumerate(paths):
        match = compiled.match(path.name)
        if match is None:
            raise DataError(f"{path}: the name does not begin like {expected}")
        pids[row], camids[row] = label(match)
        if camids[row] < 0:
            raise DataError(f"{path}: cameras are numbered from 1, as in {expected}")
    return Split(ImageFiles(paths), pids, camids)


def read_folder(folder: Path, pattern: str, expected: str, label: Callable[[re.Match[str]], Label] = named) -> Split:
    """List and label all images of a folder; see :func:`label_images`."""
    return label_images(list_images(folder, expected), pattern, expected, label)
