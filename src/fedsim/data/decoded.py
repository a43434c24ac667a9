"""Images decoded once: one file per data set and image size, which every later run maps into memory.

``NAME-HxW-KEY.npy`` is an array uint8 [n, 3, H, W] in NumPy's format. ``NAME-HxW-KEY.json`` lists its images, those
that could not be read, and the checksums of its blocks. KEY depends on names and sizes of the image files, so a changed
data set gets new files, unless the new content of an image has as many bytes as the old one and both can be read. Only
a complete file has this name; the next run continues an incomplete one.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import socket
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from fedsim.core.errors import DataError
from fedsim.core.files import flush_file, replacing
from fedsim.core.names import file_name, is_caseless
from fedsim.data.identity import file_sizes
from fedsim.data.images import Domain, GallerySplit, ImageFiles, Images, ImagesInParts, Index, Size, Split
from fedsim.data.pixels import read_batches

log = logging.getLogger(__name__)

_DECODING = 2  # version of decoding and resizing, part of KEY
_BLOCK = 512  # images per checksum, and between two updates of the progress file
_BATCH = 64

Mapped = np.memmap[Any, np.dtype[np.uint8]]


class Wanted(NamedTuple):
    """Image files of a run, in one size."""

    name: str
    """of the data set"""
    files: tuple[Path, ...]
    """without repetitions"""
    size: Size


class DecodedFile(NamedTuple):
    """A complete file of decoded images."""

    size: Size
    pixels: NDArray[np.uint8]
    """[n, 3, H, W], mapped into memory: the disk is read on access"""
    rows: dict[Path, int]
    """image file -> its row"""
    unreadable: dict[Path, str]
    """image file -> the reason why its row is black"""


class DecodedImages(Images):
    """Image files with decoded pixels; ``decoded_files``: each with the rows [n] of the images in it."""

    def __init__(self, files: ImageFiles, decoded_files: Sequence[tuple[DecodedFile, Index]]) -> None:
        self.files, self.decoded_files = files, tuple(decoded_files)

    def __len__(self) -> int:
        return len(self.files)

    def take(self, index: Index) -> DecodedImages:
        """Return the images at the positions ``index``."""
        return DecodedImages(self.files.take(index), [(file, rows[index]) for file, rows in self.decoded_files])

    def locations(self) -> list[Path | None]:
        """Return the path of each image; see :meth:`Images.locations`."""
        return self.files.locations()

    def whole_files(self) -> list[Path]:
        """Return the files; see :meth:`Images.whole_files`."""
        return self.files.whole_files()

    def sizes(self) -> list[Size | None]:
        """Return the sizes of the files; see :meth:`Images.sizes`."""
        return self.files.sizes()

    def is_decoded(self, size: Size) -> bool:
        """Whether a decoded file of this size exists."""
        return any(file.size == size for file, _ in self.decoded_files)

    @property
    def in_threads(self) -> bool:
        """As of files: in another size they are read."""
        return self.files.in_threads

    def decode(self, size: Size) -> Tensor:
        """Return the pixels, without a copy if the rows are consecutive; see :meth:`Images.decode`."""
        for file, rows in self.decoded_files:
            if file.size == size:
                are_neighbours = len(rows) and (np.diff(rows) == 1).all()
                return torch.from_numpy(file.pixels[slice(rows[0], rows[-1] + 1) if are_neighbours else rows])
        return self.files.decode(size)


def find(folder: Path, wanted: Wanted) -> Path:
    """Return the path of the decoded file of these images, whether it exists or not."""
    content = [_DECODING, _names(wanted.files), file_sizes(wanted.files)]
    # disks that take some names for one must not take their files for one; a key of old files stays
    content += [] if is_caseless(wanted.name) else [wanted.name]
    key = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]
    return folder / f"{file_name(wanted.name)}-{wanted.size[0]}x{wanted.size[1]}-{key}.npy"


def is_built(folder: Path, wanted: Wanted) -> bool:
    """Whether the decoded file has all images that can be read; raise DataError if it is damaged."""
    file = open_decoded(folder, wanted)
    return file is not None and len(still_unreadable(file)) == len(file.unreadable)


def still_unreadable(decoded: DecodedFile) -> dict[Path, str]:
    """Try unreadable images again: a repaired file may have the old size. Return image file -> problem."""
    problems = {}
    for path in decoded.unreadable:
        try:
            ImageFiles([path]).decode((1, 1))
        except DataError as error:
            problems[path] = str(error)
    return problems


def build(folder: Path, wanted: Wanted, workers: int = 0) -> Path:
    """Decode images by ``workers`` processes into a file in ``folder``, unless it exists, and return its path.

    Raise DataError if the folder cannot be written to.
    """
    path = find(folder, wanted)
    if is_built(folder, wanted):
        return path
    partial = path.with_name(f"{path.stem}.partial-{socket.gethostname()}")  # machines may share the folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _held(partial):
            if is_built(folder, wanted):  # by the process that had the lock before
                partial.unlink()
            else:
                if path.is_file():  # it lacks images that were repaired later
                    path.with_suffix(".json").unlink(missing_ok=True)
                _build(path, partial, wanted, workers)
    except OSError as error:
        reason = error.strerror or error
        raise DataError(f"{path}: cannot write decoded images ({reason}); choose another data.cache_dir") from error
    return path


@contextmanager
def _held(path: Path) -> Iterator[None]:
    """Lock a file against other processes of this machine; the last owner may have renamed or removed the file."""
    while True:
        with path.open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                log.info("waiting for another process, which writes %s", path)
                fcntl.flock(file, fcntl.LOCK_EX)
            if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
                yield
                return


def _build(path: Path, partial: Path, wanted: Wanted, workers: int) -> None:
    progress = partial.with_name(partial.name + ".json")
    pixels, sums, unreadable = _continue(partial, progress, wanted)
    total = len(wanted.files)
    order = [range(start, min(start + _BATCH, total)) for start in range(len(sums) * _BLOCK, total, _BATCH)]
    with tqdm(
        total=total, initial=min(len(sums) * _BLOCK, total), desc=f"decoding {wanted.name}", unit=" images",
        delay=2.0, disable=None, leave=False,
    ) as bar:  # fmt: skip
        for batch, read in zip(order, read_batches(ImageFiles(wanted.files), wanted.size, order, workers), strict=True):
            pixels[batch.start : batch.stop] = read.pixels.numpy()
            unreadable |= read.problems
            if batch.stop % _BLOCK == 0 or batch.stop == total:
                pixels.flush()
                sums.append(_checksum(pixels, len(sums)))
                _write_json(progress, {"sha256": sums, "unreadable": list(unreadable.items())})
            bar.update(len(batch))
    del pixels
    if is_complete(path):  # another machine was faster, and its file may be in use
        partial.unlink()
    else:
        names = _names(wanted.files)
        problems = {names[row]: problem for row, problem in unreadable.items()}
        note = {"size": wanted.size, "files": names, "unreadable": problems, "sha256": sums}
        _write_json(path.with_suffix(".json"), note)
        flush_file(partial)
        partial.replace(path)
        flush_file(path.parent)
    progress.unlink(missing_ok=True)


def is_complete(path: Path) -> bool:
    """Whether a decoded file and its description exist."""
    return path.is_file() and path.with_suffix(".json").is_file()


def _continue(partial: Path, progress: Path, wanted: Wanted) -> tuple[Mapped, list[str], dict[int, str]]:
    """Open a partial file, or a new one; return its array, the checksums of its valid blocks, and its problems."""
    shape = (len(wanted.files), 3, *wanted.size)
    try:
        note = json.loads(progress.read_text())
        sums: list[str] = note["sha256"]
        pixels = np.lib.format.open_memmap(partial, mode="r+")
        if pixels.shape != shape or pixels.dtype != np.uint8:
            raise ValueError("an array of other images")
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        # no partial file, or one that cannot be continued
        progress.unlink(missing_ok=True)
        return _allocate(partial, shape), [], {}
    good = next((i for i, checksum in enumerate(sums) if _checksum(pixels, i) != checksum), len(sums))
    return pixels, sums[:good], {row: problem for row, problem in note["unreadable"] if row < good * _BLOCK}


def _allocate(path: Path, shape: tuple[int, ...]) -> Mapped:
    """Allocate a new file: a full disk is an error here, but would kill the process later."""
    pixels = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=shape)
    try:
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    except OSError:
        path.unlink()  # the part that fits on the disk
        raise
    return pixels


def _names(files: Sequence[Path]) -> list[str]:
    """Return paths relative to the deepest common folder, so that they do not depend on the place of the data set."""
    paths = [os.path.abspath(path) for path in files]
    root = os.path.commonpath({os.path.dirname(path) for path in paths}) if paths else ""
    return [path[len(root) :].lstrip("/") for path in paths]  # relpath takes seconds for a large data set


def _checksum(pixels: NDArray[np.uint8], block: int) -> str:
    return hashlib.sha256(pixels[block * _BLOCK : (block + 1) * _BLOCK].tobytes()).hexdigest()


def _write_json(path: Path, content: dict[str, Any]) -> None:
    with replacing(path) as partial:
        partial.write_text(json.dumps(content) + "\n")


def open_decoded(folder: Path, wanted: Wanted) -> DecodedFile | None:
    """Open the decoded file of these images, if it exists; raise DataError if it is damaged."""
    path = find(folder, wanted)
    if not is_complete(path):
        return None
    note, pixels = _read(path)
    if note["files"] != _names(wanted.files) or pixels.shape != (len(wanted.files), 3, *wanted.size):
        raise DataError(f"{path}: does not hold the decoded images of its name; remove it")
    by_name = dict(zip(note["files"], wanted.files, strict=True))
    rows = {file: row for row, file in enumerate(wanted.files)}
    return DecodedFile(wanted.size, pixels, rows, {by_name[n]: problem for n, problem in note["unreadable"].items()})


def verify(path: Path) -> int:
    """Return the number of images of a decoded file; raise DataError if its checksums differ."""
    note, pixels = _read(path)
    sums = [_checksum(pixels, block) for block in range(-(-len(pixels) // _BLOCK))]
    if sums != note["sha256"]:
        raise DataError(f"{path}: is damaged (checksum); remove it and run fedsim data prepare again")
    return len(pixels)


def _read(path: Path) -> tuple[dict[str, Any], NDArray[np.uint8]]:
    try:
        note = json.loads(path.with_suffix(".json").read_text())
        # copy on write, because torch expects writable memory
        pixels: NDArray[np.uint8] = np.load(path, mmap_mode="c", allow_pickle=False)
        if not {"files", "unreadable", "sha256"} <= note.keys() or pixels.dtype != np.uint8 or pixels.ndim != 4:
            raise ValueError("unknown content")
    except (OSError, ValueError, AttributeError, TypeError, EOFError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read ({error}); remove it and run fedsim data prepare again") from error
    return note, pixels


def use(split: Split, decoded: Sequence[DecodedFile]) -> Split:
    """Return a split whose images come from the ``decoded`` files that have them."""
    return replace(split, images=_look_up(split.images, decoded))


def _look_up(images: Images, decoded: Sequence[DecodedFile]) -> Images:
    if isinstance(images, ImagesInParts):
        return ImagesInParts([_look_up(part, decoded) for part in images.parts])
    if not isinstance(images, ImageFiles) or len(images.whole_files()) != len(images):
        return images
    files = [file for file in decoded if all(path in file.rows for path in images.paths)]
    rows = [np.array([file.rows[path] for path in images.paths], dtype=np.int64) for file in files]
    return DecodedImages(images, list(zip(files, rows, strict=True))) if files else images


def without(domain: Domain, bad: Container[Path]) -> Domain:
    """Return a data set without the images ``bad``."""

    def keep(split: Split) -> Index:
        return np.flatnonzero([path is None or path not in bad for path in split.images.locations()])

    remaining = keep(domain.gallery)
    new = np.full(len(domain.gallery), -1, dtype=np.int64)
    new[remaining] = np.arange(len(remaining))
    parts = ([new[part][new[part] >= 0] for part in split] for split in domain.splits)
    kept = domain.map_splits(lambda split: split.take(keep(split)))
    return replace(kept, splits=tuple(GallerySplit(*part) for part in parts))
