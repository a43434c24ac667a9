"""Medians, trimmed means, scores and weights of the vectors of K clients, some of which may be bad."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def coordinate_median(vectors: Tensor) -> Tensor:
    """Return the median of each coordinate of [K, n] float32: [n]; for an even K the mean of the middle two values.

    >>> coordinate_median(torch.tensor([[1.0, 9.0], [2.0, -9.0], [100.0, 0.0]]))
    tensor([2., 0.])
    """
    count = len(vectors)
    ordered = vectors.sort(dim=0).values
    return ordered[(count - 1) // 2 : count // 2 + 1].double().mean(0).float()


def trimmed_mean(vectors: Tensor, cut: int) -> Tensor:
    """Return the mean of each coordinate of [K, n] float32, without its ``cut`` < K / 2 largest and smallest: [n].

    >>> trimmed_mean(torch.tensor([[1.0], [2.0], [4.0], [100.0]]), 1)
    tensor([3.])
    """
    ordered = vectors.sort(dim=0).values
    return ordered[cut : len(vectors) - cut].double().mean(0).float()


def krum_scores(distances: Tensor, num_bad: int) -> Tensor:
    """Return each client's sum of squared distances to its K - f - 2 nearest others, [K] float64.

    ``distances`` are [K, K] float64, squared; ``num_bad`` is f, at most K - 3.

    >>> x = torch.tensor([0.0, 1.0, 2.0, 50.0])
    >>> krum_scores((x[:, None] - x).square(), 1).tolist()
    [1.0, 1.0, 1.0, 2304.0]
    """
    nearest = len(distances) - num_bad - 2
    return distances.sort(dim=1).values[:, 1 : nearest + 1].sum(1)


def bulyan_choice(distances: Tensor, num_bad: int) -> list[int]:
    """Return the K - 2f clients that Bulyan keeps, in ascending order: the best by Krum, again and again.

    Each choice is Krum's among the m clients that are left, whose scores are sums of squared distances to their
    m - f - 2 nearest others. For the last choices this may be none, so at least the nearest one counts. Ties go to the
    client that comes first. ``distances`` are [K, K] float64, squared; ``num_bad`` is f, at most (K - 3) / 4.

    >>> x = torch.tensor([0.0, 50.0, 1.0, 2.0, 1.5, 0.5, 2.5])
    >>> bulyan_choice((x[:, None] - x).square(), 1)
    [0, 2, 3, 4, 5]
    """
    left, chosen = list(range(len(distances))), list[int]()
    while len(chosen) < len(distances) - 2 * num_bad:
        nearest = max(len(left) - num_bad - 2, 1)
        scores = distances[left][:, left].sort(dim=1).values[:, 1 : nearest + 1].sum(1)
        chosen.append(left.pop(int(scores.argsort(stable=True)[0])))
    return sorted(chosen)


def mean_around_median(vectors: Tensor, count: int) -> Tensor:
    """Return the mean of the ``count`` <= K values of each coordinate of [K, n] float32 closest to its median: [n].

    Of two values that are equally close, the smaller one counts.

    >>> mean_around_median(torch.tensor([[1.0], [2.0], [3.0], [100.0], [2.5]]), 3)
    tensor([2.5000])
    """
    ordered = vectors.double().sort(dim=0).values
    middle = ordered[(len(vectors) - 1) // 2 : len(vectors) // 2 + 1].mean(0)
    closest = (ordered - middle).abs().argsort(dim=0, stable=True)[:count]
    return ordered.gather(0, closest).mean(0).float()


def geometric_median_weights(distances: Tensor, smoothing: float, iterations: int) -> Tensor:
    """Return the weights [K] float64, of sum 1, with which a mean of the K vectors is their geometric median.

    Smoothed Weiszfeld iterations from the mean: a vector weighs 1 / max(nu, its distance to the last point). Points are
    weighted means throughout, whose distances to the vectors follow from ``distances`` [K, K] float64, squared:
    |sum_j c_j w_j - w_i|^2 = sum_j c_j D_ij - 1/2 sum_jk c_j c_k D_jk. ``smoothing`` is nu.

    >>> x = torch.tensor([0.0, 1.0, 50.0], dtype=torch.float64)
    >>> round(float(geometric_median_weights((x[:, None] - x).square(), 1e-6, 100) @ x), 4)
    1.0
    """
    weights = torch.full_like(distances[0], 1 / len(distances))
    for _ in range(iterations):
        to_vectors = distances @ weights
        squares = (to_vectors - weights @ to_vectors / 2).clamp(min=0)
        inverse = 1 / squares.sqrt().clamp(min=smoothing)
        weights = inverse / inverse.sum()
    return weights


def centred_clipping_weights(distances: Tensor, bound: float, iterations: int) -> Tensor:
    """Return the weights [K + 1] float64, of sum 1, with which K vectors and a start give their clipped centre.

    An iteration moves v by the mean of x_i - v, each scaled to a norm of at most ``bound``. So v is a weighted mean of
    the vectors and the start throughout, whose distances follow as in :func:`geometric_median_weights`. ``distances``
    are [K + 1, K + 1] float64, squared; the start is the last row.

    >>> x = torch.tensor([1.0, 3.0, 100.0, 0.0], dtype=torch.float64)
    >>> centred_clipping_weights((x[:, None] - x).square(), 2.0, 1) @ x  # 0 + (1 + 2 + 2) / 3
    tensor(1.6667, dtype=torch.float64)
    """
    weights = torch.zeros_like(distances[0])
    weights[-1] = 1
    for _ in range(iterations):
        to_vectors = distances @ weights
        squares = (to_vectors - weights @ to_vectors / 2).clamp(min=0)[:-1]
        factors = (bound / squares.sqrt()).clamp(max=1.0) / len(squares)  # of a distance of 0 it is 1 / K
        weights = weights * (1 - factors.sum())
        weights[:-1] += factors
    return weights


def trust_scores(squares: Tensor, products: Tensor) -> Tensor:
    """Return the trust max(0, cos(g_i, g_0)) of each of K updates g_i in the server's g_0, [K] float64.

    ``squares`` are the squared norms [K + 1] float64 of the updates and, at the end, of g_0; ``products`` are their
    products with g_0, [K + 1]. An update of length 0 has no trust, and without a length of g_0 none has.

    >>> trust_scores(torch.tensor([4.0, 9.0, 0.0, 1.0]), torch.tensor([1.0, -2.0, 0.0, 1.0]))
    tensor([0.5000, 0.0000, 0.0000])
    """
    lengths = squares[:-1].sqrt() * squares[-1].sqrt()
    return torch.where(lengths > 0, products[:-1] / lengths, 0.0).clamp(min=0)


def trust_weights(trust: Tensor, squares: Tensor, longest: float = math.inf) -> Tensor:
    """Return the factors [K] with which K updates add up to their mean by ``trust`` [K], of the length of g_0 each.

    They are TS_i / (sum of TS) times |g_0| / |g_i|; this quotient is at most ``longest``. All are 0 if no update has
    trust. For ``squares`` see :func:`trust_scores`.

    >>> trust_weights(torch.tensor([0.5, 0.0, 0.5]), torch.tensor([4.0, 9.0, 0.25, 1.0]))
    tensor([0.2500, 0.0000, 1.0000])
    >>> trust_weights(torch.tensor([0.5, 0.0, 0.5]), torch.tensor([4.0, 9.0, 0.25, 1.0]), longest=1.0)
    tensor([0.2500, 0.0000, 0.5000])
    """
    norms = squares[:-1].sqrt()
    quotients = torch.where(norms > 0, squares[-1].sqrt() / norms, 0.0).clamp(max=longest)
    return torch.where(trust > 0, trust / trust.sum() * quotients, 0.0)


def nearest_groups(distances: Tensor, num_bad: int) -> list[list[int]]:
    """Return for each of K vectors the K - f that are nearest, itself included; ties go to the one that comes first.

    ``distances`` are [K, K] float64, squared; ``num_bad`` is f.

    >>> x = torch.tensor([0.0, 1.0, 5.0])
    >>> nearest_groups((x[:, None] - x).square(), 1)
    [[0, 1], [1, 0], [2, 1]]
    """
    groups: list[list[int]] = distances.argsort(dim=1, stable=True)[:, : len(distances) - num_bad].tolist()
    return groups
