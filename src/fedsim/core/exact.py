"""Weighted sums that give the same bits in any order, on any number of ranks.

Each addend ``w * x`` is rounded to a fixed grid of step 2**-40 in float64. Sums of grid points stay on the grid and are
exact as long as they are below 2**53 grid steps (8192), so neither the order, nor the reduction tree, nor the number
of ranks can change a bit. Weights must sum to at most 1, which bounds the sum by the largest ``|x|``.
"""

from __future__ import annotations

import torch
from torch import Tensor

GRID = 2.0**40
"""Grid points per unit."""

MAX_MAGNITUDE = 2.0**12
"""Largest ``|x|`` for which the sum is exact: half of 2**53 / GRID, so that rounding has room."""

_CPU_BLOCK, _GPU_BLOCK = 2**17, 2**24
"""Elements that :func:`accumulate` works on at a time: float64 intermediates stay in a CPU's cache. A GPU's take up to
128 MiB, in few launches."""


def accumulate(total: Tensor, weight: float, x: Tensor, grid: float = GRID) -> None:
    """Add ``weight * x``, rounded to the grid and counted in grid points.

    Scaling by ``grid``, a power of two, is exact: divide the finished sum by it. ``total`` [n] float64 is changed in
    place, and holds whole numbers below 2**53; ``weight`` is in [0, 1]; ``x`` is [n] float32, finite and at most
    :data:`MAX_MAGNITUDE` (of another grid: 2**52 / grid), or bool, for ones and zeros.

    >>> total = torch.zeros(2, dtype=torch.float64)
    >>> accumulate(total, 0.25, torch.tensor([4.0, 8.0]))
    >>> total / GRID
    tensor([1., 2.], dtype=torch.float64)
    """
    size = _CPU_BLOCK if total.is_cpu else _GPU_BLOCK
    blocks = [(total, x)] if len(total) <= size else zip(total.split(size), x.split(size), strict=True)
    for part, block in blocks:
        part.add_(block.to(torch.float64, copy=True).mul_(weight * grid).round_())
