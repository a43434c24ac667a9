"""Who matches whom: identities and cameras of queries and gallery, and what does not count.

Q queries, G gallery images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

__all__ = ["JUNK", "Ints", "RetrievalLabels"]

JUNK = -1
"""Identity of gallery images that count neither as right nor as wrong (Market-1501's convention)."""

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class RetrievalLabels:
    """Identities and cameras, and the rules of which gallery images count for a query.

    A gallery image is a *match* if it shows the query's identity. It is *junk*, that is left out of the ranked list, if
    its identity is in ``junk_pids``, if it is a match from the query's own camera (``camera_aware``), or if it is the
    query image itself (``own``). All other images are wrong answers, distractors included.

    Raises:
        ValueError: if lengths do not fit.

    >>> labels = RetrievalLabels(np.array([1]), np.array([0]), np.array([1, 2, 1, -1]), np.array([0, 1, 2, 0]))
    >>> labels.positives_and_junk(0)
    (array([2]), array([0]))
    >>> labels.junk_columns
    array([3])
    """

    query_pids: Ints
    """[Q]"""
    query_camids: Ints
    """[Q]"""
    gallery_pids: Ints
    """[G]"""
    gallery_camids: Ints
    """[G]"""
    camera_aware: bool = True
    """whether the same identity in the same camera is junk"""
    junk_pids: tuple[int, ...] = (JUNK,)
    """identities whose gallery images are junk for every query"""
    own: Ints | None = None
    """[Q] where each query stands in the gallery itself, -1 where it does not; None: nowhere"""

    def __post_init__(self) -> None:
        """Check the lengths."""
        lengths = {"query_camids": len(self.query_pids), "gallery_camids": len(self.gallery_pids)}
        for name, length in lengths.items():
            if len(self.__dict__[name]) != length:
                raise ValueError(f"{name}: {len(self.__dict__[name])} values for {length} images")
        if self.own is not None and len(self.own) != len(self.query_pids):
            raise ValueError(f"own: {len(self.own)} values for {len(self.query_pids)} queries")

    @cached_property
    def _positions(self) -> dict[int, Ints]:
        """Gallery positions of each identity that is not junk, ascending."""
        order = np.argsort(self.gallery_pids, kind="stable")
        pids, starts = np.unique(self.gallery_pids[order], return_index=True)
        groups = np.split(order, starts[1:])
        return {int(p): group for p, group in zip(pids, groups, strict=False) if p not in self.junk_pids}

    @cached_property
    def junk_columns(self) -> Ints:
        """Gallery positions that are junk for every query, ascending."""
        return np.flatnonzero(np.isin(self.gallery_pids, self.junk_pids))

    def positives_and_junk(self, query: int) -> tuple[Ints, Ints]:
        """Return the gallery positions of a query's matches that count, and of those that do not, both ascending."""
        same = self._positions.get(int(self.query_pids[query]), _NONE)
        out = np.zeros(len(same), dtype=bool)
        if self.camera_aware:
            out |= self.gallery_camids[same] == self.query_camids[query]
        if self.own is None:
            return same[~out], same[out]
        own = self.own[query : query + 1]
        out |= same == own
        return same[~out], np.union1d(same[out], own[own >= 0])

    @cached_property
    def num_valid(self) -> int:
        """Number of queries with at least one match that counts."""
        return sum(len(self.positives_and_junk(q)[0]) > 0 for q in range(len(self.query_pids)))

    def take(self, queries: list[int] | Ints | slice, gallery: Ints | None = None) -> RetrievalLabels:
        """Return the labels of some queries, and of some gallery images (positions; None: all)."""
        part = replace(
            self,
            query_pids=self.query_pids[queries],
            query_camids=self.query_camids[queries],
            own=None if self.own is None else self.own[queries],
        )
        if gallery is None:
            part.__dict__["_positions"] = self._positions  # the same gallery
            part.__dict__["junk_columns"] = self.junk_columns
            return part
        assert self.own is None, "a query's own position is unknown in a part of the gallery"
        return replace(part, gallery_pids=self.gallery_pids[gallery], gallery_camids=self.gallery_camids[gallery])

    def why_no_match(self) -> str:
        """Say which rule leaves no query with a match."""
        found = np.isin(self.query_pids, self.gallery_pids)
        if not found.any():
            return "no identity of the queries is in the gallery"
        if np.isin(self.query_pids[found], self.junk_pids).all():
            return f"the only identities that queries and gallery share are junk ({_listed(self.junk_pids)})"
        if self.camera_aware and replace(self, camera_aware=False).num_valid:
            return "all matches are from the query's own camera; set camera_aware to false to count them"
        return "the only match of each query is the query image itself"


_NONE = np.array([], dtype=np.int64)


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
