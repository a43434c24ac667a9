"""Training augmentation on whole batches, with one decision per image.

Trap: ``torchvision.transforms.v2`` makes ONE decision for a whole batch. Here each image has its own decision, sampled
from one generator that the caller keys by (seed, round, client).

Cropping and erasing have two versions with the same results: for GPUs, where the number of operations costs time, one
operation on the whole batch; for CPUs, where memory access costs time, a loop that copies as little as possible.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsim.core.arguments import Section
from fedsim.core.checks import Pixels, not_negative, within
from fedsim.functional.normalise import normalise_images
from fedsim.settings.facts import Facts

_ATTEMPTS = 10  # rectangles sampled per image, as in torchvision; the first one that fits is erased
_GREY = (0.2989, 0.587, 0.114)  # weights of red, green and blue in brightness (ITU-R BT.601)
_MOVING, _COLOURS, _ERASING = 5, 4, 3 + 2 * _ATTEMPTS  # random numbers per image


@dataclass(frozen=True, kw_only=True)
class Augmentation(Section, option="data.augmentation"):
    """Random changes of training images, in this order: colours, geometry (one resampling), normalisation, erasing.

    Pixels beyond the border are black, as in the papers' code, which pads images before it normalises them.
    """

    pad: int = 10
    """pixels by which a crop may reach beyond the image in each direction"""
    crop: Annotated[Pixels | None, Facts(null_is="data.size")] = None
    """height and width of the crop, if images are read larger (papers 000 and 001: 288 x 144, then 256 x 128); null:
    the size of the image"""
    flip: float = 0.5
    """probability of a horizontal mirror image"""
    rotate: float = 0.0
    """largest rotation to either side, degrees"""
    scale: float = 0.0
    """largest relative change of size, e.g. 0.1 for 0.9 to 1.1"""
    erase: float = 0.0
    """probability of erasing a rectangle (Zhong et al., AAAI 2020): 2 to 40 % of the area, filled with the mean"""
    brightness: float = 0.0
    """largest relative change of brightness, e.g. 0.2 for 0.8 to 1.2"""
    contrast: float = 0.0
    """largest relative change of contrast"""
    saturation: float = 0.0
    """largest relative change of saturation"""
    hue: float = 0.0
    """largest shift of the hue to either side, in turns of the colour circle, at most 0.5"""

    def __post_init__(self) -> None:
        section = "data.augmentation"
        within(section, "[0, 1]", flip=self.flip, erase=self.erase)
        within(section, "[0, 0.5]", hue=self.hue)
        within(section, "[0, 180]", rotate=self.rotate)
        within(section, "[0, 0.9]", scale=self.scale)
        not_negative(section, pad=self.pad)
        not_negative(section, brightness=self.brightness, contrast=self.contrast, saturation=self.saturation)

    def __call__(self, images: Tensor, generator: torch.Generator | None, sizes: Sequence[int] | None = None) -> Tensor:
        """Augment uint8 [B, 3, H, W] and normalise; return float32 [B, 3, H, W], or the size of the crop.

        ``generator``: for all decisions, on the device of the images; None only if nothing is random. ``sizes``: the
        size of each batch if ``images`` are several batches; each batch gets the same random numbers as alone.
        """
        if generator is None:
            assert not self.is_random, "a random augmentation needs a generator"
            return normalise_images(images)
        total, lengths = _MOVING + _COLOURS + _ERASING, sizes or (len(images),)
        u = torch.cat([torch.rand((n, total), generator=generator, device=images.device) for n in lengths])
        moving, colours, erasing = u.split((_MOVING, _COLOURS, _ERASING), dim=1)
        x = images
        if self._recolours:
            x = jitter_colours(x, colours, self.brightness, self.contrast, self.saturation, self.hue)
        if self._moves:
            x = self._move(x, moving)
        x = normalise_images(x)
        return self._erase(x, erasing) if self.erase > 0.0 else x

    @property
    def is_random(self) -> bool:
        """Whether there are random changes besides normalisation."""
        return self._moves or self._recolours or self.erase > 0.0

    @property
    def _moves(self) -> bool:
        return bool(self.pad or self.crop or self.flip > 0.0 or self.rotate > 0.0 or self.scale > 0.0)

    @property
    def _recolours(self) -> bool:
        return any(share > 0.0 for share in (self.brightness, self.contrast, self.saturation, self.hue))

    def _move(self, x: Tensor, u: Tensor) -> Tensor:
        """Crop, mirror, rotate and scale; ``u`` [B, 5] uniform in [0, 1)."""
        in_height, in_width = x.shape[2:]
        height, width = size = self.crop or (in_height, in_width)
        mirror = u[:, 0] < self.flip
        top = self._places(u[:, 1], in_height - height)
        left = self._places(u[:, 2], in_width - width)
        if self.rotate == 0.0 and self.scale == 0.0:
            crop = _crop_one_by_one if x.device.type == "cpu" else _crop_together
            return crop(x, mirror, top, left, size)
        sign = torch.where(mirror, -1.0, 1.0)
        angle = (2 * u[:, 3] - 1) * math.radians(self.rotate)
        zoom = 1 / (1 + (2 * u[:, 4] - 1) * self.scale)  # of the sampling grid: the inverse of the image's
        cos, sin = angle.cos() * zoom, angle.sin() * zoom
        down, right = 2 * top + height - in_height, 2 * left + width - in_width  # twice the distance of the centres
        theta = torch.stack(
            [sign * cos * width / in_width, -sin * height / in_width, right / in_width,
             sign * sin * width / in_height, cos * height / in_height, down / in_height], dim=1
        ).view(-1, 2, 3)  # fmt: skip
        grid = F.affine_grid(theta, [*x.shape[:2], *size], align_corners=False)
        return F.grid_sample(x.float(), grid, padding_mode="zeros", align_corners=False)

    def _places(self, u: Tensor, room: int) -> Tensor:
        """Return first rows or columns of crops, int64 [B]: uniform in -pad .. room + pad; small images are inside."""
        low, high = min(-self.pad, room), max(room + self.pad, 0)
        return (u * (high - low + 1)).floor().long() + low

    def _erase(self, x: Tensor, u: Tensor) -> Tensor:
        """Set a rectangle to the mean (0 after normalisation), in place; ``u`` [B, 23] uniform in [0, 1)."""
        _, _, height, width = x.shape
        area = (0.02 + 0.38 * u[:, 3::2]) * height * width
        aspect = 0.3 * (1 / 0.09) ** u[:, 4::2]  # log-uniform in [0.3, 3.33]
        tall, wide = (area * aspect).sqrt().round(), (area / aspect).sqrt().round()
        fits = (tall < height) & (wide < width)  # [B, attempts]
        first = fits.int().argmax(1, keepdim=True)
        box_h, box_w = tall.gather(1, first)[:, 0], wide.gather(1, first)[:, 0]
        top = (u[:, 1] * (height - box_h + 1)).floor()
        left = (u[:, 2] * (width - box_w + 1)).floor()
        erase = _erase_one_by_one if x.device.type == "cpu" else _erase_together
        chosen = (u[:, 0] < self.erase) & fits.any(1)
        return erase(x, chosen, torch.stack([top, top + box_h, left, left + box_w]).long())


def jitter_colours(
    images: Tensor, u: Tensor, brightness: float, contrast: float, saturation: float, hue: float
) -> Tensor:
    """Change brightness, contrast, saturation and hue of RGB images [B, 3, H, W], 0 .. 255; return float32.

    The operations are those of ``torchvision.transforms.ColorJitter``, but always in this order. ``u`` [B, 4], uniform
    in [0, 1), has their decisions. Factors are uniform in [1 - b, 1 + b], at least 0, for brightness b, and so for
    contrast and saturation. Shifts of the hue are uniform in [-h, h], in turns of the colour circle.
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


