"""The definition of ranking: matching images, their ranks, and the scores of ranks (CMC, mAP, mINP).

Q queries, G gallery images. A query's gallery is sorted by similarity, equal images by gallery index (a stable sort),
and junk is left out (:class:`RetrievalLabels`). :mod:`fedsim.evaluation.backends` finds the same ranks faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fedsim.core.metrics import OF_PRECISION, OF_RANKS

JUNK = -1
"""Identity of gallery images that count neither as right nor as wrong (Market-1501's convention)."""
MAX_RANK = 50
"""Length of the CMC curve."""
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class RetrievalLabels:
    """Identities and cameras of Q queries and G gallery images, and the rules that separate matches from junk.

    A gallery image is a *match* if it shows the query's identity. It is *junk*, and left out of the ranked list, if its
    identity is in ``junk_pids``, if it is a match from the query's own camera (``camera_aware``), or if it is the query
    image itself (``own``). All other images, distractors included, are wrong answers. Raises ValueError if lengths do
    not fit.

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
    """[Q] position of each query in the gallery, -1 if it is not there; None: no query is in the gallery"""

    def __post_init__(self) -> None:
        """Check the lengths."""
        for name, values, owners, noun in (
            ("query_camids", self.query_camids, self.query_pids, "images"),
            ("gallery_camids", self.gallery_camids, self.gallery_pids, "images"),
            ("own", self.own, self.query_pids, "queries"),
        ):
            if values is not None and len(values) != len(owners):
                raise ValueError(f"{name}: {len(values)} values for {len(owners)} {noun}")

    @cached_property
    def _positions(self) -> dict[int, Ints]:
        """Gallery positions of each identity that is not junk, ascending."""
        order = np.argsort(self.gallery_pids, kind="stable")
        pids, starts = np.unique(self.gallery_pids[order], return_index=True)
        groups = np.split(order, starts[1:])
        return {int(p): group for p, group in zip(pids, groups, strict=False) if p not in self.junk_pids}

    @cached_property
    def is_junk(self) -> Bools:
        """[G] whether the image is junk for every query."""
        return np.isin(self.gallery_pids, self.junk_pids)

    @property
    def junk_columns(self) -> Ints:
        """Gallery positions that are junk for every query, ascending."""
        return np.flatnonzero(self.is_junk)

    def positives_and_junk(self, query: int) -> tuple[Ints, Ints]:
        """Return the gallery positions of a query's matches and of its own junk, both ascending."""
        shown = self._positions.get(int(self.query_pids[query]), _NONE)  # images of the query's identity
        junk = np.zeros(len(shown), dtype=bool)
        if self.camera_aware:
            junk |= self.gallery_camids[shown] == self.query_camids[query]
        if self.own is None:
            return shown[~junk], shown[junk]
        own_position = self.own[query : query + 1]
        junk |= shown == own_position
        return shown[~junk], np.union1d(shown[junk], own_position[own_position >= 0])

    @cached_property
    def num_valid(self) -> int:
        """Number of queries with at least one match."""
        return sum(len(self.positives_and_junk(q)[0]) > 0 for q in range(len(self.query_pids)))

    def take(self, queries: list[int] | Ints | slice, gallery: Ints | None = None) -> RetrievalLabels:
        """Return the labels of some queries and of some gallery images (positions; None: all)."""
        places = None if self.own is None else self.own[queries]
        part = replace(self, query_pids=self.query_pids[queries], query_camids=self.query_camids[queries], own=places)
        if gallery is None:
            vars(part).update(_positions=self._positions, is_junk=self.is_junk)  # cached; the gallery is the same
            return part
        assert self.own is None, "a query's own position is unknown in a part of the gallery"
        return replace(part, gallery_pids=self.gallery_pids[gallery], gallery_camids=self.gallery_camids[gallery])

    def why_no_match(self) -> str:
        """Return the rule that leaves no query with a match, as a clause of a message."""
        is_present = np.isin(self.query_pids, self.gallery_pids)
        if not is_present.any():
            return "no identity of the queries is in the gallery"
        if np.isin(self.query_pids[is_present], self.junk_pids).all():
            junk = ", ".join(map(str, self.junk_pids))
            return f"the only identities that queries and gallery share are junk ({junk})"
        if self.camera_aware and replace(self, camera_aware=False).num_valid:
            return "all matches are from the query's own camera; set camera_aware to false to count them"
        return "the only match of each query is the query image itself"


_NONE = np.array([], dtype=np.int64)


def positive_ranks(similarity: NDArray[np.float32], labels: RetrievalLabels) -> list[Ints]:
    """Return the ranks of each query's matches (from 1, ascending). The obvious version: it sorts the whole gallery.

    ``similarity`` is [Q, G], larger is closer. A query without a match gets an empty array.

    >>> d = np.array([[0.1, 0.2, 0.3, 0.4, 0.5, 0.6]], dtype=np.float32)
    >>> gallery_pids, gallery_camids = np.array([2, 1, 3, 1, 4, 1]), np.array([1, 1, 1, 2, 2, 3])
    >>> positive_ranks(-d, RetrievalLabels(np.array([1]), np.array([0]), gallery_pids, gallery_camids))
    [array([2, 4, 6])]
    """
    order = np.argsort(-similarity, axis=1, kind="stable")
    match = labels.gallery_pids[order] == labels.query_pids[:, None]
    junk = np.isin(labels.gallery_pids[order], labels.junk_pids)
    if labels.camera_aware:
        junk |= match & (labels.gallery_camids[order] == labels.query_camids[:, None])
    if labels.own is not None:
        junk |= order == labels.own[:, None]
    rank = np.cumsum(~junk, axis=1)
    return [row[good] for row, good in zip(rank, match & ~junk, strict=True)]


@dataclass(frozen=True)
class Ranking:
    """Mean scores of one set of queries and gallery images, as fractions of 1."""

    mAP: float  # noqa: N815 - the field's name for it
    """rectangular average precision, mean over valid queries"""
    mAP_trapezoid: float  # noqa: N815 - as above
    """average precision as in the code of Oxford and Market-1501 (paper 003 reports this one)"""
    mINP: float  # noqa: N815 - as above
    """mean inverse negative penalty (Ye et al., TPAMI 2021)"""
    num_valid: int
    """queries with at least one match"""
    num_queries: int
    cmc: tuple[float, ...]
    """share of queries whose first match is among the first 1, 2, ... images"""

    @property
    def rank1(self) -> float:
        """Share of queries whose first image is a match."""
        return self.cmc[0]

    @property
    def rank5(self) -> float:
        """Share of queries with a match among the first five images."""
        return self.cmc[4]

    @property
    def rank10(self) -> float:
        """Share of queries with a match among the first ten images."""
        return self.cmc[9]

    @property
    def metrics(self) -> dict[str, float]:
        """Name of each metric of retrieval -> its value."""
        ranks = {name: self.cmc[rank - 1] for rank, name in OF_RANKS.items()}
        return ranks | {name: getattr(self, name) for name in OF_PRECISION}


@dataclass(frozen=True)
class QueryScores:
    """Scores of single queries, in float64; a query without a match has 0 everywhere."""

    first: Ints
    """[Q] rank of the first match, from 1; 0: there is none"""
    precision: Floats
    """[Q] rectangular average precision"""
    precision_trapezoid: Floats
    """[Q] trapezoidal average precision"""
    inverse_penalty: Floats
    """[Q] number of matches / rank of the last one"""
    expected_hits: Floats | None = None
    """[Q, MAX_RANK] chance of a match among the first 1, 2, ... images, if galleries are drawn at random"""

    @property
    def hits(self) -> Floats:
        """[Q, MAX_RANK] 1 where the first match is among the first 1, 2, ... images, or the chance of it."""
        if self.expected_hits is not None:
            return self.expected_hits
        valid = self.first[:, None] > 0
        return (valid & (self.first[:, None] <= np.arange(1, MAX_RANK + 1))).astype(np.float64)

    def to_table(self) -> Floats:
        """Return all numbers as [Q, COLUMNS] or [Q, COLUMNS + MAX_RANK], for exchange between ranks."""
        columns = [getattr(self, field.name) for field in fields(self) if field.name != "expected_hits"]
        table = np.stack(columns, axis=1, dtype=np.float64)
        return table if self.expected_hits is None else np.concatenate([table, self.expected_hits], axis=1)

    @staticmethod
    def from_table(table: Floats) -> QueryScores:
        """Undo :meth:`to_table`."""
        first, *scores = table.T[:COLUMNS]
        hits = table[:, COLUMNS:] if table.shape[1] > COLUMNS else None
        return replace(QueryScores(first.astype(np.int64), *scores), expected_hits=hits)


COLUMNS = len(fields(QueryScores)) - 1
"""of a query in a table, without the chances of a match"""


def score_ranks(ranks: Sequence[Ints], hits: Floats | None = None) -> QueryScores:
    """Return the scores of each query from the ranks r_1 < r_2 < ... < r_m of its m matches.

    Rectangular average precision is mean_j j / r_j. The trapezoidal one is mean_j (p_j + j / r_j) / 2, where
    p_j = (j - 1) / (r_j - 1), and 1 if r_j = 1. The inverse negative penalty is m / r_m.

    ``ranks`` are those of :func:`positive_ranks`, ``hits`` those of :func:`expected_hits`.

    >>> scores = score_ranks([np.array([2, 4, 6]), np.array([], dtype=np.int64)])
    >>> scores.first, scores.precision
    (array([2, 0]), array([0.5, 0. ]))
    """
    counts = np.array([len(row) for row in ranks], dtype=np.int64)
    valid = np.flatnonzero(counts)
    scores = np.zeros((3, len(ranks)))
    first = np.zeros(len(ranks), dtype=np.int64)
    if len(valid):
        flat = np.concatenate(ranks)
        counts = counts[valid]
        starts = np.cumsum(counts) - counts
        j = np.arange(1, len(flat) + 1) - np.repeat(starts, counts)
        precision = j / flat
        before = np.where(flat == 1, 1.0, (j - 1) / np.maximum(flat - 1, 1))
        first[valid] = flat[starts]
        scores[0, valid] = np.add.reduceat(precision, starts) / counts
        scores[1, valid] = np.add.reduceat((before + precision) / 2, starts) / counts
        scores[2, valid] = counts / flat[starts + counts - 1]
    return QueryScores(first, scores[0], scores[1], scores[2], hits)


def average_scores(scores: QueryScores, invalid_as_zero: bool = False) -> Ranking:
    """Average the scores of the queries with a match; NaN if there are none.

    ``invalid_as_zero``: count queries without a match as zeros, as the code of paper 003 does.

    >>> average_scores(score_ranks([np.array([2, 4, 6]), np.array([], dtype=np.int64)])).mAP
    0.5
    """
    valid = scores.first > 0
    count = len(valid) if invalid_as_zero else int(valid.sum())
    if count == 0:
        nan = float("nan")
        return Ranking(nan, nan, nan, num_valid=0, num_queries=len(valid), cmc=(nan,) * MAX_RANK)
    columns = (scores.precision, scores.precision_trapezoid, scores.inverse_penalty)
    mean_ap, mean_trapezoid, mean_inp = (float(column[valid].sum()) / count for column in columns)
    cmc = tuple((scores.hits[valid].sum(axis=0) / count).tolist())
    return Ranking(mean_ap, mean_trapezoid, mean_inp, int(valid.sum()), len(valid), cmc)


def expected_hits(similarity: NDArray[np.float32], labels: RetrievalLabels) -> Floats:
    """Return the chance of a match among the first 1, 2, ... images of a gallery with one random image per identity.

    The first CUHK03 papers score CMC like this. Toolkits draw ten such galleries and average; this is the expectation.
    A match is drawn uniformly from the query's matches. Identity i has n_i images that are not junk, c_i of them before
    the match. It stands before the match with chance c_i / n_i, independently of the others: the number of identities
    before the match is a Poisson binomial variable.

    From ``similarity`` [Q, G], larger is closer and equal ones are ordered by gallery index, to [Q, MAX_RANK] float64;
    queries without a match get zeros.

    >>> labels = RetrievalLabels(np.array([1]), np.array([0]), np.array([2, 1, 2]), np.array([1, 1, 1]))
    >>> expected_hits(np.array([[0.9, 0.5, 0.1]], dtype=np.float32), labels)[0, :3]
    array([0.5, 1. , 1. ])
    """
    hits = np.zeros((len(similarity), MAX_RANK))
    _, identity = np.unique(labels.gallery_pids, return_inverse=True)
    for q, row in enumerate(similarity):
        good, bad = labels.positives_and_junk(q)
        if len(good):
            counts = ~labels.is_junk
            counts[bad] = False
            hits[q] = _expected_hits_of_query(row, counts, good, identity)
    return hits


def _expected_hits_of_query(row: NDArray[np.float32], counts: Bools, good: Ints, identity: Ints) -> Floats:
    """Return [MAX_RANK] of one query; ``identity`` [G] numbers the gallery's identities from 0."""
    in_gallery = np.bincount(identity[counts], minlength=identity.max() + 1)
    shown = identity[good[0]]
    hits = np.zeros(MAX_RANK)
    position = np.arange(len(row))
    for p in good:
        before = counts & ((row > row[p]) | ((row == row[p]) & (position < p)))
        chance = np.bincount(identity[before], minlength=len(in_gallery)) / np.maximum(in_gallery, 1)
        chance[shown] = 0  # only one of the query's matches is drawn
        number = np.zeros(MAX_RANK)  # chances of 0, 1, ... identities before the match
        number[0] = 1.0
        for c in chance[chance > 0]:
            number[1:] = number[1:] * (1 - c) + number[:-1] * c
            number[0] *= 1 - c
        hits += np.cumsum(number)
    return hits / len(good)
