"""Small trees of drawn people in the layout of each data set: for tests, and for people without the data.

They hold nothing of the originals but names of folders and files. The number of people is chosen, cameras are theirs.
"""

from __future__ import annotations

import copy
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from fedsim.core.errors import ConfigError
from fedsim.data.datasets.base import DataSet
from fedsim.data.datasets.omniglot import Omniglot, alphabet_name
from fedsim.data.images import ReIDSource, Size
from fedsim.data.synthetic import SyntheticImages, SyntheticReID

__all__ = ["STANDINS", "standin_of", "write_standin"]


class _Picture(NamedTuple):
    """A file, and whom it shows."""

    path: str
    pid: int
    camera: int
    shot: int = 0


Layout = Callable[[int], Iterator[_Picture]]
"""Number of people -> files; as many again are tested on where there are two parts."""


def write_standin(name: str, root: Path, people: int = 8, size: Size = (32, 16)) -> Path:
    """Write the stand-in of a data set below ``root``.

    Args:
        name: of the data set, one of :data:`STANDINS`.
        root: gets the data set's folder.
        people: identities per part.
        size: height and width of the pictures, pixels.

    Returns:
        the data set's folder.

    Raises:
        ConfigError: if there is no such stand-in.
    """
    if name not in STANDINS:
        raise ConfigError(f"name: there is no stand-in for {name}; choose from {', '.join(STANDINS)}")
    folder, layout, complete = STANDINS[name]
    pictures = list(layout(people))
    _draw(root / folder, name, pictures, size)
    if complete is not None:
        complete(root / folder, pictures)
    return root / folder


def _draw(folder: Path, name: str, pictures: list[_Picture], size: Size) -> None:
    columns = (np.array([picture[i] for picture in pictures], dtype=np.int64) for i in (1, 2, 3))
    pixels = SyntheticImages(0, f"stand-in/{name}", *columns).decode(size)
    for picture, image in zip(pictures, pixels, strict=True):
        path = folder / picture.path
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(path)


def standin_of(source: ReIDSource, root: Path, people: int | None = None) -> ReIDSource:
    """Return a source like ``source`` whose data set is a stand-in.

    Args:
        source: a data set of a paper, or drawn people, which stay as they are.
        root: where the stand-in is written, once.
        people: identities per part; None: enough for a batch of 128.

    Raises:
        ConfigError: if it is neither.
    """
    people = people or _PEOPLE.get(type(source).__name__, 48)
    if isinstance(source, SyntheticReID):
        return source
    if not isinstance(source, DataSet) or source.name not in STANDINS:
        raise ConfigError(f"data.dry_run: there is no stand-in for {type(source).__name__}; see fedsim.data.standins")
    other = copy.copy(source)
    other.root, other.is_standin = root, True
    if isinstance(other, Omniglot):
        _write_alphabets(other, people)
    elif not (root / STANDINS[source.name][0]).is_dir():
        write_standin(source.name, root, people, size=(64, 32))
    return other


def _write_alphabets(source: Omniglot, people: int) -> None:
    """Write those of the source's alphabets that are not there; all would be too many: of all, a few."""
    source.alphabets = list(_ALPHABETS) if source.alphabets is None else source.alphabets
    folder = source.root / STANDINS[source.name][0]
    for name in source.alphabets:
        pictures = list(_omniglot((name,))(people))
        if not (folder / pictures[0].path).exists():
            _draw(folder, f"{source.name}/{name}", pictures, (32, 32))


# -- one function per layout -------------------------------------------------------------------------------------------


def _market(cameras: int, name: str, distractors: bool = False) -> Layout:
    """``name`` is formatted with pid, cam (from 1) and shot."""

    def layout(people: int) -> Iterator[_Picture]:
        parts = (
            ("bounding_box_train", 1, (0, 1)),
            ("query", people + 1, (0,)),
            ("bounding_box_test", people + 1, (1, 2)),
        )
        for part, first, shots in parts:
            for pid in range(first, first + people):
                for camera in range(cameras):
                    for shot in shots:
                        file = name.format(pid=pid, cam=camera + 1, shot=shot)
                        yield _Picture(f"{part}/{file}", pid, camera, shot)
        for pid in (-1, 0) if distractors else ():
            text = "-1" if pid < 0 else "0000"
            yield _Picture(f"bounding_box_test/{text}_c1s1_000001_00.jpg", 10_000 + pid, 0)

    return layout


