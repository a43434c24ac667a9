"""``fedsim data check``: the data sets in a folder, and whether they are complete."""

from __future__ import annotations

import copy
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from tabulate import tabulate

from fedsim.core.errors import ConfigError, DataError
from fedsim.data import datasets
from fedsim.data.datasets import Counts, DataSet
from fedsim.data.datasets.small import SmallDataSet
from fedsim.data.images import Domain
from fedsim.data.listing import SUFFIXES
from fedsim.data.market import PARTS, SPLITS, is_market_folder, read_market_domain

_CLASSES: tuple[type[DataSet], ...] = (
    datasets.Market1501, datasets.CUHK03NP, datasets.MSMT17, datasets.CUHK01, datasets.CUHK02, datasets.PRID2011,
    datasets.VIPeR, datasets.ThreeDPeS, datasets.ILIDS, datasets.GRID, datasets.CAVIAR4REID, datasets.CUHKSYSU,
    datasets.Omniglot, datasets.CIFAR10,
)  # fmt: skip


_ABSENT = "not there"


class Finding(NamedTuple):
    """The result for one data set."""

    name: str
    found: Counts | None
    """None: the data set is missing or cannot be read"""
    official: Counts | None
    problem: str
    """the problem and its remedy; empty if there is none"""
    layout: str = "-"
    """the folder, the parts by which it was recognised, and how many of its images are read"""


def check_data(root: Path, everything: bool = False) -> str:
    """Return a table of the data sets in ``root``: their sizes, official sizes, and problems.

    ``everything``: also list the papers' data sets that are missing.

    Raises:
        DataError: if there is no such folder.
    """
    if not root.is_dir():
        raise DataError(f"{root}: no such folder")
    verdicts = ("complete", "there; no official count")
    findings = [f for f in find_data(root) if everything or f.found is not None or not f.problem.startswith(_ABSENT)]
    user_findings = find_market_folders(root, {f.layout.partition(":")[0] for f in findings})
    rows = [
        [f.name, _sizes(f.found), _sizes(f.official), f.layout, f.problem or verdicts[f.official is None]]
        for f in (*findings, *user_findings)
    ]
    if not rows:
        return (
            f"{root}: holds no data set; one in Market-1501 layout has {', '.join(PARTS)} (docs/data.md), and --all "
            "true lists the papers' data sets and how to get them"
        )
    headers = ["data set", "found", "official", "read as", ""]
    table = tabulate(rows, headers=headers, maxcolwidths=[None, None, None, 36, 60])
    return f"{table}\n\ntraining identities / training images / queries / gallery images; nothing is ever downloaded"


def find_data(root: Path) -> list[Finding]:
    """Return a finding for each of the papers' data sets below ``root``."""
    labeled = _look(datasets.CUHK03NP(str(root), variant="labeled"))
    return [*(_look(kind(str(root))) for kind in _CLASSES), labeled._replace(name="cuhk03np, labeled")]


def find_market_folders(root: Path, recognised: Collection[str]) -> list[Finding]:
    """Return a finding for ``root`` and each folder in it in Market-1501 layout, without the ``recognised`` names."""
    folders = [root, *sorted(root.iterdir())]
    return [_look_at(folder) for folder in folders if is_market_folder(folder) and folder.name not in recognised]


def _look_at(folder: Path) -> Finding:
    """Read a data set of the user."""
    try:
        domain = read_market_domain(folder)
    except DataError as error:
        return Finding(folder.name, None, None, str(error), f"{folder.name}: Market-1501 layout")
    problem = "your own; can be used"
    problem += f", scored on the {len(domain.splits)} splits of {SPLITS}" if domain.splits else ""
    if domain.train is not None and len(domain.train.identities) == 1:
        problem = "only one training identity; training needs at least 2"
    return Finding(folder.name, _count([domain]), None, problem, f"{folder.name}: Market-1501 layout")


def _look(data_set: DataSet) -> Finding:
    name, official, problem = data_set.name, data_set.official, ""
    try:
        folder = data_set.find()
    except DataError:
        return Finding(name, None, official, f"{_ABSENT}; {data_set.ask}")
    try:
        domains = data_set.domains_in(folder)
    except DataError as error:
        return Finding(name, None, official, str(error), _layout(data_set, folder, []))
    counts = _count(domains)
    if not all(expected in (None, n) for expected, n in zip(official or counts, counts, strict=True)):
        problem = "not complete: compare the numbers"
    if isinstance(data_set, SmallDataSet):  # the other protocol may need another file
        with_splits = copy.copy(data_set)
        with_splits.protocol = "splits"
        try:
            with_splits.domains_in(folder)
        except (ConfigError, DataError) as error:
            problem = f"{problem}; protocol splits: {error}".removeprefix("; ")
    return Finding(name, counts, official, problem, _layout(data_set, folder, domains))


def _layout(data_set: DataSet, folder: Path, domains: list[Domain]) -> str:
    """Describe a folder: the parts by which it was recognised, and how many of its images are read."""
    splits = [split for domain in domains for split in (domain.train, domain.query, domain.gallery) if split]
    read = {path for split in splits for path in split.images.locations() if path is not None}
    images = sum(path.suffix.lower() in SUFFIXES for path in folder.rglob("*"))
    parts = ", ".join(data_set.holds)
    return f"{folder.name}: {parts}" + (f"; {len(read):,} of {images:,} images" if images else "")


def _count(domains: list[Domain]) -> Counts:
    trains = [domain.train for domain in domains if domain.train is not None]
    identities, images = sum(len(train.identities) for train in trains), sum(map(len, trains))
    query, gallery = sum(len(domain.query) for domain in domains), sum(len(domain.gallery) for domain in domains)
    return Counts(identities or None, images or None, query, gallery)


def _sizes(counts: Counts | None) -> str:
    return "-" if counts is None else " / ".join("-" if n is None else f"{n:,}" for n in counts)
