"""``fedsim data check``: the data sets in a folder, and whether they are complete."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from tabulate import tabulate

from fedsim.core.errors import DataError
from fedsim.data import datasets
from fedsim.data.datasets import Counts, DataSet
from fedsim.data.images import Domain

_CLASSES: tuple[type[DataSet], ...] = (
    datasets.Market1501, datasets.CUHK03NP, datasets.MSMT17, datasets.CUHK01, datasets.CUHK02, datasets.PRID2011,
    datasets.VIPeR, datasets.ThreeDPeS, datasets.ILIDS, datasets.GRID, datasets.CAVIAR4REID, datasets.CUHKSYSU,
    datasets.Omniglot, datasets.CIFAR10,
)  # fmt: skip


class Finding(NamedTuple):
    """The result for one data set."""

    name: str
    found: Counts | None
    """None: the data set is missing or cannot be read"""
    official: Counts | None
    problem: str
    """the problem and its remedy; empty if there is none"""


def check_data(root: Path) -> str:
    """Return a table of all data sets: sizes in ``root``, official sizes, and problems; raise DataError without it."""
    if not root.is_dir():
        raise DataError(f"{root}: no such folder")
    findings, verdicts = find_data(root), ("complete", "there; no official count")
    rows = [[f.name, _sizes(f.found), _sizes(f.official), f.problem or verdicts[f.official is None]] for f in findings]
    table = tabulate(rows, headers=["data set", "found", "official", ""], maxcolwidths=[None, None, None, 70])
    return f"{table}\n\ntraining identities / training images / queries / gallery images; nothing is ever downloaded"


def find_data(root: Path) -> list[Finding]:
    """Look for each data set below ``root``."""
    return [_look(kind(str(root))) for kind in _CLASSES]


def _look(data_set: DataSet) -> Finding:
    try:
        folder = data_set.find()
    except DataError:
        return Finding(data_set.name, None, data_set.official, f"not there; {data_set.ask}")
    try:
        found = _count(data_set.domains_in(folder))
    except DataError as error:
        return Finding(data_set.name, None, data_set.official, str(error))
    official = data_set.official or found
    is_complete = all(want in (None, have) for want, have in zip(official, found, strict=True))
    return Finding(data_set.name, found, data_set.official, "" if is_complete else "not complete: compare the numbers")


def _count(domains: list[Domain]) -> Counts:
    trains = [domain.train for domain in domains if domain.train is not None]
    identities, images = sum(len(train.identities) for train in trains), sum(map(len, trains))
    query, gallery = sum(len(domain.query) for domain in domains), sum(len(domain.gallery) for domain in domains)
    return Counts(identities or None, images or None, query, gallery)


def _sizes(counts: Counts | None) -> str:
    return "-" if counts is None else " / ".join("-" if n is None else f"{n:,}" for n in counts)
