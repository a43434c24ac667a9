"""The base of all data sets on disk: a folder, a way to read it, and the official counts."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

from fedsim.core.errors import DataError
from fedsim.core.paths import given_path
from fedsim.data.images import Domain, ReIDSource
from fedsim.data.leftovers import LeftOut, left_out_beside, sub_folders
from fedsim.settings.facts import NOTHING


class Counts(NamedTuple):
    """Sizes of a complete data set; None where they depend on a split."""

    identities: int | None
    """of training"""
    train: int | None
    """training images"""
    query: int
    gallery: int


class DataSet(ReIDSource):
    """One data set on disk. A subclass names its folder and reads its files.

    Args:
        root: its folder, or one that contains it under one of its usual names, or a folder further down, as torchreid
            has it (``viper/VIPeR``).
    """

    name: str
    """of the domain"""
    folders: tuple[str, ...]
    """usual names of its folder"""
    holds: tuple[str, ...]
    """files and folders in it, by which it is recognised"""
    official: Counts | None = None
    """sizes of the complete data set"""
    ask: str
    """how to get it, for messages"""
    is_standin = False
    """whether its files are drawn"""

    def __init__(self, root: Annotated[str, NOTHING]) -> None:
        self.root = given_path(root, "data.source.root")

    def domains(self) -> list[Domain]:
        """Return the data set; see :meth:`ReIDSource.domains`."""
        return self.domains_in(self.find())

    def domains_in(self, folder: Path) -> list[Domain]:
        """Return the domains in ``folder``: mostly one."""
        return [self._read(folder)]

    def left_out(self, domains: Sequence[Domain]) -> dict[str, list[LeftOut]]:
        """Return the other files beside the images; see :meth:`ReIDSource.left_out`."""
        files = {d.name: [path for part in d.parts for path in part.images.origins() if path] for d in domains}
        return {name: left_out_beside(paths) for name, paths in files.items()}

    def find(self) -> Path:
        """Return its folder; raise DataError if it is missing."""
        inner = sub_folders(self.root) if self.root.is_dir() else []
        below = (folder / name for name in self.folders for folder in inner)
        for folder in (*(self.root / name for name in self.folders), self.root, *below):
            if os.path.isdir(folder) and all(self._is_part(folder / part) for part in self.holds):
                return folder
        raise DataError(
            f"{self.root}: holds no {self.name}, which is a folder {self.folders[0]} with {', '.join(self.holds)}; "
            f"{self.ask}"
        )

    def _is_part(self, path: Path) -> bool:
        """Whether a part of the data set is there."""
        return os.path.exists(path)

    @abstractmethod
    def _read(self, folder: Path) -> Domain:
        """List its files; raise DataError with the folder or file and the problem."""


def files_of(domain: Domain) -> list[Path]:
    """Return the image files of a data set."""
    return [path for split in domain.parts for path in split.files]
