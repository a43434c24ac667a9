"""Random colours on whole batches, with one decision per image.

The operations are those of ``torchvision.transforms.ColorJitter``, but always in the same order: brightness, contrast,
saturation, hue.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GREY = (0.2989, 0.587, 0.114)
"""Weights of red, green and blue in brightness (ITU-R BT.601)."""


def jitter_colours(
    images: Tensor, u: Tensor, brightness: float, contrast: float, saturation: float, hue: float
) -> Tensor:
    """Change brightness, contrast, saturation and hue of RGB images [B, 3, H, W] of 0 .. 255; return float32 alike.

    ``u`` [B, 4], uniform in [0, 1), has the decisions in the order of the arguments. Factors are uniform in [1 - b,
    1 + b], at least 0, for brightness b, and alike for contrast and saturation. Shifts of the hue are uniform in
    [-h, h], in turns of the colour circle.
    """
    x = images.to(torch.float32, copy=True)
    if brightness > 0:
        x = (x * _factor(u[:, 0], brightness)).clamp_(0, 255)
    if contrast > 0:
        x = _blend(x, _grey(x).mean((2, 3), keepdim=True), _factor(u[:, 1], contrast))
    if saturation > 0:
        x = _blend(x, _grey(x), _factor(u[:, 2], saturation))
    return _turn_hue(x, (2 * u[:, 3] - 1) * hue) if hue > 0 else x


def _factor(u: Tensor, range_: float) -> Tensor:
    low, high = max(0.0, 1 - range_), 1 + range_
    return (low + (high - low) * u).view(-1, 1, 1, 1)


def _grey(x: Tensor) -> Tensor:
    """[B, 3, H, W] to [B, 1, H, W]."""
    return sum(weight * x[:, i : i + 1] for i, weight in enumerate(_GREY))  # type: ignore[return-value] # never 0


def _blend(x: Tensor, other: Tensor, factor: Tensor) -> Tensor:
    return (factor * x + (1 - factor) * other).clamp_(0, 255)


def _turn_hue(x: Tensor, turns: Tensor) -> Tensor:
    """Shift the hue of RGB [B, 3, H, W] by ``turns`` [B] of the HSV colour circle."""
    value, chroma = x.amax(1), x.amax(1) - x.amin(1)
    red, green, blue = x.unbind(1)
    safe = chroma.clamp_min(1e-12)
    not_red = torch.where(value == green, 2 + (blue - red) / safe, 4 + (red - green) / safe)
    sixth = torch.where(value == red, (green - blue) / safe, not_red) + 6 * turns.view(-1, 1, 1)
    # RGB from HSV without a case per sixth: each channel is the value less a ramp of the chroma
    ramps = [((offset + sixth) % 6) for offset in (5, 3, 1)]
    return torch.stack([value - chroma * torch.minimum(k, 4 - k).clamp(0, 1) for k in ramps], 1)
