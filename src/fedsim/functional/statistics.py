"""Statistics of what K clients have sent: pooled moments (law of total variance), and robust ones of vectors [K, n]."""

from __future__ import annotations

from torch import Tensor


def second_moments(mean: Tensor, variance: Tensor) -> Tensor:
    """Return ``E[x^2] = var + mean^2``, which a client uploads in place of its variance; all of one shape."""
    return variance + mean.square()


def central_variance(mean: Tensor, second: Tensor) -> Tensor:
    """Return the pooled variance ``E[x^2] - E[x]^2``, at least 0, from weighted means of both moments.

    >>> import torch
    >>> a, b = torch.tensor([0.0, 2.0]), torch.tensor([4.0, 6.0])  # two clients of equal size
    >>> mean = (a.mean() + b.mean()) / 2
    >>> second = (second_moments(a.mean(), a.var(correction=0)) + second_moments(b.mean(), b.var(correction=0))) / 2
    >>> central_variance(mean, second) == torch.cat([a, b]).var(correction=0)
    tensor(True)
    """
    return (second - mean.square()).clamp_min(0.0)


def coordinate_median(vectors: Tensor) -> Tensor:
    """Return the median of each coordinate of [K, n] float32: [n]; of an even K the mean of the middle two values.

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
