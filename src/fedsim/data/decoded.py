"""Images decoded once: one file per data set and image size, which every later run maps into memory.

``NAME-HxW-KEY.npy`` is an array uint8 [n, 3, H, W] in NumPy's format, and ``NAME-HxW-KEY.json`` says which images it
holds, which could not be read, and the checksums of its blocks. KEY depends on names and sizes of the image files, so a
data set that has changed gets new files. A file that is complete has its name; one that is not continues where it was
left.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from fedsim.core.errors import DataError
from fedsim.core.files import flush_directory, flush_file, replacing
from fedsim.data.images import Domain, GallerySplit, ImageFiles, Images, ImagesInParts, Index, Size, Split
from fedsim.data.pixels import read_batches

__all__ = [
    "DecodedFile",
    "DecodedImages",
    "Wanted",
    "build",
    "find",
    "open_decoded",
    "use",
    "use_split",
    "verify",
    "without",
]

_BLOCK = 512
"""Images per checksum, and between two notes of how far building has come."""

_BATCH = 64


class Wanted(NamedTuple):
    """Image files that a run needs in one size."""

    name: str
    """of the data set"""
    files: tuple[Path, ...]
    """without repetitions"""
    size: Size


@dataclass(frozen=True)
class DecodedFile:
    """A complete file of decoded images."""

    path: Path
    size: Size
    pixels: NDArray[np.uint8]
    """[n, 3, H, W], mapped: read from the disk where it is looked at"""
    rows: dict[Path, int]
    """image file -> its row"""
    unreadable: dict[Path, str]
    """image file -> why its row is black"""


class DecodedImages(Images):
    """Image files of which a decoded file has the pixels.

    Args:
        files: the images.
        found: decoded files, each with the rows [n] of ``files``.
    """

    def __init__(self, files: ImageFiles, found: Sequence[tuple[DecodedFile, Index]]) -> None:
        self.files = files
        self.found = tuple(found)

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.files)

    def take(self, index: Index) -> DecodedImages:
        """Return the images at the positions ``index``."""
        return DecodedImages(self.files.take(index), [(decoded, rows[index]) for decoded, rows in self.found])

    def locations(self) -> list[Path | None]:
        """Return where each image lies."""
        return self.files.locations()

    def is_decoded(self, size: Size) -> bool:
        """Whether a decoded file of this size is there."""
        return any(decoded.size == size for decoded, _ in self.found)

    def decode(self, size: Size) -> Tensor:
        """Look the pixels up, without a copy if they lie behind each other; see :meth:`Images.decode`."""
        for decoded, rows in self.found:
            if decoded.size == size:
                if len(rows) and (np.diff(rows) == 1).all():
                    return torch.from_numpy(decoded.pixels[rows[0] : rows[-1] + 1])
                return torch.from_numpy(decoded.pixels[rows])
        return self.files.decode(size)


# -- building ----------------------------------------------------------------------------------------------------------


def find(folder: Path, wanted: Wanted) -> Path:
    """Return where the decoded file of these images is, or would be."""
    height, width = wanted.size
    key = hashlib.sha256(json.dumps([_names(wanted.files), [_bytes_of(path) for path in wanted.files]]).encode())
    return folder / f"{wanted.name}-{height}x{width}-{key.hexdigest()[:12]}.npy"


def build(folder: Path, wanted: Wanted, workers: int = 0) -> Path:
    """Decode images into a file, unless it is there already; a progress bar shows when it takes long.

    Args:
        folder: of decoded files.
        wanted: the images.
        workers: processes that decode.

    Returns:
        the file.

    Raises:
        DataError: if the folder cannot be written to.
    """
    path = find(folder, wanted)
    if path.is_file() and path.with_suffix(".json").is_file():
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _build(path, wanted, workers)
    except OSError as error:
        raise DataError(
            f"{path}: cannot write decoded images ({error.strerror or error}); choose another data.cache_dir"
        ) from error
    return path


def _build(path: Path, wanted: Wanted, workers: int) -> None:
    partial = path.with_name(f"{path.stem}.partial-{socket.gethostname()}")  # machines may share the folder
    progress = partial.with_name(partial.name + ".json")
    pixels, sums, unreadable = _continue(partial, progress, wanted)
    total = len(wanted.files)
    rest = range(len(sums) * _BLOCK, total, _BATCH)
    order = [range(start, min(start + _BATCH, total)) for start in rest]
    with tqdm(
        total=total, initial=min(len(sums) * _BLOCK, total), desc=f"decoding {wanted.name}", unit=" images",
        delay=2.0, disable=None, leave=False,
    ) as bar:  # fmt: skip
        for batch, read in zip(order, read_batches(ImageFiles(wanted.files), wanted.size, order, workers), strict=True):
            pixels[batch.start : batch.stop] = read.pixels.numpy()
            unreadable |= {wanted.files[row]: problem for row, problem in read.problems.items()}
            if batch.stop % _BLOCK == 0 or batch.stop == total:
                pixels.flush()
                sums.append(_checksum(pixels, len(sums)))
                _write_json(progress, _describe(wanted, sums, unreadable))
            bar.update(len(batch))
    del pixels
    _write_json(path.with_suffix(".json"), _describe(wanted, sums, unreadable))
    flush_file(partial)
    partial.replace(path)
    flush_directory(path.parent)
    progress.unlink(missing_ok=True)


def _continue(
    partial: Path, progress: Path, wanted: Wanted
) -> tuple[np.memmap[Any, np.dtype[np.uint8]], list[str], dict[Path, str]]:
    """Open the partial file with what is right of it, or a new one; return checksums of its blocks and its problems."""
    shape = (len(wanted.files), 3, *wanted.size)
    try:
        note = json.loads(progress.read_text())
        pixels = np.lib.format.open_memmap(partial, mode="r+")
        fits = pixels.shape == shape and pixels.dtype == np.uint8 and note["files"] == _names(wanted.files)
    except (OSError, ValueError, KeyError):  # none, or nothing to build on
        fits = False
    if not fits:
        pixels = np.lib.format.open_memmap(partial, mode="w+", dtype=np.uint8, shape=shape)
        with partial.open("r+b") as file:  # a full disk is an error now, and would be the end of the process later
            os.posix_fallocate(file.fileno(), 0, partial.stat().st_size)
        return pixels, [], {}
    sums: list[str] = note["sha256"]
    good = next((i for i, known in enumerate(sums) if _checksum(pixels, i) != known), len(sums))
    by_name = dict(zip(note["files"], wanted.files, strict=True))
    unreadable = {by_name[name]: problem for name, problem in note["unreadable"].items()}
    return pixels, sums[:good], unreadable


def _describe(wanted: Wanted, sums: Sequence[str], unreadable: dict[Path, str]) -> dict[str, Any]:
    names = _names(wanted.files)
    problems = {name: unreadable[path] for name, path in zip(names, wanted.files, strict=True) if path in unreadable}
    return {"size": wanted.size, "files": names, "unreadable": problems, "sha256": list(sums)}


def _names(files: Sequence[Path]) -> list[str]:
    """Paths relative to the folder that all have in common: the same wherever the data set lies."""
    root = os.path.commonpath([path.parent for path in files]) if files else ""
    return [Path(os.path.relpath(path, root)).as_posix() for path in files]


def _bytes_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1  # reading it will say why


def _checksum(pixels: NDArray[np.uint8], block: int) -> str:
    return hashlib.sha256(pixels[block * _BLOCK : (block + 1) * _BLOCK].tobytes()).hexdigest()


def _write_json(path: Path, content: dict[str, Any]) -> None:
    with replacing(path) as partial:
        partial.write_text(json.dumps(content) + "\n")


# -- using -------------------------------------------------------------------------------------------------------------


def open_decoded(folder: Path, wanted: Wanted) -> DecodedFile | None:
    """Open the decoded file of these images; None if it is not there.

    Raises:
        DataError: if it is damaged.
    """
    path = find(folder, wanted)
    if not (path.is_file() and path.with_suffix(".json").is_file()):
        return None
    note, pixels = _read(path)
    if note["files"] != _names(wanted.files) or pixels.shape != (len(wanted.files), 3, *wanted.size):
        raise DataError(f"{path}: is not the file of decoded images that its name says; remove it")
    by_name = dict(zip(note["files"], wanted.files, strict=True))
    rows = {file: row for row, file in enumerate(wanted.files)}
    return DecodedFile(path, wanted.size, pixels, rows, {by_name[n]: why for n, why in note["unreadable"].items()})


def verify(path: Path) -> int:
    """Compare a decoded file with its checksums.

    Returns:
        the number of images.

    Raises:
        DataError: if they differ.
    """
    note, pixels = _read(path)
    sums = [_checksum(pixels, block) for block in range(-(-len(pixels) // _BLOCK))]
    if sums != note["sha256"]:
        raise DataError(f"{path}: is damaged (checksum); remove it and run fedsim data prepare again")
    return len(pixels)


def _read(path: Path) -> tuple[dict[str, Any], NDArray[np.uint8]]:
    try:
        note = json.loads(path.with_suffix(".json").read_text())
        # copy on write: torch wants memory that could be written to
        pixels: NDArray[np.uint8] = np.load(path, mmap_mode="c", allow_pickle=False)
        if not {"files", "unreadable", "sha256"} <= note.keys() or pixels.dtype != np.uint8 or pixels.ndim != 4:
            raise ValueError("unknown content")
    except (OSError, ValueError, AttributeError, EOFError) as error:
        raise DataError(f"{path}: cannot be read ({error}); remove it and run fedsim data prepare again") from error
    return note, pixels


def use(domain: Domain, decoded: Sequence[DecodedFile]) -> Domain:
    """Return a data set whose images are looked up in decoded files, where these have them."""
    train = None if domain.train is None else use_split(domain.train, decoded)
    query, gallery = use_split(domain.query, decoded), use_split(domain.gallery, decoded)
    return replace(domain, train=train, query=query, gallery=gallery)


def use_split(split: Split, decoded: Sequence[DecodedFile]) -> Split:
    """Return images that are looked up in decoded files, where these have them."""

    def look_up(files: ImageFiles) -> Images:
        found = [
            (one, np.array([one.rows[path] for path in files.paths], dtype=np.int64))
            for one in decoded
            if all(path in one.rows for path in files.paths)
        ]
        return DecodedImages(files, found) if found else files

    return replace(split, images=_map_files(split.images, look_up))


def _map_files(images: Images, change: Callable[[ImageFiles], Images]) -> Images:
    if isinstance(images, ImagesInParts):
        return ImagesInParts([_map_files(part, change) for part in images.parts])
    return change(images) if isinstance(images, ImageFiles) else images


def without(domain: Domain, bad: Container[Path]) -> Domain:
    """Return a data set without the images ``bad``."""

    def keep(split: Split) -> Index:
        good: Index = np.flatnonzero([path is None or path not in bad for path in split.images.locations()])
        return good

    train = None if domain.train is None else domain.train.take(keep(domain.train))
    query, gallery = domain.query.take(keep(domain.query)), domain.gallery.take(keep(domain.gallery))
    left = keep(domain.gallery)
    new = np.full(len(domain.gallery), -1, dtype=np.int64)
    new[left] = np.arange(len(left))
    parts = ([new[part][new[part] >= 0] for part in split] for split in domain.splits)
    return Domain(domain.name, train, query, gallery, tuple(GallerySplit(*part) for part in parts))
