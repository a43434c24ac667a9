"""Weighted sums that give the same bits in any order, on any number of ranks.

Each addend ``w * x`` is rounded to a fixed grid of step 2**-40 in float64. Sums of grid points stay on the grid and are
exact as long as they are below 2**53 grid steps (8192), so neither the order, nor the reduction tree, nor the number
of ranks can change a bit. Weights must sum to at most 1, which bounds the sum by the largest ``|x|``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["GRID", "MAX_MAGNITUDE", "accumulate", "exact_weighted_sum", "snap"]

GRID = 2.0**40
"""Grid points per unit."""

MAX_MAGNITUDE = 2.0**12
"""Largest ``|x|`` for which the sum is exact: half of 2**53 / GRID, so that rounding has room."""

_BLOCK = 2**17
"""Elements that :func:`accumulate` works on at a time: float64 intermediates stay in a CPU's cache."""


def snap(weight: float, x: Tensor) -> Tensor:
    """Return ``weight * x`` rounded to the grid.

    Args:
        weight: a factor in [0, 1].
        x: float tensor of any shape.

    Returns:
        float64 tensor of the same shape; every entry is a multiple of 2**-40.
    """
    return (x.to(torch.float64) * weight).mul_(GRID).round_().div_(GRID)


def accumulate(total: Tensor, weight: float, x: Tensor) -> None:
    """Add ``GRID * snap(weight, x)``: what :func:`snap` gives, counted in grid points.

    Scaling by a power of two is exact, so the sum, divided by :data:`GRID` in the end, has the same bits.

    Args:
        total: [n] float64, changed in place; whole numbers below 2**53.
        weight: a factor in [0, 1].
        x: [n] float32, finite and at most :data:`MAX_MAGNITUDE`; or bool, for ones and zeros.

    >>> total = torch.zeros(2, dtype=torch.float64)
    >>> accumulate(total, 0.25, torch.tensor([4.0, 8.0]))
    >>> total / GRID
    tensor([1., 2.], dtype=torch.float64)
    """
    for part, block in zip(total.split(_BLOCK), x.split(_BLOCK), strict=True):
        part.add_(block.to(torch.float64, copy=True).mul_(weight * GRID).round_())


def exact_weighted_sum(weights: Sequence[float], tensors: Sequence[Tensor]) -> Tensor:
    """Return ``sum_k w_k x_k`` in float64, bit-equal for every order of the addends.

    Args:
        weights: K factors in [0, 1] with sum at most 1 (up to rounding).
        tensors: K tensors of one shape with ``|x| <= 4096``.

    Raises:
        ValueError: if a value leaves the exact range or is not finite.

    >>> exact_weighted_sum([0.25, 0.75], [torch.tensor([4.0]), torch.tensor([8.0])])
    tensor([7.], dtype=torch.float64)
    """
    total = torch.zeros_like(tensors[0], dtype=torch.float64)
    for index, (weight, x) in enumerate(zip(weights, tensors, strict=True)):
        total += snap(weight, x)
        largest = float(x.abs().max()) if x.numel() else 0.0
        if not math.isfinite(largest) or largest > MAX_MAGNITUDE:
            raise ValueError(
                f"addend {index} holds {largest}: exact sums need finite values of at most {MAX_MAGNITUDE}"
            )
    return total
