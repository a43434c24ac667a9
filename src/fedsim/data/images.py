"""Lists of images that are decoded later, and splits: images with their labels.

torch is imported only when images are decoded: its import takes seconds, and listing a folder does not need it.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fedsim.core.arguments import KeepsArguments
from fedsim.core.errors import DataError
from fedsim.core.names import problem_of_name
from fedsim.data.leftovers import LeftOut
from fedsim.data.one_image import read_into, resize_into
from fedsim.data.reading import upright_size

if TYPE_CHECKING:
    from torch import Tensor

Size = tuple[int, int]  # (height, width) in pixels
Index = NDArray[np.int64]

CHUNK = 64
"""images decoded between two reports of progress"""


class Images(ABC):
    """An ordered list of images that can be decoded to one tensor."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def take(self, index: Index) -> Images:
        """Return the images at the positions ``index`` [m], in that order."""

    @abstractmethod
    def decode(self, size: Size) -> Tensor:
        """Return all images as uint8 [n, 3, H, W], RGB; raise DataError naming an image that cannot be read."""

    def locations(self) -> list[Path | None]:
        """Return the path of each image; None for an image without a file."""
        return [None] * len(self)

    def whole_files(self) -> list[Path]:
        """Return the image files that are decoded as a whole by :func:`read_into`: others may be frames with boxes."""
        return []

    def origins(self) -> list[Path | None]:
        """Return the file that decides the pixels of each image; None for an image without a file."""
        return self.locations()

    def content(self) -> bytes | None:
        """Return a hash of what decides the pixels of images without a file, b"" if there are none; None: not known."""
        return None if None in self.origins() else b""

    def sizes(self) -> list[Size | None]:
        """Return the height and width of each image before resizing; None for an image without a fixed size."""
        return [None] * len(self)

    def is_decoded(self, size: Size) -> bool:  # noqa: ARG002 - subclasses need it
        """Whether :meth:`decode` only copies."""
        return False

    @property
    def in_threads(self) -> bool:
        """Whether several threads may call :meth:`decode` of parts of the list at once, and gain from it."""
        return False

    def chunks(self, length: int = CHUNK) -> Iterator[Images]:
        """Yield short parts of the list, so that a caller can show its progress."""
        for start in range(0, len(self), length):
            yield self.take(np.arange(start, min(start + length, len(self)), dtype=np.int64))


