"""``fedsim data check``: the data sets in a folder, and whether they are complete."""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from tabulate import tabulate

from fedsim.core.errors import ConfigError, DataError, NotReadyError
from fedsim.core.names import printable, problem_of_name
from fedsim.core.paths import FOLDER
from fedsim.data import datasets, market
from fedsim.data.datasets import Counts, DataSet
from fedsim.data.datasets.base import files_of
from fedsim.data.datasets.small import SmallDataSet
from fedsim.data.federations import is_readable_file, notes_of, obstacle_of
from fedsim.data.images import Domain, ReIDSource
from fedsim.data.leftovers import BY_PROTOCOL, LeftOut, images_outside, summary
from fedsim.data.listing import copies_in, line_of_copies
from fedsim.data.reading import problem_of

_CLASSES: tuple[type[DataSet], ...] = (
    datasets.Market1501, datasets.CUHK03NP, datasets.CUHK03, datasets.MSMT17, datasets.CUHK01, datasets.CUHK02,
    datasets.PRID2011, datasets.VIPeR, datasets.ThreeDPeS, datasets.ILIDS, datasets.GRID, datasets.CAVIAR4REID,
    datasets.CUHKSYSU, datasets.Omniglot, datasets.CIFAR10,
)  # fmt: skip


_ABSENT = "not there"
_INCOMPLETE = "not complete: compare the numbers"


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
    is_usable: bool = True
    """whether it is complete, and a fit with the usual settings accepts it"""
    notes: str = ""
    """remarks for its owner, such as files that are not read"""

    @property
    def verdict(self) -> str:
        """The last column of the table."""
        state = self.problem or ("complete" if self.official is not None else "there; no official count")
        return f"{state}; {self.notes}" if self.notes else state


def findings_in(root: Path, everything: bool = False) -> list[Finding]:
    """Look at the data sets in ``root``: their sizes, official sizes, and problems.

    ``everything``: also list the papers' data sets that are missing.

    Raises:
        DataError: if there is no such folder.
    """
    FOLDER.check(root, "--root")
    findings = [f for f in find_data(root) if everything or f.found is not None or not f.problem.startswith(_ABSENT)]
    findings += _of_fedreidbench(root)
    recognised = {re.split("[:/]", f.layout)[0] for f in findings}
    return [*findings, *find_market_folders(root, recognised), *_misplaced(root, recognised)]


def findings_of(source: ReIDSource) -> list[Finding]:
    """Return a finding for each data set that a source lists, with the official numbers where they are known.

    Raises:
        DataError: if a source that is no :class:`DataSet` cannot list them.
    """
    if isinstance(source, DataSet):
        return [_look(source)]
    official = source.official_counts if isinstance(source, datasets.FedReIDBench) else {}
    return [_counted(domain, official.get(domain.name)) for domain in source.domains()]


def _counted(domain: Domain, official: Counts | None) -> Finding:
    """Compare the numbers of a data set with the official ones; public data have no queries."""
    counts = _count([domain])
    problem = _gap(files_of(domain)) or (obstacle_of(domain) if len(domain.query) else "")
    problem = problem or ("" if _agree(counts, official) else _INCOMPLETE)
    return Finding(domain.name, counts, official, problem, "-", not problem, _withdrawal(domain.name))


def _of_fedreidbench(root: Path) -> list[Finding]:
    """Return a finding for each folder in ``root`` as the authors of paper 003 send it."""
    findings = []
    for folder, name in datasets.FedReIDBench.folder_names.items():
        if not (root / folder / "pytorch").is_dir():
            continue
        layout = f"{folder}/pytorch: read by data.source FedReIDBench"
        try:
            [finding] = findings_of(datasets.FedReIDBench(str(root), [folder]))
        except DataError as error:
            finding = Finding(name, None, datasets.FedReIDBench.official_counts.get(name), str(error), is_usable=False)
        findings.append(finding._replace(layout=layout))
    return findings


