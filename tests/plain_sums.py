"""Weighted sums on the grid, one addend after another: what the blocks of ``fedsim.core.exact`` are compared with."""

import torch

from fedsim.core.exact import GRID


def snap(weight, x):
    """``weight * x`` rounded to the grid, in float64."""
    return (x.to(torch.float64) * weight).mul_(GRID).round_().div_(GRID)


def exact_weighted_sum(weights, tensors):
    """``sum_k w_k x_k`` in float64."""
    total = torch.zeros_like(tensors[0], dtype=torch.float64)
    for weight, x in zip(weights, tensors, strict=True):
        total += snap(weight, x)
    return total
