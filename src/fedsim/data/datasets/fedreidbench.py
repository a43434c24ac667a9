"""The data of paper 003 as its authors process and, on request, send them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

import numpy as np

from fedsim.core.errors import DataError
from fedsim.core.paths import given_path
from fedsim.data.datasets.base import Counts, files_of
from fedsim.data.images import Domain, ImageFiles, ReIDSource, Split
from fedsim.data.leftovers import LeftOut, image_files, left_out_beside, sub_folders
from fedsim.data.listing import label_images
from fedsim.settings.facts import NOTHING, Facts

log = logging.getLogger(__name__)

_NAMES = {
    "MSMT17": "msmt17", "DukeMTMC-reID": "dukemtmc", "Market": "market1501", "cuhk03-np-detected": "cuhk03np",
    "prid": "prid2011", "cuhk01": "cuhk01", "viper": "viper", "3dpes": "3dpes", "ilids": "ilids", "cuhk02": "cuhk02",
}  # fmt: skip
"""the authors' folders, in the order of Table 1 -> the names of the same data elsewhere in fedsim"""
_OFFICIAL = {
    "msmt17": Counts(1_041, 32_621, 11_659, 82_161), "dukemtmc": Counts(702, 16_522, 2_228, 17_661),
    "market1501": Counts(751, 12_936, 3_368, 19_732), "cuhk03np": Counts(767, 7_365, 1_400, 5_332),
    "prid2011": Counts(285, 3_744, 100, 649), "cuhk01": Counts(485, 1_940, 972, 972),
    "viper": Counts(316, 632, 316, 316), "3dpes": Counts(93, 450, 246, 316), "ilids": Counts(59, 248, 98, 130),
}  # fmt: skip
"""data set -> its sizes in Table 1; DukeMTMC-reID's gallery is the owners' number, where the table prints 17,611"""
_WITHDRAWN = "DukeMTMC-reID"
_BIG, _SMALL = r"(?P<pid>-1|\d+)_c(?P<cam>\d+)", r"cam_(?P<view>\d+)_(?P<pid>\d+)_"
_TEST_FROM = 100_000
"""first number of the test identities"""


class FedReIDBench(ReIDSource):
    """The nine data sets of paper 003 with their authors' splits, which they send on request (README of their code).

    Folders are ``Market/pytorch/query/0001/0001_c1s1_001051_00.jpg`` or, of the small data sets, names like
    ``cam_0_00012_00001.png``, where cameras and people count from 0; parts are ``train_all``, ``query``, ``gallery``.
    Other folders beside them are not read. ``cuhk02``, the public data, has ``train_all`` alone.

    Args:
        root: the folder that holds ``Market``, ``viper`` and so on.
        names: of these folders; null takes all clients of the paper that are there, but not DukeMTMC-reID, which its
            owners withdrew: a line names the clients of the paper's tables that are left out. ``cuhk02`` is read if it
            is ``data.public``.
    """

    folder_names = MappingProxyType(_NAMES)
    official_counts = MappingProxyType(_OFFICIAL)

    def __init__(
        self,
        root: Annotated[str, NOTHING],
        names: Annotated[list[str] | None, Facts(is_list_of_names=True, spellings=_NAMES)] = None,
    ) -> None:
        self.root, self.names = given_path(root, "data.source.root"), names

    def domains(self) -> list[Domain]:
        """Return one domain per folder; see :meth:`ReIDSource.domains`."""
        clients = [name for name in _NAMES if name not in (_WITHDRAWN, "cuhk02")]
        names = self.names or [name for name in clients if (self.root / name / "pytorch").is_dir()]
        if not names:
            raise DataError(
                f"{self.root}: holds no folder like Market/pytorch; set data.source.root to the folder above it"
            )
        if self.names is None:
            self._log_left_out(names)
        if wrong := [name for name in names if name not in _NAMES]:
            raise DataError(f"data.source.names: there is no {wrong[0]}; choose from {', '.join(_NAMES)}")
        return [self._read(name) for name in names]

    def public_domain(self, name: str) -> Domain | None:
        """Return CUHK02, which is no client; see :meth:`ReIDSource.public_domain`."""
        is_there = (self.root / name / "pytorch").is_dir()
        return self._read(name) if name == "cuhk02" and is_there else None

    def _log_left_out(self, names: Sequence[str]) -> None:
        """Log the clients of the paper's tables that a run on all folders has not."""
        missing = [name for name in _NAMES if name not in (*names, "cuhk02", _WITHDRAWN)]
        reasons = [f"{', '.join(missing)} ({'is' if len(missing) == 1 else 'are'} not there)"] if missing else []
        if (self.root / _WITHDRAWN / "pytorch").is_dir():
            every = ", ".join(name for name in _NAMES if name in (*names, _WITHDRAWN))
            reasons.append(f"{_WITHDRAWN} (withdrawn by its owners; data.source.names '[{every}]' takes it)")
        else:
            reasons.append(f"{_WITHDRAWN} (withdrawn by its owners, and not there)")
        log.warning("%s: left out of the nine clients of paper 003: %s", self.root, "; ".join(reasons))

    def left_out(self, domains: Sequence[Domain]) -> dict[str, list[LeftOut]]:
        """Return the other files beside the images; see :meth:`ReIDSource.left_out`."""
        return {domain.name: left_out_beside(files_of(domain)) for domain in domains}

    def _read(self, name: str) -> Domain:
        folder = self.root / name / "pytorch"
        has_distractors = name == "Market"  # elsewhere 0 is a person; in MSMT17 two people, one of them in training
        train = _part(folder / "train_all", 0 if has_distractors else 1)
        if name == "cuhk02":
            no_images = train.take(np.array([], dtype=np.int64))
            return Domain(_NAMES[name], train, no_images, no_images)
        query, gallery = (_part(folder / part, 0 if has_distractors else _TEST_FROM) for part in ("query", "gallery"))
        return Domain(_NAMES[name], train, query, gallery)


def _part(folder: Path, first: int) -> Split:
    """Return the images in the sub-folders of people, whose numbers are raised by ``first``; junk stays -1."""
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; the authors' processed data have train_all, query and gallery")
    paths = list(chain.from_iterable(image_files(person) for person in sub_folders(folder)))
    if not paths:
        raise DataError(
            f"{folder}: holds no images in folders of people; the authors' data have 0001/0001_c1s1_....jpg"
        )
    is_small = bool(paths) and paths[0].name.startswith("cam_")
    example = "cam_0_00012_00001.png" if is_small else "0001_c1s1_001051_00.jpg"
    split = label_images(paths, _SMALL if is_small else _BIG, example)
    assert isinstance(split.images, ImageFiles)
    return replace(split, pids=split.pids + first * (split.pids >= 0))
