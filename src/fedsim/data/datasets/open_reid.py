"""CUHK03 in the format of open-reid, whose two JSON files list people, images and splits."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np

from fedsim.core.errors import DataError
from fedsim.data.datasets.base import DataSet
from fedsim.data.images import Domain, ImageFiles, Split
from fedsim.data.leftovers import image_files
from fedsim.settings.facts import NOTHING

_EXAMPLE = "00000007_01_0003.jpg, which is person 7, camera 1, image 3"
_PARTS = ("trainval", "query", "gallery")


class _Image(NamedTuple):
    name: str
    person: int
    """position in the list of meta.json, from 0"""
    camera: int
    """from 0"""


People = Sequence[Sequence[Sequence[str]]]
"""Person -> camera -> names of images, in their order."""


class CUHK03(DataSet):
    """CUHK03 (Li et al., CVPR 2014) as the library open-reid stores it: 1,467 people, 2 cameras, 28,193 images.

    ``meta.json`` has a list of images for each person and camera; boxes drawn by hand and boxes of a detector are in
    one list. ``splits.json`` has people for training and for test. The library's own file has 20 splits with 1,367
    people for training and 100 for test; another file of the format may have the 767 and 700 of the new protocol. The
    two are different data sets. A fit's first lines and ``fedsim data check`` print the people and images of the file.

    Args:
        root: see :class:`DataSet`.
        split: position in ``splits.json``, from 0.
        query: images that are searched for. last: the last image of each test person and camera, and the gallery is the
            others (paper 005); an only image of a person and camera is in both. all: every test image, and all are the
            gallery, as the library's own evaluation has it.
    """

    name = "cuhk03"
    folders = ("cuhk03_release", "cuhk03", "CUHK03")
    holds = ("images", "meta.json", "splits.json")
    ask = "ask the Multimedia Laboratory of the Chinese University of Hong Kong, and open-reid's script makes the files"

    def __init__(self, root: Annotated[str, NOTHING], split: int = 0, query: Literal["last", "all"] = "last") -> None:
        super().__init__(root)
        self.split, self.query = split, query

    def _read(self, folder: Path) -> Domain:
        people = _read_people(folder / "meta.json")
        parts = _read_split(folder / "splits.json", self.split, len(people))
        _check_images(folder, people)
        queries, gallery = [], []
        for person in sorted(parts["query"]):
            queries += [image for camera in _images_of(people, person) for image in self._chosen(camera)]
        for person in sorted(parts["gallery"]):
            gallery += [image for camera in _images_of(people, person) for image in self._others(camera)]
        training = [image for person in sorted(parts["trainval"]) for c in _images_of(people, person) for image in c]
        return Domain(self.name, _split(folder, training), _split(folder, queries), _split(folder, gallery))

    def _chosen(self, images: list[_Image]) -> list[_Image]:
        """Return the queries among a person's images of one camera."""
        return images[-1:] if self.query == "last" else images

    def _others(self, images: list[_Image]) -> list[_Image]:
        """Return the gallery images among a person's images of one camera."""
        return images[:-1] or images if self.query == "last" else images


def _images_of(people: People, person: int) -> list[list[_Image]]:
    """Return a person's images, a list per camera."""
    return [[_Image(name, person, camera) for name in names] for camera, names in enumerate(people[person])]


def _split(folder: Path, images: Sequence[_Image]) -> Split:
    pids = np.array([1 + image.person for image in images], dtype=np.int64)  # 0 means a distractor
    camids = np.array([image.camera for image in images], dtype=np.int64)
    return Split(ImageFiles([folder / "images" / image.name for image in images]), pids, camids)


def _read_people(path: Path) -> People:
    """Return the people of ``meta.json``; raise DataError if an image's name is not that of its person and camera."""
    meta = _parsed(path)
    people = meta.get("identities") if isinstance(meta, dict) else None
    if not isinstance(people, list) or not people or not all(map(_is_person, people)):
        raise DataError(f"{path}: identities is not a list of people, each with a list of names per camera")
    cameras = {len(person) for person in people}
    if cameras != {meta.get("num_cameras")}:
        counts = " or ".join(map(str, sorted(cameras)))
        raise DataError(f"{path}: num_cameras is {meta.get('num_cameras')}, but people have {counts} cameras")
    for number, person in enumerate(people):
        for camera, names in enumerate(person):
            for name in names:
                match = re.fullmatch(r"(\d{1,18})_(\d{1,18})_\d{1,18}\.\w+", name)
                if match is None or (int(match[1]), int(match[2])) != (number, camera):
                    raise DataError(
                        f"{path}: {name[:100]!r} is listed for person {number}, camera {camera}; names are like "
                        f"{_EXAMPLE}"
                    )
    return people


def _read_split(path: Path, number: int, num_people: int) -> dict[str, list[int]]:
    """Return the people of each part; raise DataError if a person is not there, twice, or in training and test."""
    splits = _parsed(path)
    if not isinstance(splits, list) or not splits:
        raise DataError(f"{path}: is not a list of splits")
    if not 0 <= number < len(splits):
        raise DataError(f"{path}: has no split {number}; set split to a number from 0 to {len(splits) - 1}")
    split = splits[number]
    if not isinstance(split, dict) or not all(_are_people(split.get(part), num_people) for part in _PARTS):
        names = ", ".join(_PARTS)
        raise DataError(
            f"{path}: split {number}: {names} are not lists of people, each once, from 0 to {num_people - 1}"
        )
    parts = {part: split[part] for part in _PARTS}
    if shared := {*parts["trainval"]} & {*parts["query"], *parts["gallery"]}:
        raise DataError(f"{path}: split {number}: person {min(shared)} is in training and in test")
    if {*parts["query"]} != {*parts["gallery"]}:
        person = min({*parts["query"]} ^ {*parts["gallery"]})
        raise DataError(f"{path}: split {number}: person {person} is in only one of query and gallery")
    return parts


def _check_images(folder: Path, people: People) -> None:
    """Raise DataError unless each listed image is there, and is listed once."""
    listed = [name for person in people for names in person for name in names]
    if len({*listed}) < len(listed):
        name = next(name for name in sorted(listed) if listed.count(name) > 1)
        raise DataError(f"{folder / 'meta.json'}: lists {name} twice")
    if missing := sorted({*listed} - {path.name for path in image_files(folder / "images")}):
        raise DataError(
            f"{folder / 'images'}: lacks {len(missing):,} of the {len(listed):,} images that meta.json lists, first "
            f"{missing[0]}; copy the whole folder again"
        )


def _parsed(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:  # ValueError: also of bytes that are not UTF-8
        raise DataError(f"{path}: cannot be read as JSON ({error}); was it edited?") from error


def _is_person(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(names, list) and all(isinstance(name, str) for name in names) for names in value
    )


def _are_people(value: object, num_people: int) -> bool:
    """Whether a value is a list of one or more people, each once."""
    if not isinstance(value, list) or not value or not all(type(person) is int for person in value):
        return False
    return len({*value}) == len(value) and 0 <= min(value) <= max(value) < num_people
