"""Training augmentation on whole batches, with one decision per image.

Trap: the transforms of ``torchvision.transforms.v2`` draw ONE decision for a whole batch. Here every image has its own,
all drawn from one generator that the caller keys by (seed, round, client).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Augmentation", "normalise_images"]

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


def normalise_images(images: Tensor) -> Tensor:
    """Map uint8 RGB [B, 3, H, W] to float32 with ImageNet's mean and standard deviation."""
    mean, std = _constants(images.device)
    return images.div(255.0).sub_(mean).div_(std)


@cache
def _constants(device: torch.device) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation [1, 3, 1, 1]; once per device, for a copy to a GPU makes it wait."""
    return (
        torch.tensor(IMAGENET_MEAN, device=device).view(1, 3, 1, 1),
        torch.tensor(IMAGENET_STD, device=device).view(1, 3, 1, 1),
    )


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """What happens to a training image. The order is geometry (one resampling), then erasing."""

    pad: int = 10
    """pixels by which a crop of the original size may move in each direction (zero padding)"""
    flip: float = 0.5
    """probability of a horizontal mirror image"""
    rotate: float = 0.0
    """largest rotation to either side, degrees"""
    scale: float = 0.0
    """largest relative change of size, e.g. 0.1 for 0.9 to 1.1"""
    erase: float = 0.0
    """probability of erasing a rectangle (Zhong et al., AAAI 2020): 2 to 40 % of the area, filled with the mean"""

    def __call__(self, images: Tensor, generator: torch.Generator | None, sizes: Sequence[int] | None = None) -> Tensor:
        """Augment uint8 [B, 3, H, W] and normalise.

        Args:
            images: the batch, on the generator's device.
            generator: every decision is drawn from it; None only if there is nothing to decide.
            sizes: of the batches that ``images`` consists of, each of which gets the draws that it would get alone;
                None: it is one batch.

        Returns:
            float32 [B, 3, H, W], normalised.
        """
        x = normalise_images(images)
        if generator is None:
            assert not self.is_random, "a random augmentation needs a generator"
            return x
        draws = torch.cat([torch.rand((n, 10), generator=generator, device=x.device) for n in sizes or (len(images),)])
        x = self._move(x, draws[:, :5]) if self._moves else x
        return self._erase(x, draws[:, 5:])

    @property
    def is_random(self) -> bool:
        """Whether anything happens beyond normalisation."""
        return self._moves or self.erase > 0.0

    @property
    def _moves(self) -> bool:
        return self.pad != 0 or any(share > 0.0 for share in (self.flip, self.rotate, self.scale))

    def _move(self, x: Tensor, u: Tensor) -> Tensor:
        """Mirror, shift, rotate and scale; ``u`` [B, 5] uniform in [0, 1)."""
        sign = torch.where(u[:, 0] < self.flip, -1.0, 1.0)
        rows = _steps(u[:, 1], self.pad)
        columns = _steps(u[:, 2], self.pad)
        if self.rotate == 0.0 and self.scale == 0.0:
            return _shift(x, sign, rows, columns)
        _, _, height, width = x.shape
        angle = (2 * u[:, 3] - 1) * math.radians(self.rotate)
        zoom = 1 / (1 + (2 * u[:, 4] - 1) * self.scale)  # of the sampling grid: the inverse of the picture's
        cos, sin, ratio = angle.cos() * zoom, angle.sin() * zoom, height / width
        theta = torch.stack(
            [sign * cos, -sin * ratio, 2 * columns / width, sign * sin / ratio, cos, 2 * rows / height], dim=1
        ).view(-1, 2, 3)
        grid = F.affine_grid(theta, list(x.shape), align_corners=False)
        return F.grid_sample(x, grid, padding_mode="zeros", align_corners=False)

    def _erase(self, x: Tensor, u: Tensor) -> Tensor:
        """Set a rectangle to the mean (0 after normalisation); ``u`` [B, 5] uniform in [0, 1)."""
        if self.erase == 0.0:
            return x
        _, _, height, width = x.shape
        area = (0.02 + 0.38 * u[:, 1]) * height * width
        aspect = 0.3 * (1 / 0.09) ** u[:, 2]  # log-uniform in [0.3, 3.33]
        box_h = (area * aspect).sqrt().round().clamp(1, height)
        box_w = (area / aspect).sqrt().round().clamp(1, width)
        top = (u[:, 3] * (height - box_h + 1)).floor()
        left = (u[:, 4] * (width - box_w + 1)).floor()
        row = torch.arange(height, device=x.device)
        column = torch.arange(width, device=x.device)
        in_rows = (row >= top[:, None]) & (row < (top + box_h)[:, None])
        in_columns = (column >= left[:, None]) & (column < (left + box_w)[:, None])
        hole = (u[:, 0] < self.erase)[:, None, None] & in_rows[:, :, None] & in_columns[:, None, :]
        return x.masked_fill(hole[:, None], 0.0)


def _steps(u: Tensor, pad: int) -> Tensor:
    """Uniform integers in [-pad, pad], as float [B]."""
    return (u * (2 * pad + 1)).floor() - pad


def _shift(x: Tensor, sign: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Mirror and shift by whole pixels: a gather, without resampling. Pixels from outside are 0."""
    batch, channels, height, width = x.shape
    row = torch.arange(height, device=x.device) + rows.long()[:, None]
    column = torch.arange(width, device=x.device)
    mirrored = torch.where(sign[:, None] < 0, width - 1 - column, column)
    column = mirrored + columns.long()[:, None]
    inside = ((row >= 0) & (row < height))[:, :, None] & ((column >= 0) & (column < width))[:, None, :]
    index = (row.clamp(0, height - 1) * width)[:, :, None] + column.clamp(0, width - 1)[:, None, :]
    flat = index.view(batch, 1, -1).expand(-1, channels, -1)
    return x.flatten(2).gather(2, flat).view_as(x) * inside[:, None]
