"""Omniglot (Lake et al., Science 2015) as re-identification: alphabets are data sets, characters identities."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np

from fedsim.core.checks import within
from fedsim.core.errors import DataError
from fedsim.data.datasets.base import Counts, DataSet
from fedsim.data.images import Domain, Images, Index, Size, Split
from fedsim.data.leftovers import sub_folders
from fedsim.data.listing import number_of, read_folder
from fedsim.settings.facts import NOTHING, Facts

if TYPE_CHECKING:
    from torch import Tensor

_BACKGROUND, _EVALUATION = "images_background", "images_evaluation"
_DRAWERS = 20
_QUERY_EVERY = 4


class InkImages(Images):
    """Images of black ink on white paper, inverted: paper is 0, as padding is."""

    def __init__(self, images: Images) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def take(self, index: Index) -> InkImages:
        """Return the images at the positions ``index``."""
        return InkImages(self.images.take(index))

    def origins(self) -> list[Path | None]:
        """Return the files; see :meth:`Images.origins`."""
        return self.images.origins()

    def sizes(self) -> list[Size | None]:
        """Return the stored size of each image; see :meth:`Images.sizes`."""
        return self.images.sizes()

    def decode(self, size: Size) -> Tensor:
        """Decode and invert; see :meth:`Images.decode`."""
        return 255 - self.images.decode(size)


class Omniglot(DataSet):
    """Omniglot in torchvision's layout: one domain per alphabet, identity = character, camera = drawer.

    ``images_background``: 30 alphabets, 964 characters, 19,280 images; the first half of an alphabet's characters is
    for training, the others for test. ``images_evaluation``: 20 alphabets, 659 characters, 13,180 images, all unseen.
    Drawers 1, 5, 9, 13 and 17 of 20 are queries, the others the gallery. In names such as
    ``images_background/Latin/character01/0709_01.png`` the drawer comes last. Ink is black in the files and white here.
    A domain has the name of its alphabet without parentheses.

    Args:
        root: see :class:`DataSet`.
        alphabets: their names, in this order; null takes all, sorted, background first.
        train_share: share of training characters in a background alphabet, rounded down; 0 makes it unseen.
        drawers_per_camera: number of neighbouring drawers per camera; with 4 some matches are junk, as in
            ``configs/omniglot.yaml``.
    """

    name = "omniglot"
    folders = ("omniglot-py", "omniglot", "Omniglot")
    holds: tuple[str, ...] = (_BACKGROUND,)
    official: Counts | None = Counts(477, 9_540, 5_730, 17_190)
    ask = "it is free, from github.com/brendenlake/omniglot"

    def __init__(
        self,
        root: Annotated[str, NOTHING],
        alphabets: Annotated[list[str] | None, Facts(is_list_of_names=True)] = None,
        train_share: float = 0.5,
        drawers_per_camera: int = 1,
    ) -> None:
        super().__init__(root)
        within("data.source", "[0, 1)", train_share=train_share)
        within("data.source", "[1, 19]", drawers_per_camera=drawers_per_camera)
        self.alphabets, self.train_share, self.drawers_per_camera = alphabets, train_share, drawers_per_camera
        if alphabets is not None or train_share != 0.5:
            self.official = None

    def domains_in(self, folder: Path) -> list[Domain]:
        """Return one domain per alphabet; see :meth:`DataSet.domains_in`."""
        path_of = _alphabets(folder)
        wanted = list(path_of) if self.alphabets is None else [alphabet_name(name) for name in self.alphabets]
        if absent := [name for name in wanted if name not in path_of]:
            raise DataError(f"{folder}: holds no alphabet {absent[0]}; there are {', '.join(path_of) or 'none'}")
        return [self._read(path_of[name]) for name in wanted]

    def _read(self, folder: Path) -> Domain:
        splits = [_read_character(path) for path in sub_folders(folder)]
        if not splits:
            raise DataError(f"{folder}: holds no folders like character01")
        files = Split.concatenate(splits)
        share = self.train_share if folder.parent.name == _BACKGROUND else 0.0
        trained = files.identities[: int(share * len(files.identities))]
        is_train, is_query = np.isin(files.pids, trained), files.camids % _QUERY_EVERY == 0
        images = Split(InkImages(files.images), files.pids, files.camids // self.drawers_per_camera)
        return Domain(
            alphabet_name(folder.name),
            images.take(np.flatnonzero(is_train)) if len(trained) else None,
            images.take(np.flatnonzero(~is_train & is_query)),
            images.take(np.flatnonzero(~is_train & ~is_query)),
        )


def alphabet_name(folder: str) -> str:
    """Return the domain's name: that of the folder without parentheses.

    >>> alphabet_name("Japanese_(katakana)")
    'Japanese_katakana'
    """
    return folder.replace("(", "").replace(")", "")


def _alphabets(folder: Path) -> dict[str, Path]:
    """Name -> folder, sorted, background alphabets first."""
    path_of: dict[str, Path] = {}
    for part in (_BACKGROUND, _EVALUATION):
        for path in sub_folders(folder / part) if (folder / part).is_dir() else []:
            name = alphabet_name(path.name)
            if name in path_of:
                raise DataError(f"{path}: this alphabet is also in {path_of[name].parent}; unseen ones must be new")
            path_of[name] = path
    return path_of


def _read_character(folder: Path) -> Split:
    character = re.fullmatch(r"character(\d+)", folder.name)
    number = number_of(character[1], folder) if character else 0
    if number == 0:
        raise DataError(f"{folder}: the name is not like character01")
    expected = "0709_01.png"
    split = read_folder(folder, r"\d+_(?P<cam>\d+)\.", expected)
    if split.camids.max() >= _DRAWERS:
        path = split.images.locations()[split.camids.argmax()]
        raise DataError(f"{path}: drawers are numbered from 1 to {_DRAWERS}, as in {expected}")
    return replace(split, pids=np.full_like(split.pids, number))