def _blend(x: Tensor, base: Tensor, factor: Tensor) -> Tensor:
    return (factor * x + (1 - factor) * base).clamp_(0, 255)


def _turn_hue(x: Tensor, turns: Tensor) -> Tensor:
    """Shift the hue of RGB [B, 3, H, W] by ``turns`` [B] of the HSV colour circle."""
    value, chroma = x.amax(1), x.amax(1) - x.amin(1)
    red, green, blue = x.unbind(1)
    safe = chroma.clamp_min(1e-12)
    not_red = torch.where(value == green, 2 + (blue - red) / safe, 4 + (red - green) / safe)
    sixth = torch.where(value == red, (green - blue) / safe, not_red) + 6 * turns.view(-1, 1, 1)
    # RGB from HSV without a case per sixth: each channel is the value minus a ramp of the chroma
    ramps = [((offset + sixth) % 6) for offset in (5, 3, 1)]
    return torch.stack([value - chroma * torch.minimum(k, 4 - k).clamp(0, 1) for k in ramps], 1)


def _crop_together(x: Tensor, mirror: Tensor, top: Tensor, left: Tensor, size: tuple[int, int]) -> Tensor:
    """Cut a part of ``size`` out of each image [B, 3, H, W], then mirror it; pixels beyond the border are 0.

    ``mirror`` [B] bool; ``top`` and ``left`` [B] int64, first row and column of the part, possibly negative.
    """
    batch, channels, in_height, in_width = x.shape
    height, width = size
    row = torch.arange(height, device=x.device) + top[:, None]
    column = torch.arange(width, device=x.device)
    column = torch.where(mirror[:, None], width - 1 - column, column) + left[:, None]
    inside = ((row >= 0) & (row < in_height))[:, :, None] & ((column >= 0) & (column < in_width))[:, None, :]
    index = (row.clamp(0, in_height - 1) * in_width)[:, :, None] + column.clamp(0, in_width - 1)[:, None, :]
    flat = index.view(batch, 1, -1).expand(-1, channels, -1)
    return x.flatten(2).gather(2, flat).view(batch, channels, height, width) * inside[:, None]


