"""Lists of image files, and the labels in their names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedsim.core.errors import DataError
from fedsim.data.images import ImageFiles, Split

SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".tif", ".tiff", ".webp"}


def list_images(folder: Path, expected: str) -> list[Path]:
    """Return a folder's image files, sorted by name; ``expected`` is an example of a name, for messages."""
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder")
    paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)
    if not paths:
        raise DataError(f"{folder}: holds no images; expected names like {expected}")
    return paths


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
        pids[row] = 10_000 * int(groups.get("pair") or 0) + int(groups.get("pid", 0))
        camids[row] = int(groups["view"]) if "view" in groups else int(groups.get("cam", 1)) - 1
        if camids[row] < 0:
            raise DataError(f"{path}: cameras are numbered from 1, as in {expected}")
    return Split(ImageFiles(paths), pids, camids)


def read_folder(folder: Path, pattern: str, expected: str) -> Split:
    """List and label all images of a folder; see :func:`label_images`."""
    return label_images(list_images(folder, expected), pattern, expected)