def _misplaced(root: Path, recognised: Collection[str]) -> list[Finding]:
    """Return a finding for each folder that only a move, a new name or ``fedsim data convert`` makes a data set."""
    findings = [
        Finding(path.parent.name, None, None, f"{path}: {reason}", is_usable=False)
        for path, reason in market.misplaced(root)
        if not {path.name, path.parent.name} & set(recognised)
    ]
    original = next((path for pattern in ("", "*/") for path in root.glob(f"{pattern}cuhk-03.mat")), None)
    if original is not None and not {"cuhk03-np", "CUHK03-NP"} & set(recognised):
        problem = f"{original} is CUHK03's original file; fedsim data convert makes the folders that are read of it"
        findings.append(Finding("cuhk03np", None, None, problem, is_usable=False))
    return findings


def refuse_unusable(root: Path, findings: Sequence[Finding]) -> None:
    """Raise NotReadyError if ``root`` holds no data set, or, naming the first one, if one cannot be used."""
    if not findings:
        raise NotReadyError(
            f"{root}: holds no data set; one in Market-1501 layout has {', '.join(market.PARTS)} (docs/data.md), and "
            f"--all true lists the papers' data sets and how to get them"
        )
    if bad := [finding for finding in findings if not finding.is_usable]:
        counted = "a data set cannot be used" if len(bad) == 1 else f"{len(bad)} data sets cannot be used, first"
        raise NotReadyError(f"{counted}: {bad[0].name}: {bad[0].problem}")


def table_of(findings: Sequence[Finding]) -> str:
    """Return the findings as a table."""
    rows = [
        [printable(cell) for cell in (f.name, _sizes(f.found), _sizes(f.official), f.layout, f.verdict)]
        for f in findings
    ]
    headers = ["data set", "found", "official", "read as", ""]
    table = tabulate(rows, headers=headers, maxcolwidths=[None, None, None, 36, 60], disable_numparse=True)
    return f"{table}\n\ntraining identities / training images / queries / gallery images; nothing is ever downloaded"


def find_data(root: Path) -> list[Finding]:
    """Return a finding for each of the papers' data sets below ``root``."""
    labeled = _look(datasets.CUHK03NP(str(root), variant="labeled"))
    return [*(_look(cls(str(root))) for cls in _CLASSES), labeled._replace(name="cuhk03np, labeled")]


def find_market_folders(root: Path, recognised: Collection[str]) -> list[Finding]:
    """Return a finding for ``root`` and each folder in it in Market-1501 layout, without the ``recognised`` names."""
    folders = [*([root.resolve()] if market.is_market_folder(root) else []), *market.market_folders(root)]
    return [_look_at(folder) for folder in folders if folder.name not in recognised]


def _look_at(folder: Path) -> Finding:
    """Read a data set of the user."""
    layout = f"{folder.name}: Market-1501 layout"
    if problem := problem_of_name(folder.name):
        problem = f"{problem.removeprefix(f'{folder.name!a} ')}; rename it"  # the table has the name
        return Finding(folder.name, None, None, problem, layout, is_usable=False)
    try:
        domain = market.read_market_domain(folder, unmatched="leave_out")
    except DataError as error:
        problem = f"{error}{_advice_on_labels(folder)}"
        return Finding(folder.name, None, None, problem, layout, is_usable=False)
    verdict = "your own; can be used"
    verdict += f", scored on the {len(domain.splits)} splits of {market.SPLITS}" if domain.splits else ""
    obstacle = (
        _unreadable(files_of(domain)) or obstacle_of(domain) or line_of_copies(copies_in(domain, is_thorough=True))
    )
    remarks = (_withdrawal(folder.name), notes_of(domain), _not_read(market.left_out_of(folder, domain)))
    notes = "; ".join(filter(None, remarks))
    return Finding(folder.name, _count([domain]), None, obstacle or verdict, layout, not obstacle, notes)


def _advice_on_labels(folder: Path) -> str:
    """Return a second remedy for a data set that is refused: its names may be those of unknown people."""
    try:
        market.read_market_domain(folder, unlabelled=True)
    except DataError:
        return ""
    return "; or, if people are unknown, set unlabelled: true of data.source"


