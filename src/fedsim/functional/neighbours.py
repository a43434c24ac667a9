"""Nearest neighbours: the k of G gallery images that are most similar to each of Q queries; D features."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedsim.functional.similarity import Distance, Similarity

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Neighbours:
    """Ranked lists."""

    index: Ints
    """[Q, k] gallery positions, most similar first, equal ones by position"""
    similarity: NDArray[np.float32]
    """[Q, k]"""


Search = Callable[[Tensor, Tensor, int], Neighbours]
"""(queries [n, D], gallery [m, D], k <= m) -> the k nearest of each query; rows have unit length, on one device.

The search may be approximate. ``scale="farthest"`` also searches for the nearest of -x, where an index may be less
exact.
"""


def nearest(query: Tensor, gallery: Tensor, k: int, distance: Distance = "cosine") -> Neighbours:
    """Find the k (at most G) nearest gallery images of each query, exactly and in the stable order.

    See :class:`fedsim.functional.similarity.Similarity` for the arguments.

    >>> import torch
    >>> nearest(torch.eye(2), torch.tensor([[0.0, 1.0], [1.0, 1.0], [1.0, 0.0]]), 2).index
    array([[2, 1],
           [0, 1]])
    """
    k = min(k, len(gallery))
    similarity = Similarity(query, gallery, distance)
    index = np.empty((len(query), k), dtype=np.int64)
    values = np.empty((len(query), k), dtype=np.float32)
    for rows in similarity.blocks:
        index[rows], values[rows] = top_of_block(similarity.block(rows), k)
    return Neighbours(index, values)


def top_of_block(similarity: Tensor, k: int) -> tuple[Ints, NDArray[np.float32]]:
    """Return the first k <= G columns of each row of ``similarity`` [b, G] in the stable order, and their values."""
    if k == 0:
        return np.empty((len(similarity), 0), dtype=np.int64), np.empty((len(similarity), 0), dtype=np.float32)
    values, index = similarity.topk(k, dim=1)
    index = index.sort(dim=1).values
    values, order = similarity.gather(1, index).sort(dim=1, descending=True, stable=True)
    index = index.gather(1, order)
    # topk does not define its choice among images that are as similar as the last one
    crowded = ((similarity >= values[:, -1:]).sum(1) > k).nonzero().flatten()
    for row in crowded.tolist():
        values[row], index[row] = (part[:k] for part in similarity[row].sort(descending=True, stable=True))
    return index.cpu().numpy(), values.cpu().numpy()
