"""Ranked lists as files and pictures, and pictures of the strength of a network's last map (paper 002, Fig. 10)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont, PngImagePlugin
from torch import Tensor, nn

from fedsim.core.errors import ConfigError
from fedsim.core.files import replacing
from fedsim.core.replaced_run import ROWS
from fedsim.data.federated import RetrievalSet
from fedsim.data.images import Images
from fedsim.data.pixels import Pixels
from fedsim.data.preview import true_to_shape
from fedsim.evaluation.backends import mask_junk
from fedsim.evaluation.feature_file import Files
from fedsim.evaluation.ranking import Ints, RetrievalLabels
from fedsim.evaluation.scorer import ScoredSet
from fedsim.functional.neighbours import top_of_block
from fedsim.functional.normalise import normalise_images
from fedsim.training.flat_model import FlatModel

_ROWS, _COLUMNS = 8, 10  # queries, and images of each list, on a sheet
_SIZE = (128, 64)  # height and width of a picture, pixels; see true_to_shape
_FRAME = 4  # pixels around a picture
_DASH = 8  # pixels of a broken frame, and between them
_APART = 12  # pixels between queries and their lists
_GAP = 4  # pixels between maps
_TEXT = 12  # height of letters, pixels
_OPACITY = 0.55  # of a map over its image
_FRAMES = {True: (0, 158, 115), False: (213, 94, 0), None: (0, 0, 0)}


@dataclass(frozen=True)
class RankedLists:
    """The first k gallery images of each query, without junk."""

    index: Ints
    """[Q, k] gallery positions, best first; -1 if the gallery has fewer images"""
    similarity: NDArray[np.float32]
    """[Q, k]; -inf if there is no image"""
    is_match: NDArray[np.bool_]
    """[Q, k]"""

    def take(self, queries: Ints) -> RankedLists:
        """Return the lists of some queries."""
        return RankedLists(self.index[queries], self.similarity[queries], self.is_match[queries])


def rank_lists(blocks: Iterable[tuple[slice | Ints, Tensor]], labels: RetrievalLabels, k: int = 50) -> RankedLists:
    """Find the first k images of each query's ranked list.

    ``blocks`` are (queries, their similarities [b, G]), such as a :class:`fedsim.functional.similarity.Similarity`;
    junk is overwritten.

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


def write_ranked_lists(path: Path, lists: RankedLists, files: Files | None = None) -> None:
    """Write ``index``, ``similarity`` and ``is_match`` to an npz file, and the names of ``files`` that index counts."""
    names: dict[str, Any] = {} if files is None else files.arrays
    with replacing(path) as partial, partial.open("wb") as file:
        np.savez(file, index=lists.index, similarity=lists.similarity, is_match=lists.is_match, **names)


def draw_ranked_lists(lists: RankedLists, labels: RetrievalLabels, query: Images, gallery: Images) -> Image.Image:
    """Draw queries, evenly spread over all Q, and the first of their lists of the G gallery images.

    Above each column stands its rank, below each image its identity and camera, as ``labels`` number them. See
    :func:`draw_rows`.
    """
    chosen = np.unique(np.linspace(0, len(lists.index) - 1, _ROWS).round().astype(np.int64))
    of_query = [caption_of(labels.query_pids[q], labels.query_camids[q]) for q in chosen]
    listed = [
        [caption_of(labels.gallery_pids[i], labels.gallery_camids[i]) for i in row] for row in lists.index[chosen]
    ]
    return draw_rows(lists.take(chosen), query.take(chosen), gallery, Captions(of_query, listed))


class Captions(NamedTuple):
    """The texts of a picture of n ranked lists of k images, each of one or more lines."""

    query: Sequence[str]
    """[n] below each query"""
    listed: Sequence[Sequence[str]]
    """[n, k] below each gallery image; those of places without an image are left out"""
    heading: str = ""
    """above all of them"""


def draw_rows(lists: RankedLists, query: Images, gallery: Images, captions: Captions) -> Image.Image:
    """Draw a row per ranked list: its query, then its first ten gallery images. ``query`` has an image per list.

    Images keep their shapes. A match has a solid frame and a tick, a wrong image a broken frame and a cross: colours
    are a help only, from a palette for colour-blind readers (Okabe and Ito, 2008). Raises DataError naming an image
    that cannot be read.
    """
    rows = []
    for number, image in enumerate(true_to_shape(query, _SIZE)):
        listed = lists.index[number, :_COLUMNS]
        listed = listed[listed >= 0]
        cells = [_Cell(image, captions.query[number], None)]
        for column, picture in enumerate(true_to_shape(gallery.take(listed), _SIZE)):
            cells.append(_Cell(picture, captions.listed[number][column], bool(lists.is_match[number, column])))
        rows.append(cells)
    num_columns = min(_COLUMNS, lists.index.shape[1])
    return _sheet(rows, ["query", *map(str, range(1, num_columns + 1))], captions.heading)


class _Cell(NamedTuple):
    """An image of a sheet."""

    picture: Image.Image
    caption: str
    """one or more lines"""
    is_match: bool | None
    """None: it is a query"""


