"""Prototypes of classes: mean features. B images, D features, Z classes."""

from __future__ import annotations

import torch
from torch import Tensor


def class_means(features: Tensor, labels: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Return the mean feature of each class [Z, D], 0 of a class without images, and its number of images [Z].

    ``features`` are [B, D] float, ``labels`` [B] int64; both results have the dtype of the features. The same bits on
    any device of a kind: nothing is added in the order of threads.

    >>> class_means(torch.tensor([[1.0], [3.0]]), torch.tensor([0, 0]), 2)
    (tensor([[2.],
            [0.]]), tensor([2., 0.]))
    """
    members = (labels == torch.arange(num_classes, device=labels.device)[:, None]).to(features.dtype)
    counts = members.sum(1)
    return members @ features / counts.clamp_min(1)[:, None], counts


def prototype_distance(means: Tensor, prototypes: Tensor, counted: Tensor) -> Tensor:
    """Return the sum of the Euclidean distances between two prototypes of each counted class, a scalar.

    ``means`` and ``prototypes`` are [Z, D] float, ``counted`` [Z] bool. Equal prototypes have a gradient of 0.

    >>> prototype_distance(torch.tensor([[3.0, 4.0], [1.0, 1.0]]), torch.zeros(2, 2), torch.tensor([True, False]))
    tensor(5.)
    """
    squares = torch.where(counted[:, None], means - prototypes, 0).square().sum(1)
    return squares.clamp_min(1e-12).sqrt().mul(squares > 0).sum()  # the gradient of sqrt at 0 is infinite


def image_distance(features: Tensor, targets: Tensor, counted: Tensor) -> Tensor:
    """Return the mean squared difference of features from their targets, a scalar; images that do not count give 0.

    ``features`` and ``targets`` are [B, D] float, ``counted`` [B] bool. The mean divides by all B D numbers.

    >>> image_distance(torch.tensor([[2.0], [9.0]]), torch.zeros(2, 1), torch.tensor([True, False]))
    tensor(2.)
    """
    return torch.where(counted[:, None], features - targets, 0).square().mean()