def _in_each(folders: tuple[str, ...], layout: Layout) -> Layout:
    return lambda people: (p._replace(path=f"{folder}/{p.path}") for folder in folders for p in layout(people))


def _msmt17(people: int) -> Iterator[_Picture]:
    for part, shots in (("mask_train_v2", (0, 1)), ("mask_test_v2", (0, 1))):
        for pid in range(people):
            for camera in (0, 9, 14):  # two digits
                for shot in shots:
                    name = f"{pid:04d}_{camera + shot:03d}_{camera + 1:02d}_0303morning_{shot:04d}_{shot}.jpg"
                    yield _Picture(f"{part}/{pid:04d}/{name}", pid + people * (part == "mask_test_v2"), camera, shot)


def _write_lists(folder: Path, pictures: list[_Picture]) -> None:
    """MSMT17's lists: a quarter of the training images validate; the first shot of a camera is a query."""
    lists: dict[str, list[str]] = {name: [] for name in ("train", "val", "query", "gallery")}
    for picture in pictures:
        part, path = picture.path.split("/", 1)
        name = ("val" if picture.shot and picture.camera == 14 else "train") if "train" in part else (
            "gallery" if picture.shot else "query"
        )  # fmt: skip
        lists[name].append(f"{path} {int(path[:4])}")
    for name, lines in lists.items():
        (folder / f"list_{name}.txt").write_text("\n".join(lines) + "\n")


def _cuhksysu(people: int) -> Iterator[_Picture]:
    for part, first, shots in (("train", 1, (0, 1, 2)), ("query", people + 1, (3,)), ("gallery", people + 1, (4, 5))):
        for pid in range(first, first + people):
            for shot in shots:
                yield _Picture(f"{part}/p{pid}_s{100 * pid + shot}_{shot}.jpg", pid, 0, shot)


_ALPHABETS = ("Latin", "Greek", "Angelic")
"""two to train on, one unseen"""
_UNSEEN_ALPHABETS = {
    "Angelic", "Atemayar_Qelisayer", "Atlantean", "Aurek-Besh", "Avesta", "Ge_ez", "Glagolitic", "Gurmukhi", "Kannada",
    "Keble", "Malayalam", "Manipuri", "Mongolian", "Old_Church_Slavonic_Cyrillic", "Oriya", "Sylheti", "Syriac_Serto",
    "Tengwar", "Tibetan", "ULOG",
}  # fmt: skip
"""those of images_evaluation"""


