"""Ranking metrics of re-identification: CMC, mAP (rectangular and trapezoidal), mINP.

Q queries, G gallery images, D features. The order of the gallery is (similarity, then gallery index), that is a stable
sort; gallery images of the query's identity in the query's camera are junk, as is identity -1 (Market-1501's rules).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["JUNK", "Ranking", "num_valid_queries", "positive_ranks", "rank_features", "score_ranks"]

JUNK = -1
"""Identity of gallery images that count neither as right nor as wrong."""

_BLOCK = 256  # queries per matrix product: fixed, because the number of rows can change the bits of a product

Ints = NDArray[np.int64]


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
    """queries with at least one match that is not junk; only they are averaged"""
    num_queries: int


def positive_ranks(
    similarity: NDArray[np.float32],
    query_pids: Ints,
    query_camids: Ints,
    gallery_pids: Ints,
    gallery_camids: Ints,
    camera_aware: bool = True,
    own: Ints | None = None,
) -> list[Ints]:
    """Return for each query the ranks (from 1, ascending) of its matches among the gallery images that are not junk.

    Args:
        similarity: [Q, G] float32, larger is closer.
        query_pids: [Q] identities.
        query_camids: [Q] cameras.
        gallery_pids: [G].
        gallery_camids: [G].
        camera_aware: whether the same identity in the same camera is junk.
        own: [Q] gallery position of the query image itself, where the gallery contains it: junk in any case.

    Returns:
        Q arrays; an empty one marks a query without a valid match.

    >>> d = np.array([[0.1, 0.2, 0.3, 0.4, 0.5, 0.6]], dtype=np.float32)
    >>> positive_ranks(-d, np.array([1]), np.array([0]), np.array([2, 1, 3, 1, 4, 1]), np.array([1, 1, 1, 2, 2, 3]))
    [array([2, 4, 6])]
    """
    order = np.argsort(-similarity, axis=1, kind="stable")
    match = gallery_pids[order] == query_pids[:, None]
    junk = gallery_pids[order] == JUNK
    if camera_aware:
        junk |= match & (gallery_camids[order] == query_camids[:, None])
    if own is not None:
        junk |= order == own[:, None]
    rank = np.cumsum(~junk, axis=1)
    return [row[good] for row, good in zip(rank, match & ~junk, strict=True)]


def score_ranks(ranks: Sequence[Ints]) -> Ranking:
    """Average the scores of the valid queries, in float64.

    Args:
        ranks: per query the ascending ranks of its matches, see :func:`positive_ranks`.

    Returns:
        the scores; NaN where no query is valid.

    >>> score_ranks([np.array([2, 4, 6])]).mAP
    0.5
    """
    valid = [r for r in ranks if len(r)]
    if not valid:
        nan = float("nan")
        return Ranking(nan, nan, nan, nan, nan, nan, 0, len(ranks))
    first = np.array([r[0] for r in valid])
    rectangular, trapezoid, penalty = [], [], []
    for r in valid:
        j = np.arange(1, len(r) + 1)
        precision = j / r
        before = np.where(r == 1, 1.0, (j - 1) / np.maximum(r - 1, 1))
        rectangular.append(precision.mean())
        trapezoid.append((0.5 * (before + precision)).mean())
        penalty.append(len(r) / r[-1])
    rank1, rank5, rank10 = (float(np.mean(first <= k)) for k in (1, 5, 10))
    mean_ap, mean_trapezoid, mean_inp = (float(np.mean(scores)) for scores in (rectangular, trapezoid, penalty))
    return Ranking(rank1, rank5, rank10, mean_ap, mean_trapezoid, mean_inp, len(valid), len(ranks))


def rank_features(
    query: Tensor,
    gallery: Tensor,
    query_pids: Ints,
    query_camids: Ints,
    gallery_pids: Ints,
    gallery_camids: Ints,
    camera_aware: bool = True,
    own: Ints | None = None,
) -> Ranking:
    """Score features by cosine similarity, in float32 whatever precision the model ran in.

    Args:
        query: [Q, D].
        gallery: [G, D].
        query_pids: [Q].
        query_camids: [Q].
        gallery_pids: [G].
        gallery_camids: [G].
        camera_aware: see :func:`positive_ranks`.
        own: see :func:`positive_ranks`.
    """
    query, gallery = F.normalize(query.float()), F.normalize(gallery.float())
    ranks: list[Ints] = []
    for start in range(0, len(query), _BLOCK):
        block = slice(start, start + _BLOCK)
        with torch.autocast(query.device.type, enabled=False):
            similarity = (query[block] @ gallery.T).cpu().numpy()
        labels = (query_pids[block], query_camids[block], gallery_pids, gallery_camids)
        ranks += positive_ranks(similarity, *labels, camera_aware, None if own is None else own[block])
    return score_ranks(ranks)


def num_valid_queries(
    query_pids: Ints,
    query_camids: Ints,
    gallery_pids: Ints,
    gallery_camids: Ints,
    camera_aware: bool = True,
    own: Ints | None = None,
) -> int:
    """Count the queries with at least one match that is not junk; arguments as for :func:`positive_ranks`.

    >>> num_valid_queries(np.array([1, 2]), np.array([0, 0]), np.array([1, 2]), np.array([1, 0]))
    1
    """
    count = 0
    for row, (pid, camid) in enumerate(zip(query_pids, query_camids, strict=True)):
        match = (gallery_pids == pid) & (pid != JUNK)
        if camera_aware:
            match &= gallery_camids != camid
        if own is not None:
            match[own[row]] = False
        count += bool(match.any())
    return count
