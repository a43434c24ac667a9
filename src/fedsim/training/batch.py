"""A training batch."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = ["Batch"]


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
