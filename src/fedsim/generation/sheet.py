"""Contact sheets of swapped images, with their sources (after paper 002, Figure 5)."""

from __future__ import annotations

import math

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

_TITLE = 16  # pixels: height of the line above the images
_MARGIN = 4  # pixels between the sources and the results
_LOWEST = 96  # pixels: lower images are enlarged


def swap_sheet(structure: Tensor, appearance: Tensor, swapped: Tensor, title: str) -> Image.Image:
    """Draw a table of swapped images, with appearance sources above and structure sources at the left.

    All are uint8, RGB: ``structure`` [m, 3, H, W], ``appearance`` [n, 3, H, W], ``swapped`` [m, n, 3, H, W]; the image
    in row i and column j has structure i and appearance j. Raise ValueError if they do not fit together. Images less
    than 96 pixels high are enlarged by a whole factor. ``title`` is the line above the table.
    """
    images_by_name = {"structure": structure, "appearance": appearance, "swapped": swapped}
    for name, images in images_by_name.items():
        if images.dtype != torch.uint8:
            raise ValueError(f"{name} is {images.dtype}; give uint8")
    (m, *size), (n, *_) = structure.shape, appearance.shape
    sizes_fit = len(size) == 3 and size[0] == 3 and appearance.shape == (n, *size) and swapped.shape == (m, n, *size)
    if not (sizes_fit and swapped.numel()):
        shapes = ", ".join(f"{name} {list(images.shape)}" for name, images in images_by_name.items())
        raise ValueError(f"{shapes}: do not fit; give [m, 3, H, W], [n, 3, H, W] and [m, n, 3, H, W]")
    factor = max(1, math.ceil(_LOWEST / size[1]))
    height, width = factor * size[1], factor * size[2]
    left, top, font = width + _MARGIN, _TITLE + height + _MARGIN, ImageFont.load_default()
    sheet = Image.new("RGB", (max(left + n * width, 4 + math.ceil(font.getlength(title))), top + m * height), "white")
    ImageDraw.Draw(sheet).text((2, 2), title, fill="black", font=font)
    sheet.paste(_grid(appearance[None], factor), (left, _TITLE))
    sheet.paste(_grid(structure[:, None], factor), (0, top))
    sheet.paste(_grid(swapped, factor), (left, top))
    return sheet


def _grid(images: Tensor, factor: int) -> Image.Image:
    """Put images uint8 [r, c, 3, H, W] into r rows without gaps, each pixel ``factor`` by ``factor``."""
    rows, columns, channels, height, width = images.shape
    pixels = images.cpu().permute(0, 3, 1, 4, 2).reshape(rows * height, columns * width, channels)
    return Image.fromarray(pixels.repeat_interleave(factor, 0).repeat_interleave(factor, 1).numpy())
