"""Ranked lists as files and pictures, and pictures of where a network's last map is strong (paper 002, Fig. 10)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from torch import Tensor, nn

from fedsim.core.errors import ConfigError
from fedsim.core.files import replacing
from fedsim.data.images import Images
from fedsim.evaluation.backends import mask_junk
from fedsim.evaluation.ranking import Ints, RetrievalLabels
from fedsim.functional.neighbours import top_of_block
from fedsim.functional.normalise import normalise_images

_ROWS, _COLUMNS = 8, 10  # queries, and images of each list, on a sheet
_SIZE = (128, 64)  # height and width of a picture, pixels
_FRAME = 3  # pixels around a picture


@dataclass(frozen=True)
class RankedLists:
    """The first k gallery images of each query, without junk."""

    index: Ints
    """[Q, k] gallery positions, best first; -1 if the gallery has fewer images"""
    similarity: NDArray[np.float32]
    """[Q, k]; -inf if there is no image"""
    is_match: NDArray[np.bool_]
    """[Q, k]"""


def rank_lists(blocks: Iterable[tuple[slice, Tensor]], labels: RetrievalLabels, k: int = 50) -> RankedLists:
    """Find the first k images of each query's ranked list.

    ``blocks`` are (queries, their similarities [b, G]), such as a :class:`fedsim.functional.similarity.Similarity`.

    >>> from fedsim.functional.similarity import Similarity
    >>> labels = RetrievalLabels(np.array([1]), np.array([0]), np.array([1, 2, 1]), np.array([0, 0, 1]))
    >>> rank_lists(Similarity(torch.ones(1, 2), torch.tensor([[1.0, 1.0], [1.0, 1.0], [0.0, 1.0]])), labels, k=3).index
    array([[ 1,  2, -1]])
    """
    k = min(k, len(labels.gallery_pids))
    index = np.full((len(labels.query_pids), k), -1, dtype=np.int64)
    values = np.full(index.shape, -np.inf, dtype=np.float32)
    for rows, block in blocks:
        mask_junk(block, labels.take(rows))
        index[rows], values[rows] = top_of_block(block, k)
    is_match = (labels.gallery_pids[index] == labels.query_pids[:, None]) & np.isfinite(values)
    return RankedLists(np.where(np.isfinite(values), index, -1), values, is_match)


def write_ranked_lists(path: Path, lists: RankedLists) -> None:
    """Write ``index``, ``similarity`` and ``is_match`` to an npz file."""
    with replacing(path) as partial, partial.open("wb") as file:
        np.savez(file, index=lists.index, similarity=lists.similarity, is_match=lists.is_match)


def draw_ranked_lists(lists: RankedLists, query: Images, gallery: Images) -> Image.Image:
    """Draw queries, evenly spread over all Q, and the first of their lists of the G gallery images.

    Frames are green around matches, red around other images.
    """
    chosen = np.unique(np.linspace(0, len(lists.index) - 1, _ROWS).round().astype(np.int64))
    height, width = (pixels + 2 * _FRAME + 2 for pixels in _SIZE)
    sheet = Image.new("RGB", (width * (_COLUMNS + 1) + 8, height * len(chosen)), "white")
    draw = ImageDraw.Draw(sheet)
    for row, (q, picture) in enumerate(zip(chosen, query.take(chosen).decode(_SIZE), strict=True)):
        _paste(sheet, draw, picture, (0, row * height), "black")
        found = lists.index[q, :_COLUMNS]
        for column, image in enumerate(gallery.take(found[found >= 0]).decode(_SIZE)):
            colour = "limegreen" if lists.is_match[q, column] else "red"
            _paste(sheet, draw, image, (8 + (column + 1) * width, row * height), colour)
    return sheet


def _paste(sheet: Image.Image, draw: ImageDraw.ImageDraw, image: Tensor, corner: tuple[int, int], colour: str) -> None:
    """Put a picture [3, H, W] uint8 with a frame at (left, top)."""
    left, top = corner
    height, width = image.shape[1:]
    draw.rectangle((left, top, left + width + 2 * _FRAME - 1, top + height + 2 * _FRAME - 1), fill=colour)
    sheet.paste(Image.fromarray(image.permute(1, 2, 0).numpy()), (left + _FRAME, top + _FRAME))


def map_strength(maps: Tensor) -> Tensor:
    """Return the length of each pixel's vector of channels, divided by the largest length in the image.

    From [B, C, h, w] to [B, h, w] in [0, 1]; an image whose map is 0 everywhere stays 0. Paper silent on how many
    channels become a picture; the sum of squares is that of Zagoruyko and Komodakis, "Paying more attention to
    attention", ICLR 2017, Section 3.1. The division removes factors common to all pixels, such as gates of 1/2.

    >>> map_strength(torch.tensor([[[[3.0, 0.0]], [[4.0, 1.0]]]]))
    tensor([[[1.0000, 0.2000]]])
    """
    length = maps.square().sum(1).sqrt()
    largest = length.amax(dim=(1, 2), keepdim=True)
    return length / largest.where(largest > 0, 1.0)


@torch.no_grad()
def draw_maps(backbone: nn.Module, images: Tensor) -> Image.Image:
    """Draw images side by side, and below each the strength of the backbone's map: white is the strongest pixel.

    The backbone (normalised images [B, 3, H, W] -> maps [B, C, h, w]) is in evaluation mode, ``images`` uint8
    [B, 3, H, W] are on its device. Raise ConfigError if it returns features without a map.
    """
    with torch.autocast(images.device.type, enabled=False):  # as in feature extraction
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


def write_picture(path: Path, picture: Image.Image) -> None:
    """Write a PNG file."""
    with replacing(path) as partial:
        picture.save(partial, format="png")
