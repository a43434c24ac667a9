"""What all data sets on disk have in common: a folder, a way to read it, and counts that it should have."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedsim.core.errors import DataError
from fedsim.core.seeding import numpy_generator
from fedsim.data.images import Domain, Index, ReIDSource, Split
from fedsim.data.splits import SplitStyle, draw_splits

__all__ = ["Counts", "DataSet", "half_split", "pool"]


class Counts(NamedTuple):
    """Sizes that a complete data set has; None where they depend on a split."""

    identities: int | None
    """of training"""
    train: int | None
    """training images"""
    query: int
    gallery: int


class DataSet(ReIDSource):
    """One data set on disk. Subclasses say where it is and how its files are read.

    Args:
        root: its folder, or one that contains it under one of its usual names.
    """

    name: str
    """of the domain"""
    folders: tuple[str, ...]
    """usual names of its folder"""
    holds: tuple[str, ...]
    """what is in that folder, by which it is recognised"""
    official: Counts | None = None
    """sizes of the complete data set"""
    ask: str
    """whom to ask for it"""
    is_standin = False
    """whether its files are drawn"""

    def __init__(self, root: str) -> None:
        self.root = Path(root).expanduser()

    def domains(self) -> list[Domain]:
        """Return the data set; see :meth:`ReIDSource.domains`."""
        return self.domains_in(self.find())

    def domains_in(self, folder: Path) -> list[Domain]:
        """Return the data set that is in ``folder``; a few are several domains."""
        return [self.read(folder)]

    def find(self) -> Path:
        """Return its folder.

        Raises:
            DataError: if it is not there.
        """
        for folder in (*(self.root / name for name in self.folders), self.root):
            if folder.is_dir() and all((folder / part).exists() for part in self.holds):
                return folder
        raise DataError(
            f"{self.root}: holds no {self.name}, which is a folder {self.folders[0]} with {', '.join(self.holds)}; "
            f"{self.ask}"
        )

    @abstractmethod
    def read(self, folder: Path) -> Domain:
        """List its files.

        Raises:
            DataError: naming the folder or file at fault and the rule.
        """


def half_split(name: str, images: Split, num_train: int, always: Index | None = None, seed: int = 0) -> Domain:
    """Part a small data set by identities: one half trains, of the other camera 0 asks and the other cameras answer.

    Args:
        name: of the data set; with the seed, it decides who trains.
        images: all of them.
        num_train: identities to train on, at most half of those with images from several cameras.
        always: positions of gallery images that nobody asks for.
        seed: of the split; papers publish none.
    """
    extra = np.array([], dtype=np.int64) if always is None else always
    paired = np.setdiff1d(np.unique(images.pids), images.pids[extra])
    if len(paired) < 2:
        raise DataError(f"{name}: {len(paired)} identities seen by two cameras are too few to train and test on")
    trained = numpy_generator("half split", name, seed).permutation(paired)[: min(num_train, len(paired) // 2)]
    is_train = np.isin(images.pids, trained)
    is_test = np.isin(images.pids, np.setdiff1d(paired, trained))
    gallery = np.union1d(np.flatnonzero(is_test & (images.camids > 0)), extra)
    return Domain(
        name,
        images.take(np.flatnonzero(is_train)),
        images.take(np.flatnonzero(is_test & (images.camids == 0))),
        images.take(gallery),
    )


def pool(name: str, images: Split, style: SplitStyle) -> Domain:
    """A small data set that is tested on alone: ten random half splits, papers 000 and 001.

    Args:
        name: of the data set.
        images: all of them.
        style: see :func:`fedsim.data.splits.draw_splits`.
    """
    nobody = images.take(np.array([], dtype=np.int64))
    return Domain(name, None, nobody, images, tuple(draw_splits(images.pids, images.camids, style=style)))
