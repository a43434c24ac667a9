"""Images that are known but not yet decoded, and labelled splits of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from fedsim.core.errors import DataError

__all__ = [
    "Domain",
    "GallerySplit",
    "ImageArray",
    "ImageFiles",
    "Images",
    "ImagesInParts",
    "ReIDSource",
    "Size",
    "Split",
]

Size = tuple[int, int]
"""(height, width) in pixels"""

Index = NDArray[np.int64]

_CHUNK = 64
"""Images decoded between two reports of progress."""


class Images(ABC):
    """An ordered list of images that can be decoded to one tensor."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def take(self, index: Index) -> Images:
        """Return the images at the positions ``index`` [m], in that order."""

    @abstractmethod
    def decode(self, size: Size) -> Tensor:
        """Return all images as uint8 [n, 3, H, W], RGB.

        Raises:
            DataError: if an image cannot be read; the message names it.
        """

    def locations(self) -> list[Path | None]:
        """Return where each image lies; None for those that lie nowhere."""
        return [None] * len(self)

    def is_decoded(self, size: Size) -> bool:  # noqa: ARG002 - for those that are
        """Whether :meth:`decode` is no more than a copy."""
        return False

    def chunks(self) -> Iterator[Images]:
        """Cut into short lists, so that a caller can show progress between them."""
        for start in range(0, len(self), _CHUNK):
            yield self.take(np.arange(start, min(start + _CHUNK, len(self)), dtype=np.int64))


class ImageFiles(Images):
    """Image files, decoded by Pillow and resized with antialiasing (bicubic).

    Args:
        paths: one file per image.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = tuple(paths)

    def __len__(self) -> int:
        """Return the number of files."""
        return len(self.paths)

    def take(self, index: Index) -> ImageFiles:
        """Return the files at the positions ``index``."""
        return ImageFiles([self.paths[i] for i in index])

    def locations(self) -> list[Path | None]:
        """Return the files."""
        return list(self.paths)

    def decode(self, size: Size) -> Tensor:
        """Read all files; see :meth:`Images.decode`."""
        height, width = size
        out = torch.empty((len(self), 3, height, width), dtype=torch.uint8)
        for row, path in enumerate(self.paths):
            try:
                with Image.open(path) as image:
                    resized = image.convert("RGB").resize((width, height), Image.Resampling.BICUBIC)
            except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:  # of damaged files
                raise DataError(f"{path}: cannot read this image ({error}); replace or remove it") from error
            out[row] = torch.from_numpy(np.array(resized)).permute(2, 0, 1)
        return out


class ImageArray(Images):
    """Images in memory, resized like :class:`ImageFiles`.

    Args:
        pixels: uint8 [n, H, W, 3], RGB.
    """

    def __init__(self, pixels: NDArray[np.uint8]) -> None:
        self.pixels = pixels

    def __len__(self) -> int:
        """Return n."""
        return len(self.pixels)

    def take(self, index: Index) -> ImageArray:
        """Return a copy of the images at the positions ``index``."""
        return ImageArray(self.pixels[index])

    def decode(self, size: Size) -> Tensor:
        """Resize all images; see :meth:`Images.decode`."""
        height, width = size
        out = torch.empty((len(self), 3, height, width), dtype=torch.uint8)
        for row, pixels in enumerate(self.pixels):
            resized = Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC)
            out[row] = torch.from_numpy(np.array(resized)).permute(2, 0, 1)
        return out


class ImagesInParts(Images):
    """Several lists of images behind each other (a client made of several data sets)."""

    def __init__(self, parts: Sequence[Images]) -> None:
        self.parts = tuple(parts)

    def __len__(self) -> int:
        """Return the number of images of all parts."""
        return sum(len(part) for part in self.parts)

    def take(self, index: Index) -> Images:
        """Return the images at the positions ``index``; runs of one part stay together."""
        bounds = np.cumsum([0, *(len(part) for part in self.parts)])
        part_of = np.searchsorted(bounds, index, side="right") - 1
        cuts = np.flatnonzero(np.diff(part_of)) + 1
        runs = np.split(np.arange(len(index)), cuts) if len(index) else []
        return ImagesInParts([self.parts[part_of[run[0]]].take(index[run] - bounds[part_of[run[0]]]) for run in runs])

    def locations(self) -> list[Path | None]:
        """Return where each image lies."""
        return [path for part in self.parts for path in part.locations()]

    def is_decoded(self, size: Size) -> bool:
        """Whether all parts are decoded."""
        return all(part.is_decoded(size) for part in self.parts)

    def decode(self, size: Size) -> Tensor:
        """Decode part after part; see :meth:`Images.decode`."""
        return torch.cat([torch.empty((0, 3, *size), dtype=torch.uint8), *(part.decode(size) for part in self.parts)])


@dataclass(frozen=True)
class Split:
    """n images with identity and camera."""

    images: Images
    pids: Index
    """[n] identity; -1 marks junk, 0 distractors (Market-1501's convention)"""
    camids: Index
    """[n] camera, from 0"""

    def __len__(self) -> int:
        """Return n."""
        return len(self.pids)

    def take(self, index: Index) -> Split:
        """Return the images at the positions ``index`` [m]."""
        return Split(self.images.take(index), self.pids[index], self.camids[index])

    @property
    def identities(self) -> Index:
        """The identities, sorted."""
        return np.unique(self.pids)

    @staticmethod
    def concatenate(splits: Sequence[Split]) -> Split:
        """Put splits behind each other whose identities and cameras are numbered alike."""
        images = ImagesInParts([s.images for s in splits])
        return Split(images, np.concatenate([s.pids for s in splits]), np.concatenate([s.camids for s in splits]))

    @staticmethod
    def join(splits: Sequence[Split]) -> Split:
        """Put splits behind each other; identities and cameras of different splits stay different."""
        pids, camids, first_pid, first_camid = [], [], 0, 0
        for split in splits:
            labels = np.searchsorted(split.identities, split.pids)
            pids.append(labels + first_pid)
            camids.append(split.camids + first_camid)
            first_pid += len(split.identities)
            first_camid += int(split.camids.max(initial=-1)) + 1
        return Split(ImagesInParts([s.images for s in splits]), np.concatenate(pids), np.concatenate(camids))


class GallerySplit(NamedTuple):
    """One way to part a pool of test images into queries and their gallery."""

    query: Index
    """[Q] positions in the pool"""
    gallery: Index
    """[G] positions in the pool"""


@dataclass(frozen=True)
class Domain:
    """One re-ID data set: training images, and a query and gallery set of other identities."""

    name: str
    train: Split | None
    """None for data sets that are only tested on"""
    query: Split
    gallery: Split
    splits: tuple[GallerySplit, ...] = ()
    """where scores are means over several random splits: ``gallery`` is the pool of their images, ``query`` empty"""


class ReIDSource(ABC):
    """Something that provides data sets: a folder, a generator, your own class by its class_path."""

    @abstractmethod
    def domains(self) -> list[Domain]:
        """Return the data sets, in a fixed order, without decoding images.

        Raises:
            DataError: naming the folder or file at fault and the remedy.
        """