class ImageFiles(Images):
    """Image files, decoded by :func:`read_into` and resized with antialiasing (bicubic)."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = tuple(paths)

    def __len__(self) -> int:
        return len(self.paths)

    def take(self, index: Index) -> ImageFiles:
        """Return the files at the positions ``index``."""
        return ImageFiles([self.paths[i] for i in index])

    def locations(self) -> list[Path | None]:
        """Return the files."""
        return list(self.paths)

    def whole_files(self) -> list[Path]:
        """Return the files, unless a subclass decodes otherwise."""
        return list(self.paths) if type(self) is ImageFiles else []

    def sizes(self) -> list[Size | None]:
        """Read the size of each file from its beginning, as it is when the image is upright."""
        return [upright_size(path) for path in self.paths]

    @property
    def in_threads(self) -> bool:
        """Pillow frees the interpreter while it decodes and resizes."""
        return True

    def decode(self, size: Size) -> Tensor:
        """Read all files; see :meth:`Images.decode`."""
        out = np.empty((len(self), 3, *size), dtype=np.uint8)
        for pixels, path in zip(out, self.paths, strict=True):
            read_into(pixels, path)
        return _as_tensor(out)


class ImageArray(Images):
    """Images in memory, uint8 [n, H, W, 3], RGB, resized like :class:`ImageFiles`."""

    def __init__(self, pixels: NDArray[np.uint8]) -> None:
        self.pixels = pixels

    def __len__(self) -> int:
        return len(self.pixels)

    def take(self, index: Index) -> ImageArray:
        """Return a copy of the images at the positions ``index``."""
        return ImageArray(self.pixels[index])

    def content(self) -> bytes:
        """Return a hash of the pixels."""
        return hashlib.sha256(np.ascontiguousarray(self.pixels).data).digest()

    def sizes(self) -> list[Size | None]:
        """Return H and W, which all images share."""
        height, width = self.pixels.shape[1:3]
        return [(height, width)] * len(self)

    def decode(self, size: Size) -> Tensor:
        """Resize all images; see :meth:`Images.decode`."""
        out = np.empty((len(self), 3, *size), dtype=np.uint8)
        for resized, pixels in zip(out, self.pixels, strict=True):
            resize_into(resized, Image.fromarray(pixels))
        return _as_tensor(out)


def _as_tensor(pixels: NDArray[np.uint8]) -> Tensor:
    """Return the same memory as a tensor."""
    import torch

    return torch.from_numpy(pixels)


class ImagesInParts(Images):
    """Several lists of images, one after the other (for clients with several data sets)."""

    def __init__(self, parts: Sequence[Images]) -> None:
        self.parts = tuple(parts)

    def __len__(self) -> int:
        return sum(len(part) for part in self.parts)

    def take(self, index: Index) -> Images:
        """Return the images at the positions ``index``; neighbours of one part stay together."""
        bounds = np.cumsum([0, *(len(part) for part in self.parts)])
        part_of = np.searchsorted(bounds, index, side="right") - 1
        cuts = np.flatnonzero(np.diff(part_of)) + 1
        runs = np.split(np.arange(len(index)), cuts) if len(index) else []
        return ImagesInParts([self.parts[part_of[run[0]]].take(index[run] - bounds[part_of[run[0]]]) for run in runs])

    def locations(self) -> list[Path | None]:
        """Return the path of each image; see :meth:`Images.locations`."""
        return [path for part in self.parts for path in part.locations()]

    def whole_files(self) -> list[Path]:
        """Return the image files of all parts; see :meth:`Images.whole_files`."""
        return [path for part in self.parts for path in part.whole_files()]

    def origins(self) -> list[Path | None]:
        """Return the file of each image; see :meth:`Images.origins`."""
        return [path for part in self.parts for path in part.origins()]

    def content(self) -> bytes | None:
        """Return the hashes of all parts; see :meth:`Images.content`."""
        contents = [part.content() for part in self.parts]
        return None if None in contents else b"".join(filter(None, contents))

    def sizes(self) -> list[Size | None]:
        """Return the stored size of each image; see :meth:`Images.sizes`."""
        return [size for part in self.parts for size in part.sizes()]

    def is_decoded(self, size: Size) -> bool:
        """Whether all parts are decoded."""
        return all(part.is_decoded(size) for part in self.parts)

    @property
    def in_threads(self) -> bool:
        """Whether all parts allow it."""
        return all(part.in_threads for part in self.parts)

    def decode(self, size: Size) -> Tensor:
        """Decode part after part; see :meth:`Images.decode`."""
        import torch

        return torch.cat([torch.empty((0, 3, *size), dtype=torch.uint8), *(part.decode(size) for part in self.parts)])


def turns(labels: Index) -> Index:
    """Return the number of equal labels before each label.

    >>> turns(np.array([3, 7, 3, 3, 7]))
    array([0, 0, 1, 2, 1])
    """
    counts = np.zeros(len(labels), dtype=np.int64)
    for label in np.unique(labels):
        has_label = labels == label
        counts[has_label] = np.arange(has_label.sum())
    return counts


@dataclass(frozen=True)
class Split:
    """n images with identity and camera."""

    images: Images
    pids: Index
    """[n] identity; -1 marks junk, 0 distractors (Market-1501's convention)"""
    camids: Index
    """[n] camera, from 0"""

    def __len__(self) -> int:
        return len(self.pids)

    def take(self, index: Index) -> Split:
        """Return the images at the positions ``index`` [m]."""
        return Split(self.images.take(index), self.pids[index], self.camids[index])

    @property
    def files(self) -> list[Path]:
        """The files of the images that have one, in their order."""
        return [path for path in self.images.locations() if path is not None]

    @property
    def identities(self) -> Index:
        """The identities, sorted."""
        return np.unique(self.pids)

    @staticmethod
    def concatenate(splits: Sequence[Split]) -> Split:
        """Put splits one after the other; equal numbers mean the same identity or camera."""
        images = ImagesInParts([s.images for s in splits])
        return Split(images, np.concatenate([s.pids for s in splits]), np.concatenate([s.camids for s in splits]))

    @staticmethod
    def join(splits: Sequence[Split]) -> Split:
        """Put splits one after the other; equal numbers in two splits mean different identities or cameras."""
        apart, first_pid, first_camid = [], 0, 0
        for split in splits:
            labels = np.searchsorted(split.identities, split.pids)
            apart.append(Split(split.images, first_pid + labels, first_camid + split.camids))
            first_pid += len(split.identities)
            first_camid += int(split.camids.max(initial=-1)) + 1
        return Split.concatenate(apart)


class GallerySplit(NamedTuple):
    """One way to divide a pool of test images into queries and gallery."""

    query: Index
    """[Q] positions in the pool"""
    gallery: Index
    """[G] positions in the pool"""


@dataclass(frozen=True)
class Domain:
    """One re-ID data set: training images, and a query and gallery set of other identities."""

    name: str
    train: Split | None
    """None for test-only data sets"""
    query: Split
    gallery: Split
    splits: tuple[GallerySplit, ...] = ()
    """if not empty, scores are means over these splits: ``gallery`` is their pool of images, ``query`` is empty"""
    unlabelled: bool | None = None
    """whether the identities of training images are unknown; None: they are if all of them are 0"""

    def __post_init__(self) -> None:
        """Raise DataError if the name is none: files, metrics and tables are named after it."""
        if problem := problem_of_name(self.name):
            raise DataError(f"data.source: of a data set, {problem}; rename its folder")

    @property
    def lacks_identities(self) -> bool:
        """Whether the identities of training images are unknown: as the source says, or if all are 0."""
        return not (self.train is None or self.train.pids.any()) if self.unlabelled is None else self.unlabelled

    @property
    def parts(self) -> list[Split]:
        """Training images, if there are any, queries and gallery."""
        return [split for split in (self.train, self.query, self.gallery) if split is not None]

    def map_splits(self, change: Callable[[Split], Split]) -> Domain:
        """Return a data set with training images, query and gallery changed."""
        train = None if self.train is None else change(self.train)
        return replace(self, train=train, query=change(self.query), gallery=change(self.gallery))


class ReIDSource(KeepsArguments, ABC, option="data.source"):
    """A provider of data sets: a folder, a generator, or your own class, named by its class_path."""

    @abstractmethod
    def domains(self) -> list[Domain]:
        """Return the data sets, in a fixed order, without decoding images.

        Raise DataError with the folder or file, the problem and the remedy.
        """

    folder_names: Mapping[str, str] = MappingProxyType({})
    """other names of its data sets, such as those of folders -> names; ``data.public`` and ``data.unseen`` take both"""

    def public_domain(self, name: str) -> Domain | None:  # noqa: ARG002 - subclasses need it
        """Return a data set that :meth:`domains` lists only if it is public; None if there is none of this name."""
        return None

    def digest(self) -> str | None:
        """Return a short text that decides all of its images; None: there is none, and each data set has a digest."""
        return None

    def left_out(self, domains: Sequence[Domain]) -> dict[str, list[LeftOut]]:  # noqa: ARG002 - subclasses need it
        """Return, for each data set of :meth:`domains`, the files beside its images that are not read.

        A source of your own names none.
        """
        return {}
