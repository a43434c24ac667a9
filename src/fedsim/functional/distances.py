"""Distances between models."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def products_of_parameters(pairs: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """Return dot products for :func:`cosine_distance_of_products` [number of pairs, 3] float64, on the device.

    ``pairs`` are (tensor of v, tensor of w) of equal shapes and any floating type; each has (v - w)^2, v^2 and w^2.
    """
    products = []
    for of_v, of_w in pairs:
        v, w = of_v.detach().double().flatten(), of_w.detach().double().flatten()
        d = v - w
        products.append(torch.stack([d.dot(d), v.dot(v), w.dot(w)]))
    return torch.stack(products) if products else torch.empty(0, 3, dtype=torch.float64)


def cosine_distance_of_products(products: Sequence[float]) -> float:
    r"""``1 - cos(v, w)`` of two models with similar parameters (paper 002, Eqs. (10) and (13)), in [0, 2].

    It is computed as $(|v - w|^2 - (|v| - |w|)^2) / (2 |v| |w|)$: in float32, 1 minus a cosine has no correct digit if
    models differ by a hundredth. ``products`` of single tensors, one row of :func:`products_of_parameters` after
    another, are summed in float64. The distance is 0 if both models are zero, and 1 if one is.

    >>> cosine_distance_of_products([20.0, 1.0, 25.0])
    0.4
    """
    difference = square_v = square_w = 0.0
    for first in range(0, len(products), 3):
        sums = products[first : first + 3]
        difference, square_v, square_w = difference + sums[0], square_v + sums[1], square_w + sums[2]
    norm_v, norm_w = math.sqrt(square_v), math.sqrt(square_w)
    if norm_v * norm_w == 0:
        return float(difference > 0)
    return max((difference - (norm_v - norm_w) ** 2) / (2 * norm_v * norm_w), 0.0)
