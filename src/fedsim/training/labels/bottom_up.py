"""Bottom-up clustering: every image begins as a cluster, and the nearest clusters merge, some at a time.

Y. Lin, X. Dong, L. Zheng, Y. Yan, Y. Yang, "A Bottom-Up Clustering Approach to Unsupervised Person Re-identification",
AAAI 2019. n images, C clusters, D features.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fedsim.functional.neighbours import top_of_block
from fedsim.functional.similarity import Similarity

_CANDIDATES = 50
_ROWS = 256
"""Images whose similarities to all others are in memory at a time."""


def merge_clusters(
    features: Tensor, labels: Tensor, num_merges: int, size_penalty: float = 0.003, candidates: int = _CANDIDATES
) -> Tensor:
    """Merge the nearest pairs of clusters, one after the other, in memory that grows with n.

    The distance of two clusters is the squared one of their nearest images, by features of unit length, plus a penalty
    on their sizes: ``min |f_a - f_b|^2 + lambda (|A| + |B|)``. Sizes and distances are those before the first merge; a
    merged cluster can merge again through any of its parts.

    Each cluster can merge with its ``candidates`` nearest clusters. The result is exact unless more clusters than these
    become one: farther clusters would be next after all candidates have joined.

    Args:
        features: [n, D].
        labels: [n] int64 cluster of each image, 0 .. C - 1, on the CPU.
        num_merges: number of merges; there are fewer if candidates run out.
        size_penalty: lambda.
        candidates: nearest clusters with which each cluster can merge.

    Returns:
        [n] int64 new cluster of each image, numbered by the first cluster in each.

    >>> features = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]])
    >>> merge_clusters(features, torch.arange(3), num_merges=1).tolist()
    [0, 0, 1]
    """
    neighbours, distance = _nearest_clusters(features, labels, size_penalty, candidates)
    num = len(neighbours)
    order = distance.flatten().argsort(stable=True).tolist()
    first, second = torch.arange(num).repeat_interleave(neighbours.shape[1]).tolist(), neighbours.flatten().tolist()
    parents = list(range(num))
    for edge in order:
        if num_merges <= 0:
            break
        a, b = sorted((_root(parents, first[edge]), _root(parents, second[edge])))
        if a != b:
            parents[b] = a
            num_merges -= 1
    roots = torch.tensor([_root(parents, cluster) for cluster in range(num)])
    merged: Tensor = roots.unique(return_inverse=True)[1][labels]
    return merged


def _root(parents: list[int], cluster: int) -> int:
    """Return the root of a cluster, and shorten the path to it."""
    while parents[cluster] != cluster:
        parents[cluster] = parents[parents[cluster]]
        cluster = parents[cluster]
    return cluster


def _nearest_clusters(features: Tensor, labels: Tensor, size_penalty: float, count: int) -> tuple[Tensor, Tensor]:
    """Return the nearest other clusters of each cluster [C, k] and their distances, with size penalty, on the CPU."""
    sizes, device = labels.bincount(), features.device
    by_cluster = features[labels.argsort(stable=True).to(device)]
    similarity, widths = Similarity(by_cluster, by_cluster), sizes.to(device)
    num, penalties = len(sizes), size_penalty * widths
    neighbours, distance = [], []
    for clusters, rows in _blocks(sizes):
        numbers = torch.arange(clusters.start, clusters.stop, device=device)
        # of neighbours in memory: scatter_reduce, which takes any order, has no deterministic form on GPUs
        of_clusters = torch.segment_reduce(similarity.block(rows), "max", lengths=widths[clusters])
        between = torch.segment_reduce(of_clusters.T.contiguous(), "max", lengths=widths).T
        block = (2 - 2 * between).clamp_min(0) + penalties + penalties[numbers][:, None]
        block[numbers - clusters.start, numbers] = torch.inf
        index, values = top_of_block(-block, min(count, num - 1))
        neighbours.append(torch.from_numpy(index))
        distance.append(torch.from_numpy(-values))
    return torch.cat(neighbours), torch.cat(distance)


def _blocks(sizes: Tensor) -> Iterator[tuple[slice, slice]]:
    """Cut into blocks of whole clusters with up to ``_ROWS`` images, or a single cluster: (clusters, their images)."""
    first, start, end = 0, 0, 0
    for cluster, size in enumerate(sizes.tolist()):
        if end > start and end + size - start > _ROWS:
            yield slice(first, cluster), slice(start, end)
            first, start = cluster, end
        end += size
    yield slice(first, len(sizes)), slice(start, end)
