"""Conversion of two data sets to the folders of images that are read.

CUHK03's original file becomes the folders of its new protocol (Zhong et al., CVPR 2017). People are cut out of
CUHK-SYSU's pictures (Xiao et al., CVPR 2017): a re-ID test set from a person search data set.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tqdm import tqdm

from fedsim.core.errors import ConfigError, DataError
from fedsim.core.extras import load_extra
from fedsim.data.reading import opened

Variant = Literal["detected", "labeled"]

_VARIABLE = {"bounding_box_train": "train_idx", "query": "query_idx", "bounding_box_test": "gallery_idx"}  # of a folder
_VIEWS, _PER_VIEW = 2, 5


class _Name(NamedTuple):
    """Position of an image in the file; all numbers from 1."""

    pair: int
    person: int
    view: int
    image: int

    def __str__(self) -> str:
        return f"{self.pair}_{self.person:03d}_{self.view}_{self.image:02d}.png"


def convert_cuhk03(mat: Path, protocol: Path, output: Path, variant: Variant) -> tuple[Path, dict[str, int]]:
    """Write ``output``/cuhk03-np/``variant``, which :class:`fedsim.data.datasets.CUHK03NP` reads.

    Args:
        mat: ``cuhk-03.mat``, in the format of MATLAB 7.3 (HDF5). ``detected`` and ``labeled`` are cells of five pairs
            of cameras; each is a cell of people x 10 images, five from each camera, empty if there are fewer.
        protocol: ``cuhk03_new_protocol_config_detected.mat`` or ``..._labeled.mat``: names (``filelist``), and their
            positions, from 1, for training, queries and gallery.
        output: the folder of data sets.
        variant: boxes by a detector or by hand.

    Returns:
        (the folder, the number of images in each of its parts).

    Raises:
        ConfigError: if the folder exists, the protocol is the other variant's, or h5py is not installed.
        DataError: if a file has other content.
    """
    target = output / "cuhk03-np" / variant
    _check_new(target)
    other_variant = "labeled" if variant == "detected" else "detected"
    if other_variant in protocol.name:
        raise ConfigError(
            f"--variant: {protocol.name} is the protocol of the {other_variant} boxes, not of the {variant} ones"
        )
    parts = _read_protocol(protocol)
    with _open(mat) as file:
        images = _Images(mat, file, variant)
        target.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f".{variant}-", dir=target.parent) as temporary:
            folder = Path(temporary) / variant
            everything = [(part, name) for part, names in parts.items() for name in names]
            for part, name in tqdm(everything, desc=f"writing {variant} images", disable=None):
                (folder / part).mkdir(parents=True, exist_ok=True)
                Image.fromarray(images.read(name)).save(folder / part / str(name))
            folder.rename(target)
    return target, {part: len(names) for part, names in parts.items()}


def _check_new(target: Path) -> None:
    if target.exists():
        raise ConfigError(f"--output: {target} exists already; remove it, or choose another folder")


def _open(mat: Path) -> Any:
    """Open an HDF5 file; h5py has no types."""
    h5py = load_extra("h5py", "--mat", "cuhk03")
    try:
        return h5py.File(mat, "r")
    except OSError as error:
        raise DataError(f"{mat}: cannot be read as cuhk-03.mat ({error})") from error


class _Images:
    """The images of one variant in an opened file; ``path`` is for messages."""

    def __init__(self, path: Path, file: Any, variant: Variant) -> None:
        self.path, self.file = path, file
        try:
            # MATLAB stores columns first: its people x 10 is 10 x people here
            self.pairs = [file[pair][()] for pair in file[variant][()].ravel()]
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise DataError(f"{path}: holds no cell {variant} of pairs of cameras; give cuhk-03.mat") from error
        for number, pair in enumerate(self.pairs, start=1):
            if pair.ndim != 2 or len(pair) != _VIEWS * _PER_VIEW:
                raise DataError(f"{path}: pair {number} of {variant} is not a cell of people x 10 images")

    def read(self, name: _Name) -> NDArray[np.uint8]:
        """Return an image, uint8 [H, W, 3]; raise DataError if it is missing."""
        try:
            cell = self.file[self.pairs[name.pair - 1][name.image - 1, name.person - 1]][()]
            # MATLAB stores an empty cell as its shape
            if cell.ndim != 3 or cell.shape[0] != 3 or cell.dtype != np.uint8:
                raise ValueError("the cell is empty")
        except (KeyError, IndexError, ValueError, TypeError, OverflowError, OSError) as error:
            problem = f"holds no image {name}, which the protocol names; check that the two files fit"
            raise DataError(f"{self.path}: {problem}") from error
        pixels: NDArray[np.uint8] = np.ascontiguousarray(cell.T)
        return pixels


def _read_protocol(path: Path) -> dict[str, list[_Name]]:
    """Folder -> its images."""
    from scipy.io import loadmat

    if not path.is_file():
        raise DataError(f"{path}: no such file; --protocol is the file of CUHK03's new protocol")
    try:
        content = loadmat(path)
        files = [str(np.asarray(cell).item()) for cell in content["filelist"].ravel()]
        rows = {part: content[variable].ravel().astype(np.int64) - 1 for part, variable in _VARIABLE.items()}
    except Exception as error:  # scipy raises many types for a damaged file
        remedy = "get cuhk03_new_protocol_config_detected.mat or cuhk03_new_protocol_config_labeled.mat"
        raise DataError(f"{path}: is not CUHK03's new protocol ({error}); {remedy}") from error
    for part, index in rows.items():
        if not len(index) or not np.isin(index, np.arange(len(files))).all():
            raise DataError(f"{path}: {_VARIABLE[part]} does not fit the {len(files)} names of filelist")
    return {part: [_parse(path, files[row]) for row in index] for part, index in rows.items()}


def _parse(path: Path, file: str) -> _Name:
    match = re.fullmatch(r"(\d+)_(\d+)_([12])_(\d+)\.\w+", file)
    if match is None:
        raise DataError(f"{path}: the name {file} is not like 1_001_1_01.png")
    name = _Name(*map(int, match.groups()))
    if min(name) < 1 or (name.image - 1) // _PER_VIEW != name.view - 1:
        raise DataError(f"{path}: the name {file} is not like 1_001_1_01.png; images 1 to 5 are view 1, 6 to 10 view 2")
    return name


PROTOCOL = Path("annotation", "test", "train_test", "TestG50.mat")
PICTURES = Path("Image", "SSM")


class _Person(NamedTuple):
    part: str
    """``query`` or ``gallery``"""
    pid: int
    picture: str
    box: tuple[int, int, int, int]
    """left, top, width, height in pixels"""


def cut_people(root: Path, output: Path) -> tuple[Path, dict[str, int]]:
    """Write ``output``/cuhksysu4reid, which :class:`fedsim.data.datasets.CUHKSYSU` reads.

    Queries are the boxes of ``TestG50.mat``'s queries, and the gallery those of the same people in its galleries: 2,900
    and 5,447 (paper 001's numbers). A person's number is its place in the file, from 1, as in the owners' code
    (ShuangLI59/person_search, lib/datasets/psdb.py).

    Args:
        root: the owners' folder, with ``annotation/test/train_test/TestG50.mat`` and ``Image/SSM``.
        output: the folder of data sets.

    Returns:
        (the folder, the number of images in each of its parts).

    Raises:
        ConfigError: if the folder exists.
        DataError: if a file is missing or has other content.
    """
    target = output / "cuhksysu4reid"
    _check_new(target)
    people = list(_boxes_of(root / PROTOCOL))
    counts = {"query": 0, "gallery": 0}
    output.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".cuhksysu-", dir=output) as temporary:
        folder = Path(temporary) / target.name
        for person in tqdm(people, desc="cutting people out", disable=None):
            (folder / person.part).mkdir(parents=True, exist_ok=True)
            counts[person.part] += 1
            name = f"p{person.pid:05d}_{Path(person.picture).stem}_{counts[person.part]}.png"
            _cut(root / PICTURES / person.picture, person.box).save(folder / person.part / name)
        folder.rename(target)
    return target, counts


def _cut(path: Path, box: tuple[int, int, int, int]) -> Image.Image:
    left, top, width, height = box
    with opened(path, "get it from the owners again") as picture:
        is_inside = min(left, top) >= 0 and left + width <= picture.width and top + height <= picture.height
        if not is_inside or width < 1 or height < 1:
            raise DataError(f"{path}: the box {list(box)} of {PROTOCOL.name} is not in this picture")
        return picture.convert("RGB").crop((left, top, left + width, top + height))


def _boxes_of(path: Path) -> Iterator[_Person]:
    """Yield the boxes of queries and their matches; raise DataError if the file has other content."""
    from scipy.io import loadmat

    if not path.is_file():
        raise DataError(f"{path}: no such file; --root is the owners' folder, with {PROTOCOL} and {PICTURES}")
    try:
        entries = loadmat(path)[path.stem].ravel()
        for number, entry in enumerate(entries, start=1):
            for part, shown in (("query", entry["Query"].ravel()), ("gallery", entry["Gallery"].ravel())):
                for picture in shown:
                    if picture["idlocate"].size:  # empty: the person is not in this picture
                        yield _Person(
                            part, number, str(np.asarray(picture["imname"]).ravel()[0]), _box(picture["idlocate"])
                        )
    except Exception as error:  # scipy raises many types for a damaged file
        raise DataError(f"{path}: is not CUHK-SYSU's {PROTOCOL.name} ({error}); get it from the owners") from error


def _box(cell: Any) -> tuple[int, int, int, int]:
    left, top, width, height = np.asarray(cell).ravel().astype(np.int64).tolist()
    return left, top, width, height
