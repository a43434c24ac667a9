"""People cut out of CUHK-SYSU's pictures (Xiao et al., CVPR 2017): a re-ID test set from a person search data set."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from tqdm import tqdm

from fedsim.core.errors import ConfigError, DataError
from fedsim.data.reading import opened

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
    if target.exists():
        raise ConfigError(f"--output: {target} exists already; remove it, or choose another folder")
    people = list(_read_protocol(root / PROTOCOL))
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


def _read_protocol(path: Path) -> Iterator[_Person]:
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
                        yield _Person(part, number, _text(picture["imname"]), _box(picture["idlocate"]))
    except Exception as error:  # scipy raises many types for a damaged file
        raise DataError(f"{path}: is not CUHK-SYSU's {PROTOCOL.name} ({error}); get it from the owners") from error


def _text(cell: Any) -> str:
    return str(np.asarray(cell).ravel()[0])


def _box(cell: Any) -> tuple[int, int, int, int]:
    left, top, width, height = np.asarray(cell).ravel().astype(np.int64).tolist()
    return left, top, width, height
