"""Ranked lists: what each query found, as a file and as a picture."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from torch import Tensor

from fedsim.core.files import replacing
from fedsim.data.images import Images, Size
from fedsim.evaluation.counting import mask_junk
from fedsim.evaluation.labels import Ints, RetrievalLabels
from fedsim.functional.neighbours import top_of_block

__all__ = ["RankedLists", "draw_ranked_lists", "rank_lists", "write_ranked_lists"]

_FRAME = 3
"""Pixels around a picture."""


@dataclass(frozen=True)
class RankedLists:
    """The first k gallery images of each query, without junk."""

    index: Ints
    """[Q, k] gallery positions, best first; -1 where the gallery has fewer images"""
    similarity: NDArray[np.float32]
    """[Q, k] as ranked by; -inf where there is no image"""
    is_match: NDArray[np.bool_]
    """[Q, k]"""


def rank_lists(blocks: Iterable[tuple[slice, Tensor]], labels: RetrievalLabels, k: int = 50) -> RankedLists:
    """Find the first images of each query's ranked list.

    Args:
        blocks: which queries, and their similarities [b, G]: a :class:`fedsim.functional.similarity.Similarity`.
        labels: of all queries and gallery images.
        k: images per list.

    >>> import torch
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


def draw_ranked_lists(
    lists: RankedLists, query: Images, gallery: Images, size: Size, rows: int = 8, columns: int = 10
) -> Image.Image:
    """Draw some queries and what they found: green frames around matches, red ones around others.

    Args:
        lists: of all queries.
        query: the Q query images.
        gallery: the G gallery images.
        size: height and width of one picture, pixels.
        rows: queries, evenly spread over all.
        columns: images per list.
    """
    chosen = np.unique(np.linspace(0, len(lists.index) - 1, rows).round().astype(np.int64))
    height, width = size[0] + 2 * _FRAME + 2, size[1] + 2 * _FRAME + 2
    sheet = Image.new("RGB", (width * (columns + 1) + 8, height * len(chosen)), "white")
    draw = ImageDraw.Draw(sheet)
    queries = query.take(chosen).decode(size)
    for row, q in enumerate(chosen):
        _paste(sheet, draw, queries[row], (0, row * height), "black")
        found = lists.index[q, :columns]
        found = found[found >= 0]
        for column, image in enumerate(gallery.take(found).decode(size)):
            colour = "limegreen" if lists.is_match[q, column] else "red"
            _paste(sheet, draw, image, (8 + (column + 1) * width, row * height), colour)
    return sheet


def _paste(sheet: Image.Image, draw: ImageDraw.ImageDraw, image: Tensor, corner: tuple[int, int], colour: str) -> None:
    """Put a picture [3, H, W] uint8 with a frame at (left, top)."""
    left, top = corner
    height, width = image.shape[1:]
    draw.rectangle((left, top, left + width + 2 * _FRAME - 1, top + height + 2 * _FRAME - 1), fill=colour)
    sheet.paste(Image.fromarray(image.permute(1, 2, 0).numpy()), (left + _FRAME, top + _FRAME))
