"""Medians, trimmed means and scores of the vectors of K clients, some of which may be bad."""

from __future__ import annotations

from torch import Tensor


def coordinate_median(vectors: Tensor) -> Tensor:
    """Return the median of each coordinate of [K, n] float32: [n]; for an even K the mean of the middle two values.

    >>> import torch
    >>> coordinate_median(torch.tensor([[1.0, 9.0], [2.0, -9.0], [100.0, 0.0]]))
    tensor([2., 0.])
    """
    count = len(vectors)
    ordered = vectors.sort(dim=0).values
    return ordered[(count - 1) // 2 : count // 2 + 1].double().mean(0).float()


def trimmed_mean(vectors: Tensor, cut: int) -> Tensor:
    """Return the mean of each coordinate of [K, n] float32, without its ``cut`` < K / 2 largest and smallest: [n].

    >>> import torch
    >>> trimmed_mean(torch.tensor([[1.0], [2.0], [4.0], [100.0]]), 1)
    tensor([3.])
    """
    ordered = vectors.sort(dim=0).values
    return ordered[cut : len(vectors) - cut].double().mean(0).float()


def krum_scores(distances: Tensor, num_bad: int) -> Tensor:
    """Return each client's sum of squared distances to its K - f - 2 nearest others, [K] float64.

    ``distances`` are [K, K] float64, squared; ``num_bad`` is f, at most K - 3.

    >>> import torch
    >>> x = torch.tensor([0.0, 1.0, 2.0, 50.0])
    >>> krum_scores((x[:, None] - x).square(), 1).tolist()
    [1.0, 1.0, 1.0, 2304.0]
    """
    nearest = len(distances) - num_bad - 2
    return distances.sort(dim=1).values[:, 1 : nearest + 1].sum(1)
