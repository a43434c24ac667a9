"""Stand-ins: drawn people in each data set's folders, names and cameras, for tests and for users without the data."""

from __future__ import annotations

import copy
import json
import logging
import pickle
import shutil
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from fedsim.core.errors import ConfigError
from fedsim.data.datasets.base import DataSet
from fedsim.data.datasets.omniglot import Omniglot, alphabet_name
from fedsim.data.images import ReIDSource, Size
from fedsim.data.synthetic import SyntheticImages, SyntheticReID

log = logging.getLogger(__name__)


class _Picture(NamedTuple):
    path: str
    pid: int
    camera: int
    shot: int = 0


Layout = Callable[[int], Iterator[_Picture]]  # number of people, in each of training and test parts -> files


def write_standin(name: str, root: Path, people: int = 8, size: Size = (32, 16)) -> Path:
    """Write the stand-in of a data set into a folder below ``root``, and return that folder.

    ``name``: one of :data:`STANDINS`, else ConfigError. ``people``: identities per part. ``size``: height and width of
    the pictures, pixels.
    """
    if name not in STANDINS:
        raise ConfigError(f"name: there is no stand-in for {name}; choose from {', '.join(STANDINS)}")
    name_of_folder, layout, complete = STANDINS[name]
    folder, pictures = root / name_of_folder, list(layout(people))
    _draw(folder, name, pictures, size)
    if complete is not None:
        complete(folder, pictures)
    return folder


def _draw(folder: Path, name: str, pictures: list[_Picture], size: Size) -> None:
    columns = (np.array([picture[i] for picture in pictures], dtype=np.int64) for i in (1, 2, 3))
    pixels = SyntheticImages(0, f"stand-in/{name}", *columns).decode(size)
    for picture, image in zip(pictures, pixels, strict=True):
        path = folder / picture.path
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(path)


def standin_of(source: ReIDSource, root: Path) -> ReIDSource:
    """Return a copy of ``source`` that reads a stand-in, larger for a larger data set.

    The stand-in's folder, below ``root``, is written if it is missing. Drawn people, and sources for which there is no
    stand-in, such as your own, are returned as they are: their own images are read.
    """
    if not isinstance(source, DataSet) or source.name not in STANDINS:
        if not isinstance(source, SyntheticReID):
            log.info("data.dry_run: %s has no stand-in, so its own images are read", type(source).__name__)
        return source
    people = _PEOPLE.get(type(source).__name__, 48)
    standin = copy.copy(source)
    standin.root, standin.is_standin = root, True
    folder = root / STANDINS[source.name][0]
    if isinstance(standin, Omniglot):
        if standin.alphabets is None:  # all alphabets would take long
            standin.alphabets = list(_ALPHABETS)
        for alphabet in standin.alphabets:
            pictures = list(_omniglot((alphabet,))(people))
            if not (folder / pictures[0].path).exists():
                _draw(folder, f"{source.name}/{alphabet}", pictures, (32, 32))
    elif not folder.is_dir():
        write_standin(source.name, root, people, size=(64, 32))
    return standin


def _market(cameras: int, name: str, distractors: bool = False, variants: tuple[str, ...] = ("",)) -> Layout:
    """``name`` is formatted with pid, cam (from 1) and shot; ``variants`` are folders with the same content."""

    def layout(people: int) -> Iterator[_Picture]:
        train, test = range(1, people + 1), range(people + 1, 2 * people + 1)
        parts = (("bounding_box_train", train, (0, 1)), ("query", test, (0,)), ("bounding_box_test", test, (1, 2)))
        for variant, (part, pids, shots) in product(variants, parts):
            for pid, camera, shot in product(pids, range(cameras), shots):
                file = name.format(pid=pid, cam=camera + 1, shot=shot)
                yield _Picture(f"{variant}{part}/{file}", pid, camera, shot)
        for pid, pid_text in ((-1, "-1"), (0, "0000")) if distractors else ():
            yield _Picture(f"bounding_box_test/{pid_text}_c1s1_000001_00.jpg", 10_000 + pid, 0)

    return layout


def _cuhk03(people: int) -> Iterator[_Picture]:
    """Three images of a person and camera, in the order of both kinds of boxes."""
    for pid, camera, shot in product(range(2 * people), range(2), range(3)):
        yield _Picture(f"images/{pid:08d}_{camera:02d}_{shot:04d}.jpg", pid, camera, shot)