def _omniglot(alphabets: tuple[str, ...]) -> Layout:
    """Twenty drawers per character; so there are fewer characters than people elsewhere."""

    def layout(people: int) -> Iterator[_Picture]:
        for number, alphabet in enumerate(alphabets):
            part = "evaluation" if alphabet_name(alphabet) in _UNSEEN_ALPHABETS else "background"
            for character in range(1, 1 + max(4, people // 4)):
                for drawer in range(20):
                    path = f"images_{part}/{alphabet}/character{character:02d}/{character:04d}_{drawer + 1:02d}.png"
                    yield _Picture(path, 1000 * number + character, drawer)

    return layout


def _cifar10(people: int) -> Iterator[_Picture]:
    """Ten classes at most; four images of each per batch."""
    for batch in ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"):
        for shot in range(4):
            for label in range(min(people, 10)):
                yield _Picture(f"{batch}.images/{shot}_{label}.png", label, 0, shot)


def _write_batches(folder: Path, pictures: list[_Picture]) -> None:
    """CIFAR-10's pickles, in place of the folders of images."""
    for part in dict.fromkeys(picture.path.split("/")[0] for picture in pictures):
        own = [picture for picture in pictures if picture.path.startswith(part)]
        pixels = [np.asarray(Image.open(folder / picture.path).resize((32, 32))) for picture in own]
        content = {
            b"data": np.stack(pixels).transpose(0, 3, 1, 2).reshape(len(own), -1),
            b"labels": [picture.pid for picture in own],
        }
        (folder / part.removesuffix(".images")).write_bytes(pickle.dumps(content, protocol=2))
        shutil.rmtree(folder / part)


def _cuhk01(people: int) -> Iterator[_Picture]:
    for pid in range(1, people + 1):
        for image in range(4):
            yield _Picture(f"campus/{pid:04d}{image + 1:03d}.png", pid, image // 2, image % 2)


def _cuhk02(people: int) -> Iterator[_Picture]:
    for pair in range(1, 6):
        for view in (1, 2):
            for pid in range(1, people + 1):
                for shot in (0, 1):
                    path = f"Dataset/P{pair}/cam{view}/{pid:03d}_{shot + 1}.png"
                    yield _Picture(path, 1000 * pair + pid, 2 * pair + view, shot)


def _prid2011(people: int) -> Iterator[_Picture]:
    """``people`` in both cameras, half as many in one only; their numbers are beyond 200, as in the original."""
    for camera, letter in enumerate("ab"):
        others = range(201, 201 + people // 2)
        for pid in (*range(1, people + 1), *others):
            who = pid if pid <= people else 1000 * (camera + 1) + pid
            yield _Picture(f"single_shot/cam_{letter}/person_{pid:04d}.png", who, camera)
            for frame in range(12):
                yield _Picture(f"multi_shot/cam_{letter}/person_{pid:04d}/{frame + 1:04d}.png", who, camera, frame)


def _viper(people: int) -> Iterator[_Picture]:
    for camera, letter in enumerate("ab"):
        for pid in range(people):
            yield _Picture(f"cam_{letter}/{pid:03d}_{45 * camera}.bmp", pid, camera)


def _numbered(folder: str, suffix: str, images: int) -> Layout:
    def layout(people: int) -> Iterator[_Picture]:
        for pid in range(1, people + 1):
            for image in range(images):
                yield _Picture(f"{folder}{pid:04d}{image + 1:03d}{suffix}", pid, image * 2 // images, image)

    return layout


def _3dpes(people: int) -> Iterator[_Picture]:
    for pid in range(1, people + 1):
        for image in range(4):
            yield _Picture(f"RGB/{pid}_{image}_rgb.bmp", pid, image % 2, image)


def _grid(people: int) -> Iterator[_Picture]:
    for view in ("probe", "gallery"):
        others = range(people + 1, people + 5) if view == "gallery" else ()
        for pid in (*range(1, people + 1), *others):
            camera = 5 if view == "probe" else 6
            text = f"{pid:04d}" if pid <= people else "0000"
            yield _Picture(f"{view}/{text}_{camera}_{25023 + pid}_116_134_128_330.jpeg", pid, camera)


def _write_partitions(folder: Path, pictures: list[_Picture]) -> None:
    """GRID's ten partitions: half of the people train."""
    from scipy.io import savemat

    people = sum(picture.path.startswith("probe") for picture in pictures)
    cells = np.empty((1, 10), dtype=object)
    for number in range(10):
        chosen = np.random.Generator(np.random.Philox(number)).permutation(people)[: people // 2] + 1
        cells[0, number] = np.sort(chosen).reshape(-1, 1)
    savemat(folder / "features_and_partitions.mat", {"trainIdAll": cells})


_PEOPLE = {"VIPeR": 128, "CUHK01": 64, "ThreeDPeS": 64, "ILIDS": 64}
"""Of data sets with few images per person, of whom half train."""

STANDINS: dict[str, tuple[str, Layout, Callable[[Path, list[_Picture]], None] | None]] = {
    "market1501": ("Market-1501-v15.09.15", _market(6, "{pid:04d}_c{cam}s1_{shot:06d}_00.jpg", True), None),
    "dukemtmc": ("DukeMTMC-reID", _market(8, "{pid:04d}_c{cam}_f{shot:07d}.jpg"), None),
    "cuhk03np": ("cuhk03-np", _in_each(("detected", "labeled"), _market(2, "{pid:04d}_c{cam}_{shot}.png")), None),
    "msmt17": ("MSMT17_V2", _msmt17, _write_lists),
    "cuhk01": ("CUHK01", _cuhk01, None),
    "cuhk02": ("CUHK02", _cuhk02, None),
    "prid2011": ("prid_2011", _prid2011, None),
    "viper": ("VIPeR", _viper, None),
    "3dpes": ("3DPeS", _3dpes, None),
    "ilids": ("i-LIDS_Pedestrian", _numbered("Persons/", ".jpg", 4), None),
    "grid": ("underground_reid", _grid, _write_partitions),
    "caviar4reid": ("CAVIAR4REID", _numbered("", ".jpg", 20), None),
    "cuhksysu": ("cuhksysu4reid", _cuhksysu, None),
    "omniglot": ("omniglot-py", _omniglot(_ALPHABETS), None),
    "cifar10": ("cifar-10-batches-py", _cifar10, _write_batches),
}
"""Name of the data set -> its folder, its files, and what else it needs."""