def _unreadable(paths: Sequence[Path]) -> str:
    """Open each image, without decoding it; return how many cannot be read, and the first; empty if all can be."""
    problems = [problem for path in dict.fromkeys(paths) if (problem := problem_of(path)) is not None]
    return f"{len(problems):,} of {len(paths):,} images cannot be read, first: {problems[0]}" if problems else ""


def _not_read(items: Sequence[LeftOut]) -> str:
    return f"not read: {unread}" if (unread := summary(items)) else ""


def _look(data_set: DataSet) -> Finding:
    name, official, problem = data_set.name, data_set.official, ""
    try:
        folder = data_set.find()
    except DataError:
        return Finding(name, None, official, f"{_ABSENT}; {data_set.ask}")
    try:
        domains = data_set.domains_in(folder)
    except DataError as error:
        return Finding(name, None, official, str(error), _layout(data_set, folder, []), is_usable=False)
    counts, files = _count(domains), dict.fromkeys(path for domain in domains for path in files_of(domain))
    unread = [item for items in data_set.left_out(domains).values() for item in items if item.reason != BY_PROTOCOL]
    obstacle = _gap(list(files)) or next(filter(None, map(obstacle_of, domains)), "")
    is_complete = _agree(counts, official)
    if not is_complete and folder.resolve().name not in data_set.folders and market.is_market_folder(folder):
        return Finding(name, None, official, f"{_ABSENT}; {data_set.ask}")  # it is the user's, in the same layout
    if not is_complete:
        problem = _INCOMPLETE
        # it may be a data set of the user in the same layout
        obstacle = obstacle or _unreadable(list(files))
    if isinstance(data_set, SmallDataSet):  # the other protocol may need another file
        with_splits = copy.copy(data_set)
        with_splits.protocol = "splits"
        try:
            with_splits.domains_in(folder)
        except (ConfigError, DataError) as error:
            problem = f"{problem}; protocol splits: {error}".removeprefix("; ")
    layout = _layout(data_set, folder, domains)
    is_usable = is_complete and not obstacle
    return Finding(name, counts, official, obstacle or problem, layout, is_usable, _not_read(unread))


def _gap(paths: Sequence[Path]) -> str:
    """Return how many files are not there: data sets with lists are listed without a look at their images."""
    absent = [path for path in paths if not is_readable_file(path)]
    gap = f"{len(absent):,} of {len(paths):,} images are not there, or empty"
    return f"not complete: {gap}; first {absent[0]}; restore them, or correct the list of them" if absent else ""


def _layout(data_set: DataSet, folder: Path, domains: list[Domain]) -> str:
    """Describe a folder: the parts by which it was recognised, and how many of its images are read."""
    read = {path for domain in domains for path in files_of(domain)}
    images = sum(1 for _ in images_outside(folder, ()))
    parts = ", ".join(data_set.holds)
    return f"{folder.name}: {parts}" + (f"; {len(read):,} of {images:,} images" if images else "")


def _count(domains: list[Domain]) -> Counts:
    trains = [domain.train for domain in domains if domain.train is not None]
    identities, images = sum(len(train.identities) for train in trains), sum(map(len, trains))
    query, gallery = sum(len(domain.query) for domain in domains), sum(len(domain.gallery) for domain in domains)
    return Counts(identities or None, images or None, query, gallery)


def _withdrawal(name: str) -> str:
    """Return a remark on a data set that its owners withdrew; empty on all others."""
    is_withdrawn = name in (datasets.DukeMTMC.name, *datasets.DukeMTMC.folders)
    return "its owners withdrew it: leave it out (docs/datasets.md)" if is_withdrawn else ""


def _agree(counts: Counts, official: Counts | None) -> bool:
    """Whether the numbers are the official ones, where there are any."""
    return all(expected in (None, n) for expected, n in zip(official or counts, counts, strict=True))


def _sizes(counts: Counts | None) -> str:
    return "-" if counts is None else " / ".join("-" if n is None else f"{n:,}" for n in counts)
