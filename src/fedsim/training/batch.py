"""Batches on the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fedsim.data.pixels import Pixels
from fedsim.functional.normalise import normalise_images


class Batch(NamedTuple):
    """A training batch on the device."""

    images: Tensor
    """[B, 3, H, W] float32, augmented and normalised"""
    labels: Tensor
    """[B] int64, 0 .. num_classes - 1, or proxies of clusters; for :meth:`Client.supervised_loss`"""
    views: tuple[Tensor, ...] = ()
    """further views of the same images, augmented independently, each like ``images``"""
    targets: Tensor | None = None
    """[B, num_classes] float32, soft labels of sums in (0, 1]; None: ``labels``, one-hot"""


def plain_batches(
    pixels: Pixels, labels: Tensor, size: int, device: torch.device, index: Tensor | None = None
) -> Iterator[Batch]:
    """Yield images as they are, without augmentation; no random stream moves.

    Args:
        pixels: n images.
        labels: [n] int64.
        size: images per batch; the last one may have fewer.
        device: of the batches.
        index: [m] int64, chosen images in their order; None: all in file order.
    """
    parts = (torch.arange(len(labels)) if index is None else index).split(size)
    for part, images in zip(parts, pixels.batches(parts), strict=True):
        yield Batch(normalise_images(images), labels[part].to(device))
