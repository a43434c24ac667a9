"""Lists of image files, the labels in their names, and data sets as they are listed, with lines on what is amiss."""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from fedsim.core.errors import DataError
from fedsim.data.images import Domain, ImageFiles, ReIDSource, Split
from fedsim.data.leftovers import BY_PROTOCOL, IGNORABLE, image_files, left_out_in, summary

_DIGITS = 18  # of the largest identity and camera, as in manifests: sums of several fit into 64 bits


def list_images(folder: Path, expected: str) -> list[Path]:
    """Return a folder's image files, sorted by name; ``expected`` is an example of a name, for messages."""
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder")
    paths = image_files(folder)
    if not paths:
        unread = summary(list(left_out_in(folder, ())))
        but = f", but {unread}" if unread else ""
        raise DataError(f"{folder}: holds no images{but}; expected names like {expected}")
    return paths


def number_of(digits: str, path: Path) -> int:
    """Return the number that part of a name or list stands for; raise DataError naming ``path`` if it is too large."""
    if len(short := digits.lstrip("0")) > _DIGITS:
        problem = f"{short[: 2 * _DIGITS]} has more than {_DIGITS} digits; number people and cameras otherwise"
        raise DataError(f"{path}: the number {problem}")
    return int(short or "0")


def label_images(paths: Sequence[Path], pattern: str, expected: str) -> Split:
    """Read identities and cameras from names of files.

    ``pattern``: regular expression for the beginning of a name. Its groups may be ``pid`` (else identity 0), ``pair``
    of cameras (each has its own people), and ``cam``, from 1, or ``view``, from 0 (else camera 0). ``expected``: an
    example of a name, for messages. Raises DataError naming the first file whose name does not fit.
    """
    compiled = re.compile(pattern)
    pids, camids = np.empty(len(paths), dtype=np.int64), np.empty(len(paths), dtype=np.int64)
    for row, path in enumerate(paths):
        match = compiled.match(path.name)
        if match is None:
            raise DataError(f"{path}: the name does not begin like {expected}")
        groups = match.groupdict()
        numbers = {name: number_of(digits, path) for name, digits in groups.items() if digits is not None}
        pids[row] = number_of(str(10_000 * numbers.get("pair", 0) + numbers.get("pid", 0)), path)
        camids[row] = numbers["view"] if "view" in numbers else numbers.get("cam", 1) - 1
        if camids[row] < 0:
            raise DataError(f"{path}: cameras are numbered from 1, as in {expected}")
    return Split(ImageFiles(paths), pids, camids)


def read_folder(folder: Path, pattern: str, expected: str) -> Split:
    """List and label all images of a folder; see :func:`label_images`."""
    return label_images(list_images(folder, expected), pattern, expected)


log = logging.getLogger(__name__)

_SHOWN = 3  # names in a line


def listed(source: ReIDSource) -> list[Domain]:
    """Return the data sets of a source; log the files that are not read, and test images that train, too."""
    domains = source.domains()
    for name, items in source.left_out(domains).items():
        unread = [item for item in items if item.reason != BY_PROTOCOL]
        level = logging.INFO if all(item.reason == IGNORABLE for item in unread) else logging.WARNING
        if unread:
            log.log(level, "%s: files that are not read: %s", name, summary(unread))
    for domain in domains:
        if warning := line_of_copies(copies_in(domain)):
            log.warning("%s: %s", domain.name, warning)
    return domains


def listed_in_order(sources: Sequence[ReIDSource], classes: Sequence[type]) -> list[Domain]:
    """Return the data sets of sources: in the order of their ``classes``, and of one class by the names of the sets.

    Two folders of one class may differ in their places alone, on which no number depends.
    """
    of_class: dict[type, list[list[Domain]]] = {}
    for source, of_source in zip(sources, classes, strict=True):
        of_class.setdefault(of_source, []).append(listed(source))
    for lists in of_class.values():
        lists.sort(key=lambda domains: [domain.name for domain in domains], reverse=True)
    return [domain for of_source in classes for domain in of_class[of_source].pop()]


def copies_in(domain: Domain, is_thorough: bool = False) -> list[Path]:
    """Return the test images that have the bytes of a training image.

    A look at each of 150,000 files takes seconds. So only images are compared that share a name or a known identity,
    unless the comparison ``is_thorough``. Files of different sizes differ; of the others, the bytes are read.
    """
    if domain.train is None:
        return []
    parts = [[domain.train], [domain.query, domain.gallery]]
    if is_thorough:
        train, tests = ([path for split in part for path in split.images.whole_files()] for part in parts)
    else:
        train, tests = _related(parts, not domain.unlabelled)
    sizes = {path: _size(path) for path in [*train, *tests]}
    common = {sizes[path] for path in train} & {sizes[path] for path in tests} - {0}
    digests = {_digest(path) for path in train if sizes[path] in common}
    return [path for path in tests if sizes[path] in common and _digest(path) in digests]


def line_of_copies(copies: Sequence[Path]) -> str:
    """Return a line on such images, with the remedy; empty if there are none."""
    if not copies:
        return ""
    names = ", ".join("/".join(path.parts[-2:]) for path in copies[:_SHOWN]) + ", ..." * (len(copies) > _SHOWN)
    return f"{len(copies):,} test images are also training images ({names}); remove them from one of the two"


def _related(parts: Sequence[Sequence[Split]], knows_identities: bool) -> Iterator[list[Path]]:
    """Yield the files of each part that have a name or an identity of the other one; nearly always none have."""
    names = [{path.name for split in part for path in split.images.whole_files()} for part in parts]
    pids = [np.unique(np.concatenate([split.pids for split in part])) for part in parts]
    common, people = names[0] & names[1], np.intersect1d(pids[0], pids[1])
    people = people[people > 0] if knows_identities else people[:0]
    for part in parts:
        related = []
        for split in part if common or len(people) else ():
            is_of_both, whole = np.isin(split.pids, people).tolist(), {*split.images.whole_files()}
            locations = zip(split.images.locations(), is_of_both, strict=True)
            related += [path for path, is_one in locations if path in whole and (is_one or path.name in common)]
        yield related


def _size(path: Path) -> int:
    """Return the bytes of a file; 0 if it is not there, which others report."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _digest(path: Path) -> bytes:
    try:
        return hashlib.blake2b(path.read_bytes()).digest()
    except OSError:
        return os.fsencode(path)  # equals no other
