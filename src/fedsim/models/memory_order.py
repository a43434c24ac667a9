"""Order of maps in memory: channels beside each other (``channels_last``), or pixels."""

from __future__ import annotations

import torch
from torch import Tensor


def in_order_of(x: Tensor, like: Tensor) -> Tensor:
    """Return maps ``x`` in the order of ``like``, both [B, C, H, W]: torch's instance normalisation ends channels_last.

    >>> maps = torch.zeros(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    >>> in_order_of(maps.contiguous(), maps).is_contiguous(memory_format=torch.channels_last)
    True
    """
    is_last = like.is_contiguous(memory_format=torch.channels_last)
    return x.contiguous(memory_format=torch.channels_last if is_last else torch.contiguous_format)
