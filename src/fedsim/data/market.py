"""Data sets in the layout of Market-1501 (Zheng et al., ICCV 2015)."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from fedsim.core.errors import DataError
from fedsim.core.paths import FOLDER, given_path
from fedsim.data.images import Domain, GallerySplit, Index, ReIDSource, Split
from fedsim.data.leftovers import BY_PROTOCOL, LeftOut, images_outside, left_out_in, sub_folders, summary
from fedsim.data.listing import read_folder
from fedsim.data.splits import read_splits, sample_splits, write_splits
from fedsim.settings.facts import NOTHING, Facts

PARTS = TRAIN, QUERY, GALLERY = "bounding_box_train", "query", "bounding_box_test"
SPLITS = "splits.json"
Unmatched = Literal["leave_out", "refuse"]
"""treatment of queries of people without an image in the gallery"""

_NAME = r"(?P<pid>-1|\d+)_c(?P<cam>\d+)"
_EXAMPLE = "0001_c1s1_001051_00.jpg"
_CAMERA = r"(?:[^_]*_)*?c(?P<cam>\d+)"
_CAMERA_EXAMPLE = "c1_001051.jpg"
_NEAR = 0.85  # similarity of a name from which on it is taken for a misspelt part
_DEEP = "data sets one folder too deep, to be moved up"
_UNMATCHED = f"queries without a match: their people have no image in {GALLERY}"


class MarketFolders(ReIDSource):
    """Data sets in the layout of Market-1501: ``query``, ``bounding_box_test`` and maybe ``bounding_box_train``.

    A data set with a file ``splits.json`` (written by ``fedsim data splits``) needs no ``query`` folder: it is scored
    on random splits of ``bounding_box_test``. Without training images it is test-only.

    File names start with identity and camera: ``0001_c1s1_001051_00.jpg`` is identity 1, camera 1 (stored from 0).
    Identity -1 marks junk images and 0 distractors. Files, identities and data sets are sorted by name, so labels are
    the same everywhere.

    Args:
        root: the folder of one data set, or of several.
        names: of the data sets, in this order; null takes all, sorted.
        unlabelled: identities of training images are unknown. Only the camera is read from their names: the number
            after the first ``c`` that begins a part (``c3_0001.jpg``, ``-1_c3s1_0001.jpg``). Clients then need
            ``model.client.cluster``, and ``data.val`` must be none.
        unmatched: queries of people without an image in ``bounding_box_test``: leave_out, with a line, as torchreid and
            fast-reid do; or refuse the data set.
    """

    def __init__(
        self,
        root: Annotated[str, NOTHING],
        names: Annotated[list[str] | None, Facts(is_list_of_names=True)] = None,
        unlabelled: bool = False,
        unmatched: Unmatched = "leave_out",
    ) -> None:
        self.root, self.names = given_path(root, "data.source.root"), names
        self.unlabelled, self.unmatched = unlabelled, unmatched

    def domains(self) -> list[Domain]:
        """Return one domain per data set; see :meth:`ReIDSource.domains`."""
        return [
            read_market_domain(folder, unlabelled=self.unlabelled, unmatched=self.unmatched)
            for folder in self._folders()
        ]

    def left_out(self, domains: Sequence[Domain]) -> dict[str, list[LeftOut]]:
        """Return the other files beside the images; see :meth:`ReIDSource.left_out`."""
        items = {domain.name: left_out_of(f, domain) for f, domain in zip(self._folders(), domains, strict=True)}
        return items if self.names is not None else {**items, str(self.root): misplaced(self.root)}

    def _folders(self) -> list[Path]:
        """Return the folder of each data set; raise DataError if there is none."""
        FOLDER.check(self.root, "data.source.root")
        if self.names is not None:
            return [self.root / name for name in self.names]
        if is_market_folder(self.root):
            return [self.root]
        if not (folders := market_folders(self.root)):
            layout = f"a folder with {', '.join(PARTS)}"
            advice = f"; {summary(items)}" if (items := misplaced(self.root)) else ""
            raise DataError(f"{self.root}: no data set in Market-1501 layout, which is {layout}{advice}")
        return folders


def is_market_folder(folder: Path) -> bool:
    """Whether a folder is a data set in Market-1501 layout: it has one of its sub-folders."""
    return any(os.path.isdir(folder / part) for part in PARTS)


def market_folders(root: Path) -> list[Path]:
    """Return the data sets in ``root``, sorted; folders that a system or another program left are none."""
    return [folder for folder in sub_folders(root) if is_market_folder(folder)]


def misplaced(root: Path) -> list[LeftOut]:
    """Return the folders that would be data sets in ``root`` one folder higher, or with another name of a part."""
    items = []
    for folder in [] if is_market_folder(root) else sub_folders(root):
        if is_market_folder(folder):
            continue
        items += [LeftOut(inner, _DEEP) for inner in _folders_in(folder) if is_market_folder(inner)]
        items += [LeftOut(inner, f"to be renamed {part}") for part, inner in _nearly_parts(folder).items()]
    return items


def _nearly_parts(folder: Path) -> dict[str, Path]:
    """Return the sub-folders of a data set whose names are nearly those of parts that it lacks, by these names."""
    inner = {re.sub(r"\W", "_", path.name.lower()): path for path in _folders_in(folder) if path.name not in PARTS}
    close = {part: get_close_matches(part, inner, 1, _NEAR) for part in PARTS if not os.path.isdir(folder / part)}
    return {part: inner[names[0]] for part, names in close.items() if names}


def _folders_in(folder: Path) -> list[Path]:
    """Return the folders in a folder; none if it cannot be listed."""
    try:
        return sub_folders(folder)
    except DataError:
        return []


def left_out_of(folder: Path, domain: Domain) -> list[LeftOut]:
    """Return the files in the parts of a data set that are not read, and images that are in none of its parts."""
    read = {str(path) for split in domain.parts for path in split.files}
    items = [item for part in PARTS if (folder / part).is_dir() for item in left_out_in(folder / part, read)]
    if len(domain.query):  # else splits.json takes the place of the folder
        unmatched = folder / QUERY, BY_PROTOCOL  # all other images there are read
        items = [i._replace(reason=_UNMATCHED) if (i.path.parent, i.reason) == unmatched else i for i in items]
    looked_at = {*PARTS, *(data_set.name for data_set in market_folders(folder))}  # it may be a root of data sets, too
    return items + [LeftOut(path, f"outside of {', '.join(PARTS)}") for path in images_outside(folder, looked_at)]


def read_market_domain(
    folder: Path, name: str | None = None, pattern: str = _NAME, expected: str = _EXAMPLE,
    parts: Sequence[str] = PARTS, unlabelled: bool = False, unmatched: Unmatched = "refuse",
) -> Domain:  # fmt: skip
    """List a data set in this layout; raise DataError with the folder or file and the problem.

    ``name``: of the domain, by default that of the folder. ``parts``: its sub-folders for training images, queries and
    gallery; ``splits.json`` is read only beside those of Market-1501, for which :func:`write_market_splits` writes it.
    ``unlabelled`` and ``unmatched``: see :class:`MarketFolders`. Other arguments: see
    :func:`fedsim.data.listing.label_images`.
    """
    for part, inner in _nearly_parts(folder).items() if parts == PARTS else ():
        raise DataError(f"{inner}: a data set has a folder {part}; rename this one, or move it out of {folder.name}")
    of_train, of_query, of_gallery = (folder / part for part in parts)
    train = None
    if unlabelled and of_train.is_dir():
        train = read_folder(of_train, _CAMERA, _CAMERA_EXAMPLE)
    elif of_train.is_dir():
        train = read_folder(of_train, pattern, expected)
        if train.pids.max() < 0:
            raise DataError(f"{of_train}: holds only junk images (identity -1); training needs identities from 0 on")
        train = train.take(np.flatnonzero(train.pids >= 0))
    gallery = read_folder(of_gallery, pattern, expected)
    name = name or (folder.name if folder.name not in ("", "..") else folder.resolve().name)
    if parts == PARTS and (folder / SPLITS).is_file():
        _check_new(train, of_train, gallery.pids[gallery.pids > 0], of_gallery)
        no_query = gallery.take(np.array([], dtype=np.int64))
        splits = read_splits(folder / SPLITS, [path.name for path in gallery.files])
        return Domain(name, train, no_query, gallery, splits, unlabelled=unlabelled)
    query = read_folder(of_query, pattern, expected)
    matched = np.flatnonzero(np.isin(query.pids, gallery.pids))
    if len(matched) < len(query) and (unmatched == "refuse" or not len(matched)):
        lonely = np.setdiff1d(query.pids, gallery.pids)
        more = f" (and {len(lonely) - 1} more)" if len(lonely) > 1 else ""
        raise DataError(
            f"{of_query}: identity {lonely[0]:04d} has no image in {of_gallery.name}{more}; "
            "add gallery images or remove the queries"
        )
    query = query.take(matched) if len(matched) < len(query) else query
    _check_new(train, of_train, query.pids, of_query)
    return Domain(name, train, query, gallery, unlabelled=unlabelled)


def _check_new(train: Split | None, of_train: Path, tested: Index, of_test: Path) -> None:
    if train is not None and len(common := np.intersect1d(train.pids, tested)):
        raise DataError(
            f"{of_train.parent}: identity {common[0]:04d} is both in {of_train.name} and in {of_test.name}; "
            "test identities must be new"
        )


def write_market_splits(folder: Path, **options: Any) -> tuple[Path, list[GallerySplit]]:
    """Sample splits of ``bounding_box_test`` by :func:`fedsim.data.splits.sample_splits`; return (file, splits)."""
    pool = read_folder(folder / GALLERY, _NAME, _EXAMPLE)
    splits = sample_splits(pool.pids, pool.camids, **options)
    write_splits(folder / SPLITS, splits, [path.name for path in pool.files])
    return folder / SPLITS, splits
