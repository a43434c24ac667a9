"""Copies from the host's memory to a device."""

from __future__ import annotations

import torch
from torch import Tensor


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on ``device``; to a GPU it is copied while the program goes on.

    The copy is from page-locked memory, of which torch keeps blocks for the next one: only such a copy runs along.

    >>> send(torch.ones(2), torch.device("cpu"))
    tensor([1., 1.])
    """
    if device.type == "cuda" and tensor.is_cpu:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
