"""Normalisation of images by ImageNet's means and deviations."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

Colour = tuple[float, float, float]
"""a number for each of red, green and blue"""

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


def normalise_images(images: Tensor) -> Tensor:
    """Map RGB images [B, 3, H, W], uint8 or float32 of 0 .. 255, to float32 by ImageNet's mean and deviation."""
    scale, offset = _constants(images.device)
    return images.mul(scale).add_(offset)


@cache
def _constants(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return ``1 / (255 std)`` and ``-mean / std`` [1, 3, 1, 1], once per device: a copy to a GPU makes it wait."""
    mean, std = (torch.tensor(x, dtype=torch.float64).view(1, 3, 1, 1) for x in (IMAGENET_MEAN, IMAGENET_STD))
    return (1 / (255 * std)).float().to(device), (-mean / std).float().to(device)


@cache
def renormalisation(mean: Colour, std: Colour, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return scale and offset [1, 3, 1, 1] from ImageNet's normalisation to that by another mean and deviation.

    They are no buffers of a model, which would be sent to the server. They are rounded once, from float64.

    >>> scale, offset = renormalisation((0.5, 0.5, 0.5), (0.5, 0.5, 0.5), torch.device("cpu"))
    >>> scale.flatten(), offset.flatten()  # pixels from -1 to 1
    (tensor([0.4580, 0.4480, 0.4500]), tensor([-0.0300, -0.0880, -0.1880]))
    """
    colours = (IMAGENET_MEAN, IMAGENET_STD, mean, std)
    from_mean, from_std, to_mean, to_std = (torch.tensor(x, dtype=torch.float64).view(1, 3, 1, 1) for x in colours)
    return (from_std / to_std).float().to(device), ((from_mean - to_mean) / to_std).float().to(device)
