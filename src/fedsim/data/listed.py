"""Data sets as they are listed, with lines on files that are not read, and on training images among the test images."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from fedsim.data.images import Domain, ReIDSource, Split
from fedsim.data.leftovers import BY_PROTOCOL, IGNORABLE, summary

log = logging.getLogger(__name__)

_SHOWN = 3  # names in a line

_Labelled = list[tuple[Path, int]]


def listed(source: ReIDSource) -> list[Domain]:
    """Return the data sets of a source; log the files that are not read, and test images that train, too."""
    domains = source.domains()
    for name, items in source.left_out(domains).items():
        unread = [item for item in items if item.reason != BY_PROTOCOL]
        level = logging.INFO if all(item.reason == IGNORABLE for item in unread) else logging.WARNING
        if unread:
            log.log(level, "%s: files that are not read: %s", name, summary(unread))
    for domain in domains:
        if line := line_of_copies(copies_in(domain)):
            log.warning("%s: %s", domain.name, line)
    return domains


def copies_in(domain: Domain, is_thorough: bool = False) -> list[Path]:
    """Return the test images that have the bytes of a training image.

    A look at each of 150,000 files takes seconds. So only images are compared that share a name or a known identity,
    unless the comparison ``is_thorough``. Files of different sizes differ; of the others, the bytes are read.
    """
    if domain.train is None:
        return []
    train, tests = _files(domain.train), [*_files(domain.query), *_files(domain.gallery)]
    if not is_thorough:
        train, tests = _related(train, tests, not domain.unlabelled)
    sizes = {path: _size(path) for path, _ in [*train, *tests]}
    common = {sizes[path] for path, _ in train} & {sizes[path] for path, _ in tests} - {0}
    digests = {_digest(path) for path, _ in train if sizes[path] in common}
    return [path for path, _ in tests if sizes[path] in common and _digest(path) in digests]


def line_of_copies(copies: Sequence[Path]) -> str:
    """Return a line on such images, with the remedy; empty if there are none."""
    if not copies:
        return ""
    names = ", ".join("/".join(path.parts[-2:]) for path in copies[:_SHOWN]) + ", ..." * (len(copies) > _SHOWN)
    return f"{len(copies):,} test images are also training images ({names}); remove them from one of the two"


def _related(train: _Labelled, tests: _Labelled, knows_identities: bool) -> tuple[_Labelled, _Labelled]:
    """Return the files of both parts that have a name or an identity of the other part."""
    common = set.intersection(*({os.path.basename(path) for path, _ in part} for part in (train, tests)))
    known = set.intersection(*({pid for _, pid in part if pid > 0 and knows_identities} for part in (train, tests)))
    if not common and not known:
        return [], []
    kept = ([(path, pid) for path, pid in part if pid in known or path.name in common] for part in (train, tests))
    return next(kept), next(kept)


def _files(split: Split) -> _Labelled:
    pairs = zip(split.images.locations(), split.pids.tolist(), strict=True)
    return [(path, pid) for path, pid in pairs if path is not None]


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
