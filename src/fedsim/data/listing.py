"""Lists of image files, and the labels in their names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedsim.core.errors import DataError
from fedsim.data.images import ImageFiles, Split
from fedsim.data.leftovers import image_files, left_out_in, summary

_DIGITS = 18  # of the largest identity and camera, as in manifests: sums of several fit into 64 bits


def list_images(folder: Path, expected: str) -> list[Path]:
    """Return a folder's image files, sorted by name; ``expected`` is an example of a name, for messages."""
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder")
    paths = image_files(folder)
    if not paths:
        unread = summary(list(left_out_in(folder, ())))
        but = f", but {unread}" if unread else ""
        raise DataError(f"{folder}: holds no images{but}; expected names like {expected}")
    return paths


def number_of(digits: str, path: Path) -> int:
    """Return the number that part of a name or list stands for; raise DataError naming ``path`` if it is too large."""
    if len(short := digits.lstrip("0")) > _DIGITS:
        problem = f"{short[: 2 * _DIGITS]} has more than {_DIGITS} digits; number people and cameras otherwise"
        raise DataError(f"{path}: the number {problem}")
    return int(short or "0")


def label_images(paths: Sequence[Path], pattern: str, expected: str) -> Split:
    """Read identities and cameras from names of files.

    ``pattern``: regular expression for the beginning of a name. Its groups may be ``pid`` (else identity 0), ``pair``
    of cameras (each has its own people), and ``cam``, from 1, or ``view``, from 0 (else camera 0). ``expected``: an
    example of a name, for messages. Raises DataError naming the first file whose name does not fit.
    """
    compiled = re.compile(pattern)
    pids, camids = np.empty(len(paths), dtype=np.int64), np.empty(len(paths), dtype=np.int64)
    for row, path in enumerate(paths):
        match = compiled.match(path.name)
        if match is None:
            raise DataError(f"{path}: the name does not begin like {expected}")
        groups = match.groupdict()
        numbers = {name: number_of(digits, path) for name, digits in groups.items() if digits is not None}
        pids[row] = number_of(str(10_000 * numbers.get("pair", 0) + numbers.get("pid", 0)), path)
        camids[row] = numbers["view"] if "view" in numbers else numbers.get("cam", 1) - 1
        if camids[row] < 0:
            raise DataError(f"{path}: cameras are numbered from 1, as in {expected}")
    return Split(ImageFiles(paths), pids, camids)


def read_folder(folder: Path, pattern: str, expected: str) -> Split:
    """List and label all images of a folder; see :func:`label_images`."""
    return label_images(list_images(folder, expected), pattern, expected)
