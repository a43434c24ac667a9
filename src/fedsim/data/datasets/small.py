"""The small data sets of the papers. Each can be a client (``half``) or is scored on ten random splits (``splits``)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray

from fedsim.core.errors import DataError
from fedsim.core.seeding import numpy_generator
from fedsim.data.datasets.base import Counts, DataSet
from fedsim.data.images import Domain, GallerySplit, ImageFiles, ReIDSource, Split, turns
from fedsim.data.listing import list_images, number_of, read_folder
from fedsim.data.market import is_market_folder
from fedsim.data.splits import official_grid_splits, sample_splits
from fedsim.settings.facts import NOTHING

Protocol = Literal["half", "splits"]

log = logging.getLogger(__name__)


class SmallDataSet(DataSet):
    """A data set without a published split.

    Args:
        root: see :class:`DataSet`.
        protocol: ``half``: half of the identities train; of the others, images of camera 0 are queries and the rest is
            the gallery (as clients in paper 003, whose authors send their own: see :class:`FedReIDBench`). ``splits``:
            test only; scores are means over ten random half splits (papers 000 and 001).
        seed: of the half split.
    """

    num_train: int
    """training identities of the half split; at most half of the identities that several cameras saw"""
    part: str
    """the folder of the images, in the data set's folder"""
    pattern: str
    """of names, see :func:`label_images`; with ``per_camera``, the group ``cam`` is the number of an image"""
    example: str
    """of a name, for messages"""
    per_camera: int | None = None
    """images of a person in each camera, by their numbers; None: names do not give the camera, so a person's images
    are dealt to two made-up cameras in turn, and a query has matches in the other one. The second camera, which is the
    gallery of a half split, begins: it gets an odd image (as in i-LIDS's meta.json of paper 003's authors)"""
    asking: tuple[int, ...] = ()
    """of ``splits``: see :func:`sample_splits`"""
    any_pair = False
    """whether ``splits`` pair any two images of a person, whatever their cameras; each image then has a camera of its
    own, so that evaluation by camera keeps the match"""

    def __init__(self, root: Annotated[str, NOTHING], protocol: Protocol = "half", seed: int = 0) -> None:
        super().__init__(root)
        self.protocol, self.seed = protocol, seed

    def _images(self, folder: Path) -> Split:
        split = read_folder(folder / self.part, self.pattern, self.example)
        cameras = (turns(split.pids) + 1) % 2 if self.per_camera is None else split.camids // self.per_camera
        return replace(split, camids=cameras)

    def _read(self, folder: Path) -> Domain:
        images = self._images(folder)
        if self.protocol == "splits":
            images = replace(images, camids=turns(images.pids)) if self.any_pair else images
            splits = sample_splits(images.pids, images.camids, style="pairs", asking=self.asking)
            return self._test_only(images, splits)
        paired = [pid for pid in images.identities if len(np.unique(images.camids[images.pids == pid])) > 1]
        return self._half(images, ~np.isin(images.pids, paired))

    def _test_only(self, images: Split, splits: Sequence[GallerySplit]) -> Domain:
        return Domain(self.name, None, images.take(np.array([], dtype=np.int64)), images, tuple(splits))

    def _half(self, images: Split, is_other: NDArray[np.bool_]) -> Domain:
        """Split the data set by identities. Images marked ``is_other`` [n] are in the gallery and match no query."""
        paired = np.setdiff1d(images.identities, images.pids[is_other])
        if (count := len(paired)) < 2:
            raise DataError(f"{self.name}: {count} identities seen by two cameras are too few to train and test on")
        order = numpy_generator("half split", self.name, self.seed).permutation(paired)
        trained = order[: min(self.num_train, count // 2)]
        is_train = np.isin(images.pids, trained)
        is_test = np.isin(images.pids, np.setdiff1d(paired, trained))
        is_query, is_gallery = is_test & (images.camids == 0), is_test & (images.camids > 0) | is_other
        train, query, gallery = (images.take(np.flatnonzero(part)) for part in (is_train, is_query, is_gallery))
        return Domain(self.name, train, query, gallery)


class CUHK01(SmallDataSet):
    """CUHK01 (Li et al., ACCV 2012): 971 people, 2 cameras, 2 images each, 3,884 images; 485 train, 486 test.

    Names like ``0001001.png``: identity, then image, of which the first two are from one camera.
    """

    name = "cuhk01"
    folders = ("CUHK01", "cuhk01")
    holds: tuple[str, ...] = ("campus",)
    official: Counts | None = Counts(485, 1_940, 972, 972)
    ask = "ask the Multimedia Laboratory of the Chinese University of Hong Kong"
    num_train = 485
    part, pattern, example = "campus", r"(?P<pid>\d{4})(?P<cam>\d{3})\.", "0001001.png"
    per_camera = 2

    def _is_part(self, path: Path) -> bool:
        """Whether it is there; a data set of the user's may have this name by accident."""
        return super()._is_part(path) and not is_market_folder(path)


class CUHK02(SmallDataSet):
    """CUHK02 (Li and Wang, CVPR 2013): 1,816 people in five pairs of cameras, 7,264 images.

    Pairs P1 to P5 hold 971, 306, 107, 193 and 239 people. P1 shows the people of CUHK01: leave it out where CUHK01 is
    in use. Folders ``Dataset/P1/cam1/001_1.png``.

    Args:
        root: see :class:`DataSet`.
        protocol: ``half`` trains on P1 to P4 and tests on P5, as torchreid does; ``splits``: ten random half splits.
        seed: has no effect.
        exclude_p1: leave the first pair out.
    """

    name = "cuhk02"
    folders = ("CUHK02", "cuhk02")
    holds: tuple[str, ...] = ("Dataset",)
    official: Counts | None = Counts(1_577, 6_308, 478, 478)
    ask = "ask the Multimedia Laboratory of the Chinese University of Hong Kong"

    def __init__(
        self,
        root: Annotated[str, NOTHING],
        protocol: Protocol = "half",
        seed: Annotated[int, NOTHING] = 0,
        exclude_p1: bool = False,
    ) -> None:
        super().__init__(root, protocol, seed)
        self.pairs = range(2 if exclude_p1 else 1, 6)
        if exclude_p1:
            self.official = Counts(606, 2_424, 478, 478)

    def _images(self, folder: Path) -> Split:
        return Split.concatenate(self._views(folder))

    def _read(self, folder: Path) -> Domain:
        if self.protocol == "splits":
            return super()._read(folder)
        *train, query, gallery = self._views(folder)
        return Domain(self.name, Split.concatenate(train), query, gallery)

    def _views(self, folder: Path) -> list[Split]:
        """Return the images of each camera; people of different pairs get different numbers."""
        views = []
        for pair, view in product(self.pairs, (0, 1)):
            split = read_folder(folder / "Dataset" / f"P{pair}" / f"cam{view + 1}", r"(?P<pid>\d+)_", "001_1.png")
            views.append(replace(split, pids=10_000 * pair + split.pids, camids=split.camids + 2 * (pair - 1) + view))
        return views


class PRID2011(SmallDataSet):
    """PRID 2011 (Hirzer et al., SCIA 2011): 385 people in camera a, 749 in camera b, 200 of them in both.

    Single-shot: 100 shared people train with two images each; 100 queries from camera a, gallery 649 from camera b (100
    matches, 549 others). Multi-shot training (paper 003) takes up to ten frames per person and camera of the 100 shared
    people, and of the 185 that only camera a saw; the paper has 3,744 images of 285 people.

    Args:
        root: see :class:`DataSet`.
        protocol: see :class:`SmallDataSet`.
        seed: of the half split.
        shots: training images: single-shot or multi-shot.
    """

    name = "prid2011"
    folders = ("prid_2011", "PRID2011", "prid2011")
    holds: tuple[str, ...] = ("single_shot",)
    official: Counts | None = Counts(100, 200, 100, 649)
    ask = "ask the Graz University of Technology"
    num_train = 100
    asking = (0,)  # as torchreid and the code of papers 000 and 001

    def __init__(
        self,
        root: Annotated[str, NOTHING],
        protocol: Protocol = "half",
        seed: int = 0,
        shots: Literal["single", "multi"] = "single",
    ) -> None:
        super().__init__(root, protocol, seed)
        self.shots = shots
        if shots == "multi":
            self.official = None  # the number of frames depends on the person
            self.holds = ("single_shot", "multi_shot")

    def _images(self, folder: Path) -> Split:
        """List the single-shot images of the 200 shared people, and of those that only camera b saw."""
        parts = _two_cameras(folder / "single_shot", r"person_(?P<pid>\d+)", "person_0001.png")
        everything = Split.concatenate(parts)
        shared = np.intersect1d(parts[0].pids, parts[1].pids)
        is_shared = np.isin(everything.pids, shared[shared <= 200])  # above 200: another person in each camera
        pids = np.where(is_shared, everything.pids, 10_000 + everything.pids)
        keep = is_shared | (everything.camids == 1)
        return replace(everything, pids=pids).take(np.flatnonzero(keep))

    def _read(self, folder: Path) -> Domain:
        domain = super()._read(folder)
        if self.shots == "single" or domain.train is None:
            return domain
        frames = [_frames(folder / "multi_shot" / f"cam_{c}", camera, limit=10) for camera, c in enumerate("ab")]
        shared, only_a = domain.train.identities, frames[0].pids[frames[0].pids > 200]
        wanted = (np.isin(frames[0].pids, np.union1d(shared, only_a)), np.isin(frames[1].pids, shared))
        train = Split.concatenate([part.take(np.flatnonzero(keep)) for part, keep in zip(frames, wanted, strict=True)])
        return replace(domain, train=train)


class VIPeR(SmallDataSet):
    """VIPeR (Gray et al., PETS 2007): 632 people, 2 cameras, one image each; 316 train, 316 queries, gallery 316.

    Names like ``cam_a/000_45.bmp``: identity and angle. ``splits``: five halves, each with queries of camera a, then of
    camera b: the first ten of torchreid's twenty splits, which the code of papers 000 and 001 takes.
    """

    name = "viper"
    folders = ("VIPeR", "viper")
    holds: tuple[str, ...] = ("cam_a", "cam_b")
    official: Counts | None = Counts(316, 632, 316, 316)
    ask = "ask the University of California, Santa Cruz"
    num_train = 316
    asking = (0, 1)

    def _images(self, folder: Path) -> Split:
        images = Split.concatenate(_two_cameras(folder, r"(?P<pid>\d+)_", "000_45.bmp"))
        return replace(images, pids=images.pids + 1)  # files number people from 0, which is a distractor elsewhere


class ThreeDPeS(SmallDataSet):
    """3DPeS (Baltieri et al., ACM J-HGBU 2011): 192 people, 1,011 images, 8 cameras that names do not give.

    Names like ``RGB/1_16_FRAME_25_RGB.bmp``: identity, then view; images of a view are frames of one walk. A person's
    views are dealt to two made-up cameras in turn, so that a query has matches in another view, as in the code of
    Domain Guided Dropout (Xiao et al., CVPR 2016), whose layout paper 003 has. ``splits`` pair any two images. Paper
    003 has two cameras, too (445 and 567 images), but dealt differently: 29 people are in one alone.
    """

    name = "3dpes"
    folders = ("3DPeS", "3dpes")
    holds: tuple[str, ...] = ("RGB",)
    ask = "ask the University of Modena and Reggio Emilia"
    num_train = 93
    part, pattern, example = "RGB", r"(?P<pid>\d+)_\d+_", "1_16_FRAME_25_RGB.bmp"
    any_pair = True

    def _images(self, folder: Path) -> Split:
        images = read_folder(folder / self.part, self.pattern, self.example)
        views = np.array([number_of(path.name.split("_")[1], path) for path in images.files])
        cameras = np.empty_like(images.pids)
        for pid in images.identities:
            is_person = images.pids == pid
            # of an odd number of views, the last one is in the gallery
            cameras[is_person] = (np.unique(views[is_person], return_inverse=True)[1] + 1) % 2
        return replace(images, camids=cameras)


class ILIDS(SmallDataSet):
    """QMUL i-LIDS (Zheng et al., BMVC 2009): 119 people, 476 images. Papers 003 and 004 wrongly call it iLIDS-VID.

    A folder of that name is read with a warning if it holds these images, and refused if it holds the videos. Names
    like ``0001001.jpg`` give identity and number, no camera: images are dealt to two made-up cameras in turn.
    ``splits`` pair any two images of a person, as torchreid and the code of papers 000 and 001 do.
    """

    name = "ilids"
    video_folders = ("iLIDS-VID", "i-LIDS-VID")
    """names of another data set, of 300 people; papers 003 and 004 use its name for this one"""
    folders = ("i-LIDS_Pedestrian", "ilids", "i-LIDS", *video_folders)
    holds: tuple[str, ...] = ("Persons",)
    ask = "ask Queen Mary University of London"
    num_train = 59
    part, pattern, example = "Persons", r"(?P<pid>\d{4})\d{3}\.", "0001001.jpg"
    any_pair = True

    def find(self) -> Path:
        """Return its folder; see :meth:`DataSet.find`."""
        try:
            folder = super().find()
        except DataError as error:
            for folder in (*(self.root / name for name in self.video_folders), self.root):
                if (folder / "sequences").is_dir():
                    raise DataError(
                        f"{folder}: holds the videos of iLIDS-VID (a folder sequences); papers 003 and 004 mean QMUL "
                        f"i-LIDS, a folder {self.folders[0]} with Persons; {self.ask}"
                    ) from error
            raise
        if folder.absolute().name in self.video_folders:
            log.warning(
                "%s holds images of QMUL i-LIDS, which papers 003 and 004 call iLIDS-VID; it is read as ilids", folder
            )
        return folder


class GRID(SmallDataSet):
    """QMUL GRID (Loy et al., IJCV 2010): 250 people in two views of 8 cameras, and 775 others in the gallery.

    125 train; 125 queries, gallery 900. Names like ``probe/0001_1_25023_116_134_128_330.jpeg``: identity and camera.
    ``splits`` takes the ten official partitions of ``features_and_partitions.mat``.
    """

    name = "grid"
    folders = ("underground_reid", "GRID", "grid")
    holds: tuple[str, ...] = ("probe", "gallery")
    official: Counts | None = Counts(125, 250, 125, 900)
    ask = "ask Queen Mary University of London"
    num_train = 125

    def _read(self, folder: Path) -> Domain:
        pattern, example = r"(?P<pid>\d{4})_(?P<cam>\d+)_", "0001_1_25023_116_134_128_330.jpeg"
        probes, gallery = (read_folder(folder / view, pattern, example) for view in ("probe", "gallery"))
        images = Split.concatenate([probes, gallery])
        is_probe = np.arange(len(images)) < len(probes)
        if self.protocol == "splits":
            path = folder / "features_and_partitions.mat"
            return self._test_only(images, official_grid_splits(path, images.pids, is_probe))
        # probes are queries, whatever their camera; distractors are in the gallery's view
        return self._half(replace(images, camids=np.where(is_probe, 0, 1 + images.camids)), images.pids == 0)


class CAVIAR4REID(SmallDataSet):
    """CAVIAR4REID (Cheng et al., BMVC 2011): 72 people, 1,220 images, 50 of them seen by two cameras.

    Names like ``0001001.jpg``: identity and number; numbers 1 to 10 are the first camera's, 11 to 20 the second's.
    ``splits`` pair any two images of a person: so paper 001 has 36 queries and a gallery of 36.
    """

    name = "caviar4reid"
    folders = ("CAVIAR4REID", "caviar4reid", "CAVIAR4REID/CAVIARa", "CAVIARa")
    holds: tuple[str, ...] = ("0001001.jpg",)
    ask = "ask its authors, Dong Seon Cheng et al."
    num_train = 25
    part, pattern, example = "", r"(?P<pid>\d{4})(?P<cam>\d{3})\.", "0001001.jpg"
    per_camera = 10
    any_pair = True


def _two_cameras(folder: Path, pattern: str, expected: str) -> list[Split]:
    views = [read_folder(folder / f"cam_{letter}", pattern, expected) for letter in "ab"]
    return [replace(view, camids=view.camids + camera) for camera, view in enumerate(views)]


def _frames(folder: Path, camera: int, limit: int) -> Split:
    """Return up to ``limit`` frames of each person, evenly spread, from folders ``person_0001``."""
    people = sorted(person for person in folder.glob("person_*") if person.is_dir())
    if not people:
        raise DataError(f"{folder}: holds no folders like person_0001")
    parts = []
    for person in people:
        frames = list_images(person, "0001.png")
        chosen = np.unique(np.linspace(0, len(frames) - 1, limit).round().astype(int))
        digits = person.name.removeprefix("person_")
        if not digits.isdecimal():
            raise DataError(f"{person}: the name is not like person_0001")
        pid = number_of(digits, person)
        images = ImageFiles([frames[i] for i in chosen])
        parts.append(Split(images, np.full(len(images), pid), np.full(len(images), camera)))
    return Split.concatenate(parts)


def warn_of_common_people(sources: Sequence[ReIDSource], public: str | None) -> None:
    """Warn if a federation has CUHK01 and the pair P1 of CUHK02, which shows the people of CUHK01."""
    has_p1 = any(isinstance(source, CUHK02) and 1 in source.pairs for source in sources)
    if not has_p1 or not any(isinstance(source, CUHK01) for source in sources):
        return
    if public == CUHK02.name:
        problem = "data.public: the distillation set cuhk02 contains the people of cuhk01, also the test identities"
    else:
        problem = "data.source: the pair P1 of cuhk02 shows the people of cuhk01, who may be in both training and test"
    log.warning("%s; exclude_p1: true of CUHK02 leaves them out", problem)
