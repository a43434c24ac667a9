"""Single-gallery-shot CMC (the protocol of the first CUHK03 papers): the gallery holds one random image per identity.

Toolkits draw such galleries ten times from a global random generator and average. The expectation is known exactly.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedsim.evaluation.labels import RetrievalLabels
from fedsim.evaluation.ranking import MAX_RANK

__all__ = ["expected_hits"]


def expected_hits(similarity: NDArray[np.float32], labels: RetrievalLabels) -> NDArray[np.float64]:
    """Return the chance that the match drawn into a random gallery is among its first 1, 2, ... images.

    Let identity i have n_i images that are not junk, c_i of them before the drawn match. It stands before the match
    with chance c_i / n_i, independently of the others, so the number of identities before the match is a sum of such
    coin throws (a Poisson binomial variable). The match itself is drawn uniformly from the query's matches.

    Args:
        similarity: [Q, G] larger is closer; equal ones are ordered by gallery index.
        labels: of the Q queries and G gallery images.

    Returns:
        [Q, MAX_RANK] float64; zeros for queries without a match.

    >>> labels = RetrievalLabels(np.array([1]), np.array([0]), np.array([2, 1, 2]), np.array([1, 1, 1]))
    >>> expected_hits(np.array([[0.9, 0.5, 0.1]], dtype=np.float32), labels)[0, :3]
    array([0.5, 1. , 1. ])
    """
    hits = np.zeros((len(similarity), MAX_RANK))
    junk = np.zeros(len(labels.gallery_pids), dtype=bool)
    junk[labels.junk_columns] = True
    _, identity = np.unique(labels.gallery_pids, return_inverse=True)
    for q, row in enumerate(similarity):
        good, bad = labels.positives_and_junk(q)
        if len(good):
            counts = ~junk
            counts[bad] = False
            hits[q] = _hits_of(row, counts, good, identity)
    return hits


def _hits_of(
    row: NDArray[np.float32], counts: NDArray[np.bool_], good: NDArray[np.int64], identity: NDArray[np.int64]
) -> NDArray[np.float64]:
    """One query; ``identity`` numbers the gallery's identities from 0."""
    in_gallery = np.bincount(identity[counts], minlength=identity.max() + 1)
    own = identity[good[0]]
    hits = np.zeros(MAX_RANK)
    position = np.arange(len(row))
    for p in good:
        before = counts & ((row > row[p]) | ((row == row[p]) & (position < p)))
        chance = np.bincount(identity[before], minlength=len(in_gallery)) / np.maximum(in_gallery, 1)
        chance[own] = 0  # only one of the query's matches is drawn
        hits += np.cumsum(_number_of_heads(chance[chance > 0]))
    return hits / len(good)


def _number_of_heads(chances: NDArray[np.float64]) -> NDArray[np.float64]:
    """Probabilities of 0, 1, ..., MAX_RANK - 1 heads when coins with these chances are thrown."""
    heads = np.zeros(MAX_RANK)
    heads[0] = 1.0
    for chance in chances:
        heads[1:] = heads[1:] * (1 - chance) + heads[:-1] * chance
        heads[0] *= 1 - chance
    return heads
