"""Images that a data set has twice: their pixels are compared, so that other numbers or files do not hide it."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping
from itertools import combinations
from typing import NamedTuple

import numpy as np

from fedsim.data.images import Domain, Images, Size, Split
from fedsim.data.listing import copies_in, line_of_copies
from fedsim.testing.findings import Findings

_MOST = 200
"""images of a part that are decoded; of more, those at equal distances"""
_FEW = 0.01
"""share of a part's images up to which twins are tolerated: some published sets have them"""


class _Image(NamedTuple):
    place: str
    """data set and part"""
    pid: int
    camid: int


def digests(images: Images, size: Size) -> list[bytes]:
    """Return a hash of the pixels of each image."""
    return [hashlib.blake2b(row.numpy().tobytes(), digest_size=16).digest() for row in images.decode(size)]


def check_twins(domains: list[Domain], size: Size, findings: Findings) -> None:
    """Note images that are in training and in a test, in two data sets, or in one part with two labels.

    All images of a small part are decoded, some of a large one. All files are compared by their bytes.
    """
    seen, fewest = defaultdict[bytes, list[_Image]](list), _MOST
    for domain in domains:
        for name, part in _parts(domain).items():
            chosen = np.unique(np.linspace(0, len(part) - 1, min(_MOST, len(part))).astype(np.int64))
            some, fewest = part.take(chosen), min(fewest, len(chosen))
            labels = zip(some.pids.tolist(), some.camids.tolist(), strict=True)
            for digest, (pid, camid) in zip(digests(some.images, size), labels, strict=True):
                seen[digest].append(_Image(f"{domain.name}, {name}", pid, camid))
        if copies := copies_in(domain, is_thorough=True):
            findings.add(f"{domain.name}: {line_of_copies(copies)}")
    for problem, twins in _by_problem(seen).items():
        if len(twins) > _FEW * fewest:
            findings.add(f"{problem} ({len(twins)} such image(s), by their pixels at {size[0]} x {size[1]})")


def _parts(domain: Domain) -> dict[str, Split]:
    parts = {"train": domain.train, "query": domain.query, "gallery": domain.gallery}
    return {name: part for name, part in parts.items() if part is not None and len(part)}


def _by_problem(seen: Mapping[bytes, list[_Image]]) -> dict[str, list[bytes]]:
    """Return a sentence for each kind of wrong twins -> their hashes."""
    problems = defaultdict[str, list[bytes]](list)
    for digest, images in seen.items():
        for sentence in {_problem(*pair) for pair in combinations(sorted(set(images)), 2)} - {""}:
            problems[sentence].append(digest)
    return problems


def _problem(first: _Image, second: _Image) -> str:
    """Return the fault of two images of equal pixels; empty if a data set may have them."""
    places = " and ".join(sorted({first.place, second.place}))
    kinds = {first.place.endswith(", train"), second.place.endswith(", train")}
    if len(kinds) == 2:
        return f"{places}: equal pixels in training images and in test images"
    if first.place.rpartition(", ")[0] != second.place.rpartition(", ")[0]:
        return f"{places}: equal pixels in two data sets"
    if first.pid != second.pid:
        return f"{places}: equal pixels with two identities"
    if first.camid != second.camid:
        return f"{places}: equal pixels with two cameras"
    return ""
