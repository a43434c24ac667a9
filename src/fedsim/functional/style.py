"""Statistics of maps that stand for their style, and how images of a batch exchange them.

Shapes: B images, C channels, H x W pixels of a map. The style of an image is mean and standard deviation of each
channel over its pixels.
"""

from __future__ import annotations

import torch
from torch import Tensor


def style_of(x: Tensor, eps: float, box: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of each channel of maps [B, C, H, W], both [B, C, 1, 1], at least float32.

    The variance is unbiased, and ``eps`` is added to it under the root. ``box`` [H, W] bool marks the pixels that
    count, at least two; None: all.

    >>> mean, std = style_of(torch.tensor([[[[0.0, 2.0, 4.0, 9.0]]]]), 0.0, torch.tensor([[True, True, True, False]]))
    >>> mean.item(), std.item()
    (2.0, 2.0)
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    if box is None:
        variance, mean = torch.var_mean(x, dim=(2, 3), keepdim=True)
    else:
        counts, size = box.to(x.dtype), box.sum()
        mean = (x * counts).sum(dim=(2, 3), keepdim=True) / size
        variance = ((x - mean).square() * counts).sum(dim=(2, 3), keepdim=True) / (size - 1)
    return mean, (variance + eps).sqrt()


def mix_styles(x: Tensor, shares: Tensor, partners: Tensor, eps: float = 1e-6) -> Tensor:
    """Give images a mixture of their own style and a partner's (MixStyle, Zhou et al., ICLR 2021).

    ``x`` are maps [B, C, H, W], ``partners`` [B] int64 numbers of images, and ``shares`` [B] lambda, the weight of an
    image's own style. With a share of 1 an image keeps its bits. No gradient flows through the statistics.

    >>> x = torch.tensor([[[[0.0, 2.0]]], [[[10.0, 14.0]]]])
    >>> mix_styles(x, torch.tensor([1.0, 0.5]), torch.tensor([1, 0]), eps=0.0).flatten().tolist()
    [0.0, 2.0, 5.0, 8.0]
    """
    mean, std = style_of(x.detach(), eps)
    share = shares.to(mean.dtype)[:, None, None, None]
    # not (x - mean) / std first: so a share of 1 multiplies by exactly 1 and adds exactly 0
    scale = (share * std + (1 - share) * std[partners]) / std
    shift = share * mean + (1 - share) * mean[partners] - mean * scale
    return (x * scale + shift).to(x.dtype)


def swap_styles(
    x: Tensor, partners: Tensor, *, style_box: Tensor | None = None, content_box: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """Give images the style of their partners (CrossNorm, Tang et al., ICCV 2021; DACS's CrossStyle).

    ``x`` are maps [B, C, H, W], ``partners`` [B] int64 numbers of images. Boxes are bool [H, W] of at least two pixels:
    a partner's style is that of its ``style_box``, and an image changes in its ``content_box`` alone, by the style that
    it has there. None: all pixels. Gradients flow through the statistics.

    >>> x = torch.tensor([[[[0.0, 2.0]]], [[[10.0, 14.0]]]])
    >>> swap_styles(x, torch.tensor([1, 0]), eps=0.0).flatten().tolist()
    [10.0, 14.0, 0.0, 2.0]
    """
    mean, std = style_of(x, eps, content_box)
    given_mean, given_std = (mean, std) if style_box is content_box else style_of(x, eps, style_box)
    scale = given_std[partners] / std
    swapped = (x * scale + (given_mean[partners] - mean * scale)).to(x.dtype)
    return swapped if content_box is None else torch.where(content_box, swapped, x)
