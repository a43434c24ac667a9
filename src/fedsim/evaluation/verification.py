"""Verification: do two images show the same identity? ROC points over all pairs of Q queries and G gallery images.

A threshold accepts all pairs with a similarity >= it, so equal similarities are accepted together. Pairs count by the
rules of ranking (:class:`fedsim.evaluation.ranking.RetrievalLabels`): a match is a positive pair, junk is none, all
others are negative, also those of queries without a match. The definition is that of T. Fawcett, "An introduction to
ROC analysis", Pattern Recognition Letters 2006.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.core.transfer import send
from fedsim.evaluation.backends import mask_junk
from fedsim.evaluation.ranking import Ints, RetrievalLabels
from fedsim.functional.similarity import Distance, Similarity

RATES = {"1e-2": 1e-2, "1e-3": 1e-3, "1e-4": 1e-4}
"""False positive rates at which true positive rates are given, by name."""
Blocks = Iterable[tuple[slice, Tensor]]

_PAIRS = 2**20  # pairs that are counted at once


@dataclass(frozen=True)
class PairCounts:
    """Accepted pairs at each similarity of a positive pair; other thresholds accept no more positive pairs."""

    thresholds: NDArray[np.float32]
    """[T] different similarities of positive pairs, descending"""
    true_positives: Ints
    """[T] positive pairs with a similarity >= the threshold"""
    false_positives: Ints
    """[T] negative pairs with a similarity >= the threshold"""
    num_positives: int
    num_negatives: int

    def true_positive_rate(self, most: float) -> float:
        """Return the largest true positive rate of all thresholds with a false positive rate <= ``most``.

        It is 0 if each threshold that accepts a positive pair has a larger one, and NaN without positive or without
        negative pairs.

        >>> counts = PairCounts(np.float32([0.9, 0.5]), np.array([1, 2]), np.array([0, 3]), 2, 100)
        >>> counts.true_positive_rate(0.01), counts.true_positive_rate(0.03)
        (0.5, 1.0)
        """
        if not self.num_positives or not self.num_negatives:
            return float("nan")
        is_allowed = self.false_positives / self.num_negatives <= most
        return int(self.true_positives[is_allowed].max(initial=0)) / self.num_positives


def count_pairs(blocks: Callable[[], Blocks], labels: RetrievalLabels) -> PairCounts:
    """Count accepted pairs in two passes over blocks of (queries, their similarities [b, G] float32, finite).

    The similarities are comparable between queries, as those of :func:`pair_blocks`; each call of ``blocks`` gives all
    of them, on a CPU or GPU. They are overwritten. The first pass keeps the similarities of positive pairs, the second
    counts negative pairs between them, in int64: memory grows with the number of positive pairs and with one block.

    >>> labels = RetrievalLabels(np.array([1]), np.array([0]), np.array([1, 2, 1, -1]), np.array([1, 1, 2, 1]))
    >>> counts = count_pairs(lambda: [(slice(0, 1), torch.tensor([[0.9, 0.5, 0.5, 0.7]]))], labels)
    >>> counts.true_positives, counts.false_positives, counts.num_negatives
    (array([1, 2]), array([0, 1]), 1)
    """
    of_pairs = [np.zeros(0, dtype=np.float32)]
    for rows, block in blocks():
        of_pairs.append(block[_positive_pairs(block, labels.take(rows))].cpu().numpy())
    thresholds, counts = np.unique(np.concatenate(of_pairs), return_counts=True)
    false_positives, num_negatives = np.zeros(len(thresholds), dtype=np.int64), 0
    for rows, block in blocks():
        block[_positive_pairs(block, labels.take(rows))] = -torch.inf  # below all thresholds, like junk
        for part in block.flatten().split(_PAIRS):
            pairs = np.sort(part.cpu().numpy())  # sorts 15 times as fast as torch, and as torch counts unsorted pairs
            false_positives += len(pairs) - np.searchsorted(pairs, thresholds)
            num_negatives += len(pairs) - int(np.searchsorted(pairs, np.float32(-np.inf), side="right"))
    return PairCounts(thresholds[::-1], counts[::-1].cumsum(), false_positives[::-1], int(counts.sum()), num_negatives)


def pair_blocks(query: Tensor, gallery: Tensor, distance: Distance = "cosine") -> Iterator[tuple[slice, Tensor]]:
    """Yield (queries, similarities [b, G] float32) that are comparable between queries.

    ``cosine``: as :class:`fedsim.functional.similarity.Similarity`, also for errors. ``euclidean``: -d^2 / 2, where
    Similarity leaves out the query's own term, which changes no ranking.
    """
    for rows, block in Similarity(query, gallery, distance):
        if distance == "euclidean":
            block -= query[rows].float().square().sum(1, keepdim=True) / 2
        yield rows, block


def _positive_pairs(block: Tensor, labels: RetrievalLabels) -> tuple[Tensor, ...]:
    """Overwrite junk in ``block`` [b, G] with -inf; return rows and columns of its positive pairs."""
    positives = mask_junk(block, labels)
    rows = np.repeat(np.arange(len(positives)), [len(good) for good in positives])
    columns = np.concatenate([*positives, rows[:0]])
    return tuple(send(torch.from_numpy(np.stack([rows, columns])), block.device))