def _crop_one_by_one(x: Tensor, mirror: Tensor, top: Tensor, left: Tensor, size: tuple[int, int]) -> Tensor:
    """:func:`_crop_together` image by image, which copies only pixels inside the image."""
    height, width = size
    out = x.new_zeros(*x.shape[:2], height, width)
    places = zip(mirror.tolist(), top.tolist(), left.tolist(), strict=True)
    for old, new, (flipped, y, x0) in zip(x.unbind(), out.unbind(), places, strict=True):
        inside = old[:, max(y, 0) : max(y + height, 0), max(x0, 0) : max(x0 + width, 0)]
        _, rows, columns = inside.shape
        first = max(-x0, 0)
        if flipped:
            inside, first = inside.flip(2), width - first - columns
        if rows and columns:
            new[:, max(-y, 0) : max(-y, 0) + rows, first : first + columns] = inside
    return out


def _erase_together(x: Tensor, chosen: Tensor, box: Tensor) -> Tensor:
    """Set rectangles to 0, in place, in the ``chosen`` [B] images of ``x`` [B, 3, H, W].

    ``box`` [4, B] int64: first row, row after the last, first column, column after the last.
    """
    top, bottom, left, right = box[:, :, None]
    row = torch.arange(x.shape[2], device=x.device)
    column = torch.arange(x.shape[3], device=x.device)
    in_rows, in_columns = (row >= top) & (row < bottom), (column >= left) & (column < right)
    hole = chosen[:, None, None] & in_rows[:, :, None] & in_columns[:, None, :]
    return x.masked_fill_(hole[:, None], 0.0)


def _erase_one_by_one(x: Tensor, chosen: Tensor, box: Tensor) -> Tensor:
    corners = box.T.tolist()
    for image in torch.nonzero(chosen).flatten().tolist():
        top, bottom, left, right = corners[image]
        x[image, :, top:bottom, left:right] = 0.0
    return x
