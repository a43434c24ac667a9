"""Pictures of where a network's last map is strong (paper 002, Fig. 10)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from fedsim.core.errors import ConfigError
from fedsim.core.files import replacing
from fedsim.functional.normalise import normalise_images

__all__ = ["draw_maps", "map_strength", "write_maps"]


def map_strength(maps: Tensor) -> Tensor:
    """Return the length of each pixel's vector of channels, divided by the largest of the image.

    Paper silent on how many channels become a picture; the sum of squares is that of Zagoruyko and Komodakis, "Paying
    more attention to attention", ICLR 2017, Section 3.1. Dividing by the largest, a common factor, as of gates that are
    1/2 everywhere, is not seen.

    Args:
        maps: [B, C, h, w] float.

    Returns:
        [B, h, w] in [0, 1]; 0 where a map is 0 everywhere.

    >>> map_strength(torch.tensor([[[[3.0, 0.0]], [[4.0, 1.0]]]]))
    tensor([[[1.0000, 0.2000]]])
    """
    length = maps.square().sum(1).sqrt()
    largest = length.amax(dim=(1, 2), keepdim=True)
    return length / largest.where(largest > 0, 1.0)


@torch.no_grad()
def draw_maps(backbone: nn.Module, images: Tensor) -> Image.Image:
    """Draw images side by side, and below each where the backbone's map is strong: white is the strongest pixel.

    Args:
        backbone: normalised images [B, 3, H, W] -> maps [B, C, h, w], in evaluation mode.
        images: uint8 [B, 3, H, W], on its device.

    Raises:
        ConfigError: if the backbone returns features without a map.
    """
    with torch.autocast(images.device.type, enabled=False):  # as where features are extracted
        maps = backbone(normalise_images(images))
    if maps.dim() != 4:
        raise ConfigError(f"save_maps: {type(backbone).__name__} returns features without a map; leave it out")
    height, width = images.shape[2:]
    sheet = Image.new("RGB", (len(images) * width, 2 * height))
    levels = (255 * map_strength(maps)).round().to(torch.uint8).cpu().numpy()
    pictures = images.permute(0, 2, 3, 1).cpu().numpy()
    for column, (picture, level) in enumerate(zip(pictures, levels, strict=True)):
        sheet.paste(Image.fromarray(np.ascontiguousarray(picture)), (column * width, 0))
        # each of the map's pixels stays a rectangle: nothing is invented between them
        sheet.paste(Image.fromarray(level).resize((width, height), Image.Resampling.NEAREST), (column * width, height))
    return sheet


def write_maps(backbone: nn.Module, images: Tensor, path: Path) -> None:
    """Write :func:`draw_maps` as a PNG file."""
    with replacing(path) as partial:
        draw_maps(backbone, images).save(partial, format="png")
