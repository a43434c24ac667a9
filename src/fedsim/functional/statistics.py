"""Pooling the running statistics of normalisation layers (law of total variance)."""

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