def caption_of(pid: int, camera: int) -> str:
    """Return the text below an image: its identity, and its camera, which counts from 1 as in names of files.

    >>> caption_of(13, 0)
    '13 c1'
    """
    return f"{pid} c{camera + 1}"


def _sheet(rows: Sequence[Sequence[_Cell]], titles: Sequence[str], heading: str) -> Image.Image:
    """Draw cells in rows below their titles; the first column stands apart."""
    font, small = _font(), ImageFont.load_default(_TEXT - 1)
    cells = [cell for row in rows for cell in row]
    texts = [cells_of_row for cell in cells for cells_of_row in cell.caption.splitlines()]
    widest = max(cell.picture.width for cell in cells) + 2 * _FRAME
    width = max(widest, *(math.ceil(small.getlength(text)) for text in texts)) + _GAP
    num_lines = max(len(cell.caption.splitlines()) for cell in cells)
    height = max(cell.picture.height for cell in cells) + 2 * _FRAME + num_lines * (_TEXT + 2) + 4
    top = (_TEXT + 8) * (1 + bool(heading))
    whole = max(width * len(titles) + _APART, math.ceil(font.getlength(heading)) + _GAP)
    sheet = Image.new("RGB", (whole, top + height * len(rows)), "white")
    sheet.info[ROWS] = f"{top} {height}"
    draw = ImageDraw.Draw(sheet)
    draw.text((2, 2), heading, fill="black", font=font)
    for column, title in enumerate(titles):
        left = column * width + _APART * (column > 0)
        draw.text((left + width // 2, top - _TEXT - 6), title, fill="black", font=font, anchor="ma")
        for row, cell in (
            (row, cells_of_row[column]) for row, cells_of_row in enumerate(rows) if column < len(cells_of_row)
        ):
            _draw_cell(sheet, draw, cell, (left, top + row * height))
            below = top + row * height + cell.picture.height + 2 * _FRAME + 1
            for line_number, text in enumerate(cell.caption.splitlines()):
                place = (left + width // 2, below + line_number * (_TEXT + 2))
                draw.text(place, text, fill="black", font=small, anchor="ma")
    return sheet


def _draw_cell(sheet: Image.Image, draw: ImageDraw.ImageDraw, cell: _Cell, corner: tuple[int, int]) -> None:
    """Put a picture at (left, top), with the frame and the mark of a query, a match or a wrong image."""
    left, top = corner
    right, bottom = left + cell.picture.width + 2 * _FRAME - 1, top + cell.picture.height + 2 * _FRAME - 1
    draw.rectangle((left, top, right, bottom), fill=_FRAMES[cell.is_match])
    if cell.is_match is False:  # broken: gaps in all four sides
        for gap in range(left + _DASH, right, 2 * _DASH):
            draw.rectangle((gap, top, min(gap + _DASH - 1, right), bottom), fill="white")
        for gap in range(top + _DASH, bottom, 2 * _DASH):
            draw.rectangle((left, gap, right, min(gap + _DASH - 1, bottom)), fill="white")
    sheet.paste(cell.picture, (left + _FRAME, top + _FRAME))
    if cell.is_match is None:
        return
    x, y, half = right - 9, top + 9, 3
    draw.ellipse((x - 7, y - 7, x + 7, y + 7), fill=_FRAMES[cell.is_match], outline="white")
    if cell.is_match:
        draw.line((x - half, y, x - 1, y + half, x + half + 1, y - half), fill="white", width=2)
    else:
        draw.line((x - half, y - half, x + half, y + half), fill="white", width=2)
        draw.line((x - half, y + half, x + half, y - half), fill="white", width=2)


def map_strength(maps: Tensor) -> Tensor:
    """Return the length of each pixel's vector of channels, divided by the largest length in the image.

    From [B, C, h, w] to [B, h, w] in [0, 1]; an image whose map is 0 everywhere stays 0. Paper silent on the way from
    channels to a picture; the sum of squares is that of Zagoruyko and Komodakis, "Paying more attention to
    attention", ICLR 2017, Section 3.1. The division removes factors common to all pixels, such as gates of 1/2.

    >>> map_strength(torch.tensor([[[[3.0, 0.0]], [[4.0, 1.0]]]]))
    tensor([[[1.0000, 0.2000]]])
    """
    length = maps.square().sum(1).sqrt()
    largest = length.amax(dim=(1, 2), keepdim=True)
    return length / largest.where(largest > 0, 1.0)


@torch.no_grad()
def draw_maps(backbone: nn.Module, images: Tensor, captions: Sequence[str] = ()) -> Image.Image:
    """Draw images side by side, and below each the strength of the backbone's map, laid over the image in colours.

    The backbone (normalised images [B, 3, H, W] -> maps [B, C, h, w]) is in evaluation mode, ``images`` uint8
    [B, 3, H, W] are on its device. Images less than 128 pixels high are enlarged by a whole factor. ``captions`` stand
    below; none by default. Raises ConfigError if the backbone returns features without a map.
    """
    with torch.autocast(images.device.type, enabled=False):  # as in feature extraction
        maps = backbone(normalise_images(images))
    if maps.dim() != 4:
        raise ConfigError(f"save_maps: {type(backbone).__name__} returns features without a map; leave it out")
    factor = max(1, math.ceil(_SIZE[0] / images.shape[2]))
    size = (factor * images.shape[3], factor * images.shape[2])
    width, caption_height = size[0] + _GAP, (_TEXT + 6) * bool(captions)
    scale = _scale(len(images) * width - _GAP)
    sheet = Image.new("RGB", (len(images) * width - _GAP, 2 * size[1] + _GAP + caption_height + scale.height), "white")
    strengths, pictures = map_strength(maps).cpu().numpy(), images.permute(0, 2, 3, 1).cpu().numpy()
    for column, (pixels, strength) in enumerate(zip(pictures, strengths, strict=True)):
        # each of the map's pixels stays a rectangle: nothing is invented between them
        picture = Image.fromarray(np.ascontiguousarray(pixels)).resize(size, Image.Resampling.NEAREST)
        colours = Image.fromarray(in_colours(strength)).resize(size, Image.Resampling.NEAREST)
        sheet.paste(picture, (column * width, 0))
        sheet.paste(
            Image.blend(picture.convert("L").convert("RGB"), colours, _OPACITY), (column * width, size[1] + _GAP)
        )
        if captions:
            position = (column * width + size[0] // 2, 2 * size[1] + _GAP + 2)
            ImageDraw.Draw(sheet).text(position, captions[column], fill="black", font=_font(), anchor="ma")
    sheet.paste(scale, (0, sheet.height - scale.height))
    return sheet


def in_colours(strength: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Return colours [..., 3] of strengths [...] in [0, 1]: matplotlib's viridis, which is as light as it is strong."""
    from matplotlib import colormaps  # slow to import

    colours: NDArray[np.uint8] = colormaps["viridis"](strength, bytes=True)[..., :3]
    return np.ascontiguousarray(colours)


def _scale(width: int) -> Image.Image:
    """Draw the legend of the colours."""
    bar = min(width, 96)
    row = Image.new("RGB", (width, _TEXT + 8), "white")
    row.paste(Image.fromarray(in_colours(np.tile(np.linspace(0, 1, bar, dtype=np.float32), (8, 1)))), (0, 5))
    if width > 3 * bar:
        ImageDraw.Draw(row).text((bar + 6, 2), "map: 0 to the image's largest", fill="black", font=_font())
    return row


def _font() -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(_TEXT)


def write_picture(path: Path, picture: Image.Image) -> None:
    """Write a PNG file, with the places of its rows if it has any."""
    notes = PngImagePlugin.PngInfo()
    if ROWS in picture.info:
        notes.add_text(ROWS, picture.info[ROWS])
    with replacing(path) as partial:
        picture.save(partial, format="png", pnginfo=notes)


_MAPS = 8  # images whose maps are drawn


def write_lists(path: Path, blocks: Iterable[tuple[slice, Tensor]], labels: RetrievalLabels, data: ScoredSet) -> None:
    """Write ranked lists to ``path``.npz and a picture of some to ``path``.png; see :func:`rank_lists` for ``blocks``.

    ``labels`` are those of ``data``, or of its first random split.
    """
    query, gallery = first_images(data.images)
    lists = rank_lists(blocks, labels)
    write_ranked_lists(path.with_name(f"{path.name}.npz"), lists, files_of(data))
    write_picture(path.with_name(f"{path.name}.png"), draw_ranked_lists(lists, labels, query, gallery))


def files_of(data: ScoredSet) -> Files:
    """Return the files of a set's queries and gallery, or of its first random split."""
    paths = ([str(path or "") for path in images.locations()] for images in first_images(data.images))
    query, gallery = (np.array(names, dtype=np.str_) for names in paths)
    return Files(query, gallery)


def first_images(data: RetrievalSet) -> tuple[Images, Images]:
    """Return the images of the queries and the gallery of a set, or of its first random split."""
    query, gallery = data.query.images, data.gallery.images
    if not data.splits:
        return query, gallery
    first = data.splits[0]
    return gallery.take(first.query), gallery.take(first.gallery)


def write_maps(
    path: Path, model: FlatModel, data: ScoredSet, open_images: Callable[[Images, str, torch.device], Pixels]
) -> None:
    """Draw a model's maps of the first queries, or of the first gallery images if there are no queries, as a PNG file.

    The model is in evaluation mode. ``open_images``: images, name, device -> their pixels. Raises ConfigError if the
    backbone has no maps.
    """
    split = data.images.query if len(data.images.query) else data.images.gallery
    first = split.take(np.arange(min(_MAPS, len(split))))
    captions = [caption_of(pid, camera) for pid, camera in zip(first.pids, first.camids, strict=True)]
    [pixels] = open_images(first.images, f"maps of {data.domain}", model.device).batches([torch.arange(len(first))])
    write_picture(path, draw_maps(model.network.backbone, pixels, captions))
