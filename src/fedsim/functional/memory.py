"""A memory of features: one vector of length 1 for each identity. B images, D features, Z identities."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize


def mean_memory(features: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """Return the mean feature of each identity, scaled to length 1: [Z, D].

    ``features`` are [n, D] float, ``labels`` [n] int64 on the same device. An identity without images has zeros.

    >>> mean_memory(torch.tensor([[3.0, 0.0], [0.0, 4.0], [0.0, 2.0]]), torch.tensor([1, 1, 0]), 2)
    tensor([[0.0000, 1.0000],
            [0.6000, 0.8000]])
    """
    members = (labels == torch.arange(num_classes, device=labels.device)[:, None]).to(features.dtype)
    return normalize(members @ features)


def memory_logits(memory: Tensor, features: Tensor, temperature: float) -> Tensor:
    """Return the cosines of features [B, D] and a memory [Z, D], divided by the temperature: [B, Z].

    No gradient reaches the memory, whose vectors have length 1.

    >>> memory_logits(torch.tensor([[1.0, 0.0], [0.6, 0.8]]), torch.tensor([[2.0, 0.0]]), 0.5)
    tensor([[2.0000, 1.2000]])
    """
    return normalize(features) @ memory.detach().T / temperature


@torch.no_grad()
def followed_memory(memory: Tensor, features: Tensor, labels: Tensor, momentum: float) -> Tensor:
    """Return a memory [Z, D] that has followed the features [B, D] of a batch with labels [B], image after image.

    For each image, M_y becomes ``m M_y + (1 - m) z``, scaled to length 1; z is its feature, scaled to length 1.

    >>> followed_memory(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 2.0]]), torch.tensor([0]), 0.5)
    tensor([[0.7071, 0.7071]])
    """
    memory = memory.clone()
    for z, y in zip(normalize(features).split(1), labels.split(1), strict=True):  # a label on the device stays there
        moved = momentum * memory.index_select(0, y) + (1 - momentum) * z
        memory.index_copy_(0, y, normalize(moved))
    return memory
