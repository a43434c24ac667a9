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


def memory_logits(memory: Tensor, features: Tensor, temperature: float, moved: Tensor | None = None) -> Tensor:
    """Return the cosines of features [B, D] and a memory [Z, D], divided by the temperature: [B, Z].

    No gradient reaches the memory, whose vectors have length 1. Features have the gradient of cosines with the memory
    ``moved`` [Z, D], if it is given: the slip of a code that changes its memory between forward and backward.

    >>> memory_logits(torch.tensor([[1.0, 0.0], [0.6, 0.8]]), torch.tensor([[2.0, 0.0]]), 0.5)
    tensor([[2.0000, 1.2000]])
    """
    directions = normalize(features)
    if moved is None:
        return directions @ memory.detach().T / temperature
    by_moved = directions @ moved.detach().T
    return (directions.detach() @ memory.detach().T + (by_moved - by_moved.detach())) / temperature


def update_memory(memory: Tensor, features: Tensor, labels: Tensor, momentum: float, most: int | None = None) -> Tensor:
    """Move the vectors of a batch's identities towards its images (paper 004, Eq. 1), image after image.

    ``K[j] <- mu K[j] + (1 - mu) f_i``, then ``K[j] <- K[j] / |K[j]|``. A vector with several images in the batch moves
    several times, in the batch's order. ``memory`` K [Z, D] and ``features`` f [B, D] have unit length; ``labels`` [B]
    int64 are each image's vector j, and ``momentum`` is mu. ``most`` is the largest number of images of one vector, if
    the caller has it: each pass takes one image of every vector, so that there are ``most`` passes, not B. Returns a
    new memory [Z, D], without gradient.

    >>> update_memory(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]]), torch.tensor([0]), momentum=0.5)
    tensor([[0.7071, 0.7071]])
    """
    num, moves = len(memory), (1 - momentum) * features.detach().to(memory.dtype)
    with torch.no_grad():
        turns = (labels[:, None] == labels).tril(-1).sum(1)  # images of the same vector that come before
        passes = torch.arange(len(labels) if most is None else min(most, len(labels)), device=labels.device)
        memory = torch.cat([memory, memory.new_zeros(1, memory.shape[1])])  # the last row is for those in other turns
        for rows in labels.masked_fill(turns != passes[:, None], num):
            moved = momentum * memory.index_select(0, rows) + moves
            memory.index_copy_(0, rows, normalize(moved))  # Eq. (1)
    return memory[:num]
