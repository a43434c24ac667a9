"""Exact ranks by counting: no sort, no full matrix.

The rank of a match at gallery position p with similarity s is 1 + the number of gallery images before it in the order
(similarity, then gallery index): of those at positions below p all with similarity >= s, of those above p all with
similarity > s. Junk has similarity -inf.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.evaluation.labels import Ints, RetrievalLabels

__all__ = ["count_on_device", "count_ranks", "mask_junk"]

_FEW = 512
"""Candidates that are sorted quicker than counted."""


def count_ranks(similarity: Tensor, labels: RetrievalLabels) -> list[Ints]:
    """Return the ranks of all matches: the fast version of :func:`fedsim.evaluation.ranking.positive_ranks`.

    Args:
        similarity: [b, G] float32, finite, larger is closer, on a CPU or GPU. Junk is overwritten with -inf.
        labels: of these b queries and the G gallery images.

    Returns:
        b arrays of ascending ranks, from 1.

    >>> labels = RetrievalLabels(np.array([1]), np.array([0]), np.array([2, 1, 3, 1]), np.array([1, 1, 1, 2]))
    >>> count_ranks(torch.tensor([[0.9, 0.8, 0.7, 0.8]]), labels)
    [array([2, 3])]
    """
    positives = mask_junk(similarity, labels)
    if not similarity.is_cpu:
        return count_on_device(similarity, positives)
    return [_count_in_row(row, good) for row, good in zip(similarity.numpy(), positives, strict=True)]


def mask_junk(similarity: Tensor, labels: RetrievalLabels) -> list[Ints]:
    """Overwrite the similarity of junk with -inf.

    Args:
        similarity: [b, G].
        labels: of these b queries and the G gallery images.

    Returns:
        per query the ascending gallery positions of its matches that count.
    """
    device = similarity.device
    sorted_out = [labels.positives_and_junk(q) for q in range(len(labels.query_pids))]
    similarity[:, torch.from_numpy(labels.junk_columns).to(device)] = -torch.inf
    rows = np.repeat(np.arange(len(sorted_out)), [len(junk) for _, junk in sorted_out])
    columns = np.concatenate([junk for _, junk in sorted_out]) if sorted_out else rows
    similarity[torch.from_numpy(rows).to(device), torch.from_numpy(columns).to(device)] = -torch.inf
    return [good for good, _ in sorted_out]


def _count_in_row(row: NDArray[np.float32], positives: Ints) -> Ints:
    """Ranks of the gallery positions ``positives`` (ascending) by similarity ``row`` [G]."""
    if len(positives) == 0:
        return positives
    candidates = np.flatnonzero(row >= row[positives].min())  # nothing below the last match can change a rank
    if len(candidates) <= _FEW:
        order = np.argsort(-row[candidates], kind="stable")
        is_match = np.isin(candidates[order], positives, assume_unique=True)
        return np.flatnonzero(is_match) + 1
    ranks = [
        1 + np.count_nonzero(row[:p] >= row[p]) + np.count_nonzero(row[p + 1 :] > row[p]) for p in positives.tolist()
    ]
    return np.sort(np.array(ranks, dtype=np.int64))


def count_on_device(similarity: Tensor, positives: list[Ints]) -> list[Ints]:
    """Count in whole blocks, for devices where many small steps are slow; waits for the device twice per block.

    Args:
        similarity: [b, G] float32, junk at -inf.
        positives: b arrays of ascending gallery positions.
    """
    counts = [len(good) for good in positives]
    most = max(counts, default=0)
    if most == 0:
        return [good.copy() for good in positives]
    device = similarity.device
    padded = np.zeros((len(positives), most), dtype=np.int64)
    for row, good in zip(padded, positives, strict=True):
        row[: len(good)] = good
    index = torch.from_numpy(padded).to(device)
    scores = similarity.gather(1, index)
    above = torch.stack([(similarity > scores[:, j, None]).sum(1) for j in range(most)], dim=1)
    at_least = torch.stack([(similarity >= scores[:, j, None]).sum(1) for j in range(most)], dim=1)
    ranks = 1 + above
    # ties are rare: only for them the order of the gallery counts
    for q, j in (at_least - above > 1).nonzero().tolist():
        if j < counts[q]:
            p = int(padded[q, j])
            ranks[q, j] += (similarity[q, :p] == scores[q, j]).sum()
    rows = ranks.cpu().numpy()
    return [np.sort(row[:count]) for row, count in zip(rows, counts, strict=True)]
