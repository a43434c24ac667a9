"""From ranks to scores: CMC, mAP (rectangular and trapezoidal), mINP; and the obvious way to get the ranks.

Q queries, G gallery images. The order of a query's gallery is (similarity, then gallery index), that is a stable sort,
without junk (:class:`RetrievalLabels`). The fast way to the same ranks is in :mod:`fedsim.evaluation.counting`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedsim.evaluation.labels import Ints, RetrievalLabels

__all__ = ["MAX_RANK", "QueryScores", "Ranking", "average_scores", "positive_ranks", "score_ranks"]

MAX_RANK = 50
"""Length of the CMC curve."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Ranking:
    """Scores of one query/gallery pair of sets, as fractions of 1."""

    rank1: float
    rank5: float
    rank10: float
    mAP: float  # noqa: N815 - the field's name for it
    """rectangular average precision, mean over valid queries"""
    mAP_trapezoid: float  # noqa: N815 - as above
    """Oxford / Market-1501 code's average precision (paper 003 reports this one)"""
    mINP: float  # noqa: N815 - as above
    """mean inverse negative penalty (Ye et al., TPAMI 2021)"""
    num_valid: int
    """queries with at least one match that is not junk"""
    num_queries: int
    cmc: tuple[float, ...] = ()
    """share of queries whose first match is among the first 1, 2, ... images"""


@dataclass(frozen=True)
class QueryScores:
    """Scores of single queries, in float64; a query without a match that counts has 0 everywhere."""

    first: Ints
    """[Q] rank of the first match, from 1; 0: there is none"""
    precision: Floats
    """[Q] rectangular average precision"""
    precision_trapezoid: Floats
    """[Q]"""
    inverse_penalty: Floats
    """[Q] number of matches / rank of the last one"""
    expected_hits: Floats | None = None
    """[Q, MAX_RANK] chance of a match among the first 1, 2, ... images, where galleries are drawn at random"""

    @property
    def hits(self) -> Floats:
        """[Q, MAX_RANK] 1 where the first match is among the first 1, 2, ... images, or the chance of it."""
        if self.expected_hits is not None:
            return self.expected_hits
        valid = self.first[:, None] > 0
        return (valid & (self.first[:, None] <= np.arange(1, MAX_RANK + 1))).astype(np.float64)

    def to_table(self) -> Floats:
        """Return all numbers as [Q, 4] or [Q, 4 + MAX_RANK], for exchange between ranks."""
        columns = [self.first.astype(np.float64), self.precision, self.precision_trapezoid, self.inverse_penalty]
        table = np.stack(columns, axis=1)
        return table if self.expected_hits is None else np.concatenate([table, self.expected_hits], axis=1)

    @staticmethod
    def from_table(table: Floats) -> QueryScores:
        """Undo :meth:`to_table`."""
        hits = table[:, 4:] if table.shape[1] > 4 else None
        return QueryScores(table[:, 0].astype(np.int64), table[:, 1], table[:, 2], table[:, 3], hits)


def positive_ranks(similarity: NDArray[np.float32], labels: RetrievalLabels) -> list[Ints]:
    """Return for each query the ranks (from 1, ascending) of its matches among the gallery images that are not junk.

    The obvious version: it sorts the whole gallery.

    Args:
        similarity: [Q, G] larger is closer.
        labels: of the Q queries and G gallery images.

    Returns:
        Q arrays; an empty one marks a query without a valid match.

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


def score_ranks(ranks: Sequence[Ints], expected_hits: Floats | None = None) -> QueryScores:
    """Return what the ranks of each query's matches are worth.

    With r_1 < r_2 < ... < r_m the ranks of a query's m matches: rectangular average precision mean_j j / r_j;
    trapezoidal mean_j (p_j + j / r_j) / 2, where p_j = (j - 1) / (r_j - 1), and 1 if r_j = 1; inverse negative penalty
    m / r_m.

    Args:
        ranks: per query the ascending ranks of its matches, see :func:`positive_ranks`.
        expected_hits: see :class:`QueryScores`.

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
    return QueryScores(first, scores[0], scores[1], scores[2], expected_hits)


def average_scores(scores: QueryScores, invalid_as_zero: bool = False) -> Ranking:
    """Average the scores of the queries with a match that counts.

    Args:
        scores: of all queries.
        invalid_as_zero: count queries without a match as zeros, as the code of paper 003 does.

    Returns:
        the scores; NaN where nothing can be averaged.

    >>> average_scores(score_ranks([np.array([2, 4, 6]), np.array([], dtype=np.int64)])).mAP
    0.5
    """
    valid = scores.first > 0
    count = len(valid) if invalid_as_zero else int(valid.sum())
    if count == 0:
        nan = float("nan")
        return Ranking(nan, nan, nan, nan, nan, nan, 0, len(valid), (nan,) * MAX_RANK)
    columns = (scores.precision, scores.precision_trapezoid, scores.inverse_penalty)
    mean_ap, mean_trapezoid, mean_inp = (float(column[valid].sum()) / count for column in columns)
    cmc = tuple((scores.hits[valid].sum(axis=0) / count).tolist())
    return Ranking(cmc[0], cmc[4], cmc[9], mean_ap, mean_trapezoid, mean_inp, int(valid.sum()), len(valid), cmc)