def _write_open_reid(folder: Path, pictures: list[_Picture]) -> None:
    """Write open-reid's two files, with as many splits as the library's own."""
    people: list[list[list[str]]] = [[[], []] for _ in {picture.pid for picture in pictures}]
    for picture in pictures:
        people[picture.pid][picture.camera].append(Path(picture.path).name)
    meta = {"name": "cuhk03", "shot": "multiple", "num_cameras": 2, "identities": people}
    (folder / "meta.json").write_text(json.dumps(meta))
    splits = []
    for number in range(20):
        order = [(pid + number) % len(people) for pid in range(len(people))]
        train, test = sorted(order[: len(people) // 2]), sorted(order[len(people) // 2 :])
        splits.append({"trainval": train, "query": test, "gallery": test})
    (folder / "splits.json").write_text(json.dumps(splits))


def _msmt17(people: int) -> Iterator[_Picture]:
    parts = (("mask_train_v2", 0), ("mask_test_v2", people))
    for (part, first), pid, camera, shot in product(parts, range(people), (0, 9, 14), (0, 1)):  # two-digit cameras
        name = f"{pid:04d}_{camera + shot:03d}_{camera + 1:02d}_0303morning_{shot:04d}_{shot}.jpg"
        yield _Picture(f"{part}/{pid:04d}/{name}", pid + first, camera, shot)


def _write_lists(folder: Path, pictures: list[_Picture]) -> None:
    """Write MSMT17's lists: the last shots of training are for validation; the first shot of a camera is a query."""
    lists: dict[str, str] = dict.fromkeys(("train", "val", "query", "gallery"), "")
    for picture in pictures:
        part, path = picture.path.split("/", 1)
        if "train" in part:
            name = "val" if picture.shot and picture.camera == 14 else "train"
        else:
            name = "gallery" if picture.shot else "query"
        lists[name] += f"{path} {int(path[:4])}\n"
    for name, lines in lists.items():
        (folder / f"list_{name}.txt").write_text(lines)


def _cuhksysu(people: int) -> Iterator[_Picture]:
    train, test = range(1, people + 1), range(people + 1, 2 * people + 1)
    for part, pids, shots in (("train", train, (0, 1, 2)), ("query", test, (3,)), ("gallery", test, (4, 5))):
        for pid, shot in product(pids, shots):
            yield _Picture(f"{part}/p{pid}_s{100 * pid + shot}_{shot}.jpg", pid, 0, shot)


_ALPHABETS = ("Latin", "Greek", "Angelic")  # two to train on, one unseen
_UNSEEN_ALPHABETS = {
    "Angelic", "Atemayar_Qelisayer", "Atlantean", "Aurek-Besh", "Avesta", "Ge_ez", "Glagolitic", "Gurmukhi", "Kannada",
    "Keble", "Malayalam", "Manipuri", "Mongolian", "Old_Church_Slavonic_Cyrillic", "Oriya", "Sylheti", "Syriac_Serto",
    "Tengwar", "Tibetan", "ULOG",
}  # fmt: skip # those of images_evaluation


def _omniglot(alphabets: tuple[str, ...]) -> Layout:
    """Twenty drawers per character, so there are fewer characters than people in other data sets."""

    def layout(people: int) -> Iterator[_Picture]:
        for number, alphabet in enumerate(alphabets):
            part = "evaluation" if alphabet_name(alphabet) in _UNSEEN_ALPHABETS else "background"
            for character, drawer in product(range(1, 1 + max(4, people // 4)), range(20)):
                path = f"images_{part}/{alphabet}/character{character:02d}/{character:04d}_{drawer + 1:02d}.png"
                yield _Picture(path, 1000 * number + character, drawer)

    return layout


def _cifar10(people: int) -> Iterator[_Picture]:
    """Ten classes at most; four images of each per batch."""
    batches = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")
    for (number, batch), shot, label in product(enumerate(batches), range(4), range(min(people, 10))):
        yield _Picture(f"{batch}.images/{shot}_{label}.png", label, 0, 4 * number + shot)  # no two batches share images


def _write_batches(folder: Path, pictures: list[_Picture]) -> None:
    """Write CIFAR-10's pickles, in place of the folders of images."""
    for part in dict.fromkeys(picture.path.split("/")[0] for picture in pictures):
        members = [picture for picture in pictures if picture.path.startswith(part)]
        pixels = [np.asarray(Image.open(folder / picture.path).resize((32, 32))) for picture in members]
        content = {
            b"data": np.stack(pixels).transpose(0, 3, 1, 2).reshape(len(members), -1),
            b"labels": [picture.pid for picture in members],
        }
        (folder / part.removesuffix(".images")).write_bytes(pickle.dumps(content, protocol=2))
        shutil.rmtree(folder / part)


def _cuhk02(people: int) -> Iterator[_Picture]:
    for pair, view, pid, shot in product(range(1, 6), (1, 2), range(1, people + 1), (0, 1)):
        path = f"Dataset/P{pair}/cam{view}/{pid:03d}_{shot + 1}.png"
        yield _Picture(path, 1000 * pair + pid, 2 * pair + view, shot)


def _prid2011(people: int) -> Iterator[_Picture]:
    """``people`` in both cameras, half as many in one only; their numbers are beyond 200, as in the original."""
    numbers = (*range(1, people + 1), *range(201, 201 + people // 2))
    for (camera, letter), pid in product(enumerate("ab"), numbers):
        identity = pid if pid <= people else 1000 * (camera + 1) + pid
        yield _Picture(f"single_shot/cam_{letter}/person_{pid:04d}.png", identity, camera)
        for frame in range(12):
            yield _Picture(f"multi_shot/cam_{letter}/person_{pid:04d}/{frame + 1:04d}.png", identity, camera, frame)


def _viper(people: int) -> Iterator[_Picture]:
    for (camera, letter), pid in product(enumerate("ab"), range(people)):
        yield _Picture(f"cam_{letter}/{pid:03d}_{45 * camera}.bmp", pid, camera)


def _numbered(folder: str, suffix: str, images: int, shots: int = 0) -> Layout:
    """The first half of a person's images is of camera 0; ``shots`` per camera, or all different."""

    def layout(people: int) -> Iterator[_Picture]:
        for pid, image in product(range(1, people + 1), range(images)):
            shot = image % shots if shots else image
            yield _Picture(f"{folder}{pid:04d}{image + 1:03d}{suffix}", pid, image * 2 // images, shot)

    return layout


def _3dpes(people: int) -> Iterator[_Picture]:
    for pid, image in product(range(1, people + 1), range(4)):
        yield _Picture(f"RGB/{pid}_{image // 2 + 1}_FRAME_{image}_RGB.bmp", pid, image % 2, image)


def _grid(people: int) -> Iterator[_Picture]:
    """The gallery has four more people, the distractors."""
    for view, camera, distractors in (("probe", 5, 0), ("gallery", 6, 4)):
        for pid in range(1, people + 1 + distractors):
            pid_text = f"{pid:04d}" if pid <= people else "0000"
            yield _Picture(f"{view}/{pid_text}_{camera}_{25023 + pid}_116_134_128_330.jpeg", pid, camera)


def _write_partitions(folder: Path, pictures: list[_Picture]) -> None:
    """Write GRID's ten partitions as in the owners' file, without its features: half of the people train."""
    from scipy.io import savemat

    people = np.arange(1, 1 + sum(picture.path.startswith("probe") for picture in pictures))
    parts = {"trainIdxAll": np.empty((1, 10), dtype=object), "testIdxAll": np.empty((1, 10), dtype=object)}
    for number in range(10):
        order = np.random.Generator(np.random.Philox(number)).permutation(people)
        halves = np.sort(order[: len(people) // 2]), np.sort(order[len(people) // 2 :])
        for cells, chosen in zip(parts.values(), halves, strict=True):
            rows = {"probeImIdx": 2 * chosen, "galleryImIdx": 2 * chosen - 1, "personIdx": chosen}
            cells[0, number] = {name: row[None].astype(np.float64) for name, row in rows.items()}
    savemat(folder / "features_and_partitions.mat", parts)


_PEOPLE = {
    "MSMT17": 108, "DukeMTMC": 24, "Market1501": 28, "CUHK03NP": 64, "CUHK03": 64, "PRID2011": 12, "CUHK01": 66,
    "VIPeR": 75, "ThreeDPeS": 32, "ILIDS": 24,
}  # fmt: skip
"""Identities per part. Training images are in proportion to the roots of paper 003's numbers (Table 1): 540 to 48."""

STANDINS: dict[str, tuple[str, Layout, Callable[[Path, list[_Picture]], None] | None]] = {
    "market1501": ("Market-1501-v15.09.15", _market(6, "{pid:04d}_c{cam}s1_{shot:06d}_00.jpg", True), None),
    "dukemtmc": ("DukeMTMC-reID", _market(8, "{pid:04d}_c{cam}_f{shot:07d}.jpg"), None),
    "cuhk03np": ("cuhk03-np", _market(2, "{pid:04d}_c{cam}_{shot}.png", variants=("detected/", "labeled/")), None),
    "cuhk03": ("cuhk03_release", _cuhk03, _write_open_reid),
    "msmt17": ("MSMT17_V2", _msmt17, _write_lists),
    "cuhk01": ("CUHK01", _numbered("campus/", ".png", 4, shots=2), None),
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
"""Name of the data set -> its folder, its pictures, and a function that writes its other files."""
