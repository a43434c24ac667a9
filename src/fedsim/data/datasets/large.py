"""The large data sets of the papers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import numpy as np

from fedsim.core.errors import ConfigError, DataError
from fedsim.data.datasets.base import Counts, DataSet
from fedsim.data.images import Domain, Split
from fedsim.data.listing import label_images, number_of
from fedsim.data.market import read_market_domain
from fedsim.settings.facts import NOTHING


class Market1501(DataSet):
    """Market-1501 (Zheng et al., ICCV 2015): 1,501 people, 6 cameras.

    Training 751 identities, 12,936 images; 3,368 queries; gallery 19,732 files, of which 2,798 show distractors
    (identity 0) and 3,819 junk (-1). Names like ``0001_c1s1_001051_00.jpg``.
    """

    name = "market1501"
    folders: tuple[str, ...] = ("Market-1501-v15.09.15", "Market-1501", "market1501")
    holds: tuple[str, ...] = ("bounding_box_train", "query", "bounding_box_test")
    official: Counts | None = Counts(751, 12_936, 3_368, 19_732)
    ask = "ask its authors, Liang Zheng et al."

    def _read(self, folder: Path) -> Domain:
        return read_market_domain(folder, self.name)


class DukeMTMC(Market1501):
    """DukeMTMC-reID (Zheng et al., ICCV 2017): 702 identities, 16,522 images; 2,228 queries; gallery 17,661.

    Its owners withdrew it in 2019: the recordings went beyond the consent of the people and the university's board. It
    is here for necessary comparisons by users who already have it. The papers' configs do not set the acknowledgement
    below.

    Args:
        root: see :class:`DataSet`.
        i_know_duke_is_withdrawn: the acknowledgement; must be true.
    """

    name = "dukemtmc"
    folders = ("DukeMTMC-reID", "dukemtmc-reid")
    official = Counts(702, 16_522, 2_228, 17_661)
    ask = "it was withdrawn in 2019; leave it out, as configs/data/fedreidbench_eight.yaml does"

    def __init__(
        self, root: Annotated[str, NOTHING], i_know_duke_is_withdrawn: Annotated[bool, NOTHING] = False
    ) -> None:
        super().__init__(root)
        self.i_know_duke_is_withdrawn = i_know_duke_is_withdrawn

    def find(self) -> Path:
        """Return its folder; see :meth:`DataSet.find`."""
        if not (self.i_know_duke_is_withdrawn or self.is_standin):
            raise ConfigError(
                "data.source.i_know_duke_is_withdrawn: DukeMTMC-reID was withdrawn by its owners; leave it out, as "
                "configs/data/fedreidbench_eight.yaml does, or set this to true in a copy of the config if you must "
                "compare"
            )
        return super().find()


class CUHK03NP(DataSet):
    """CUHK03 (Li et al., CVPR 2014) in its new protocol (Zhong et al., CVPR 2017): 767 training identities, 2 cameras.

    detected: 7,365 training images, 1,400 queries, gallery 5,332; labeled: 7,368, 1,400, 5,328. Names like
    ``0003_c1_21.png``, or ``1_003_1_02.png`` (pair, person, view, image), as some programs name images of the .mat
    file.

    Args:
        root: see :class:`DataSet`.
        variant: boxes by a detector (paper 003) or by hand (paper 000).
    """

    name = "cuhk03np"
    folders = ("cuhk03-np", "CUHK03-NP")
    official: Counts | None = Counts(767, 7_365, 1_400, 5_332)
    ask = "ask the Multimedia Laboratory of the Chinese University of Hong Kong"

    def __init__(self, root: Annotated[str, NOTHING], variant: Literal["detected", "labeled"] = "detected") -> None:
        super().__init__(root)
        self.variant = variant
        self.holds = (variant,)
        if variant == "labeled":
            self.official = Counts(767, 7_368, 1_400, 5_328)

    def _read(self, folder: Path) -> Domain:
        pattern = r"((?P<pair>\d+)_(?=\d+_\d_\d))?(?P<pid>-1|\d+)_(?(pair)|c)(?P<cam>\d)"  # c, unless there is a pair
        return read_market_domain(folder / self.variant, self.name, pattern, "0003_c1_21.png or 1_003_1_02.png")


class MSMT17(DataSet):
    """MSMT17 (Wei et al., CVPR 2018): 4,101 people, 15 cameras.

    Training 1,041 identities, 30,248 images (with the validation list 32,621, as in paper 003); 11,659 queries;
    gallery 82,161. Lists give path and identity; the camera is the third field of a name, two digits:
    ``0000_000_01_0303morning_0015_0.jpg``. Version 2 has the same images with faces masked: prefer it.

    Args:
        root: see :class:`DataSet`.
        train: training images: the training list alone, or with the validation list.
    """

    name = "msmt17"
    folders = ("MSMT17_V2", "MSMT17_V1", "MSMT17")
    holds: tuple[str, ...] = ("list_train.txt", "list_query.txt", "list_gallery.txt")
    official: Counts | None = Counts(1_041, 30_248, 11_659, 82_161)
    ask = "ask its authors, Longhui Wei et al., for version 2"

    def __init__(self, root: Annotated[str, NOTHING], train: Literal["train", "train+val"] = "train") -> None:
        super().__init__(root)
        self.train = train
        if train == "train+val":
            self.official = Counts(1_041, 32_621, 11_659, 82_161)

    def _read(self, folder: Path) -> Domain:
        names = (("train", "test"), ("mask_train_v2", "mask_test_v2"))
        versions = [pair for pair in names if all((folder / name).is_dir() for name in pair)]
        if not versions:
            raise DataError(f"{folder}: holds neither train and test (version 1) nor mask_train_v2 and mask_test_v2")
        train, test = (folder / name for name in versions[0])
        lists = ["list_train.txt"] + ["list_val.txt"] * (self.train == "train+val")
        entries = sorted(entry for name in lists for entry in _read_list(folder / name))
        test_lists = [sorted(_read_list(folder / f"list_{name}.txt")) for name in ("query", "gallery")]
        # both parts count their people from 0, which means a distractor elsewhere
        query, gallery = (_split(test, part, first=10_001) for part in test_lists)
        return Domain(self.name, _split(train, entries, first=1), query, gallery)


class CUHKSYSU(DataSet):
    """CUHK-SYSU (Xiao et al., CVPR 2017), people cut out of its pictures: paper 001's test with a fixed gallery.

    2,900 queries, gallery 5,447, 2,900 identities. There are no cameras: queries are camera 0 and the gallery is camera
    1, so that no match is junk. A folder ``train`` may hold training images (camera 0). Paper 001 does not train on
    them: name the data set in ``data.unseen``. Names like ``p11422_s16929_1.jpg``; some programs omit the ``p``.
    """

    name = "cuhksysu"
    folders = ("cuhksysu4reid", "CUHK-SYSU/cuhksysu4reid", "CUHK-SYSU", "cuhk-sysu", "cuhk_sysu", "cuhksysu")
    holds: tuple[str, ...] = ("query", "gallery")
    official: Counts | None = Counts(None, None, 2_900, 5_447)
    ask = "ask the Multimedia Laboratory of the Chinese University of Hong Kong"

    def _read(self, folder: Path) -> Domain:
        pattern = r"p?0*(?P<pid>[1-9]\d*)_s\d+"  # identity 0 would be taken for a distractor
        domain = read_market_domain(folder, self.name, pattern, "p11422_s16929", ("train", "query", "gallery"))
        return replace(domain, gallery=replace(domain.gallery, camids=domain.gallery.camids + 1))


def _read_list(path: Path) -> list[tuple[str, int]]:
    if not path.is_file():
        raise DataError(f"{path}: no such file; MSMT17 comes with lists of its training, query and gallery images")
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error}); get it from the owners again") from error
    entries = []
    for number, line in enumerate(lines, start=1):
        fields = line.split()
        if len(fields) != 2 or not fields[1].isdecimal():
            raise DataError(f"{path}: line {number} is not a file and an identity, as in '0000/0000_000_01_0.jpg 0'")
        entries.append((fields[0], number_of(fields[1], path)))
    if repeated := [name for name, count in Counter(name for name, _ in entries).items() if count > 1]:
        raise DataError(
            f"{path}: not complete: {len(repeated):,} of its files stand in several lines, first {repeated[0]}; remove "
            "the lines that repeat, or get the list from the owners again"
        )
    return entries


def _split(folder: Path, entries: list[tuple[str, int]], first: int) -> Split:
    paths = [folder / name for name, _ in entries]
    split = label_images(paths, r"[^_]+_[^_]+_(?P<cam>\d{2})_", "0000_000_01_0303morning_0015_0.jpg")
    return replace(split, pids=np.array([first + pid for _, pid in entries], dtype=np.int64))
