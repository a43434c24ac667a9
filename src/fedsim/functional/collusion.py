"""Numbers of attacks that are made of the updates of others: how far a malicious update may be from them."""

from __future__ import annotations

import math
from statistics import NormalDist

from torch import Tensor


def alie_deviations(clients: int, attackers: int) -> float:
    """Return z_max of ALIE (Baruch et al., NeurIPS 2019): a lie this many standard deviations away hides.

    It is the quantile (n - m - s) / (n - m) of the normal distribution, for n ``clients`` of which m < n / 2 are
    ``attackers``. These need s = floor(n / 2 + 1) - m honest clients for a majority; as many are expected to be further
    from the mean than the lie, on its side.

    >>> round(alie_deviations(50, 24), 2)
    1.43
    """
    honest, supporters = clients - attackers, clients // 2 + 1 - attackers
    return NormalDist().inv_cdf((honest - supporters) / honest)


def min_max_factor(squares: Tensor, products: Tensor, length: float, bound: float) -> float:
    """Return the largest gamma for which mean + gamma p is no further from any of K updates than a bound.

    |mean + gamma p - x_i|^2 = d_i + 2 gamma a_i + gamma^2 |p|^2 for update x_i, so each has a largest gamma: the larger
    root. It is not negative, since no update is further from the mean than the ``bound``.

    Args:
        squares: d_i, squared distances of the updates from their mean, [K] float64.
        products: a_i, inner products of p with mean - x_i, [K] float64.
        length: |p|^2; of 0, gamma is 0.
        bound: the largest squared distance, at least the largest of ``squares``.

    >>> import torch
    >>> x = torch.tensor([0.0, 1.0, 5.0], dtype=torch.float64)
    >>> min_max_factor((2 - x).square(), 2 - x, 1.0, 25.0)
    3.0
    """
    if length == 0:
        return 0.0
    roots = (products.square() + length * (bound - squares)).clamp(min=0).sqrt()  # below 0 by rounding only
    return max(float(((roots - products) / length).min()), 0.0)


def min_sum_factor(squares: Tensor, length: float) -> float:
    """Return the largest gamma for which the squared distances of mean + gamma p from K updates have a bounded sum.

    The bound is the largest such sum of an update. The sum is sum_i d_i + K gamma^2 |p|^2 from the lie, and
    sum_i d_i + K d_j from update j. So gamma |p| is the largest distance of an update from the mean. For the arguments
    see :func:`min_max_factor`.

    >>> import torch
    >>> x = torch.tensor([0.0, 1.0, 5.0], dtype=torch.float64)
    >>> min_sum_factor((2 - x).square(), 4.0)
    1.5
    """
    return 0.0 if length == 0 else math.sqrt(float(squares.max()) / length)
