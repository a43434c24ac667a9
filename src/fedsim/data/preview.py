"""Contact sheets: a few identities of each data set, seen by several cameras."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from fedsim.core.errors import DataError
from fedsim.core.files import replacing
from fedsim.core.paths import suffix_of
from fedsim.data.images import Domain, Images, Size, Split, turns

_CAPTION = 18  # pixels: height of the line above a row
_GAP = 2  # pixels between pictures
_BETWEEN = 10  # pixels between people


def true_to_shape(images: Images, size: Size) -> list[Image.Image]:
    """Decode images in their stored shape, neither stretched nor cut.

    Each becomes as large as fits into a square with the longer side of ``size`` (height, width). Images without a
    fixed size get ``size``. Raise DataError naming an image that cannot be read.
    """
    side, pictures = max(size), []
    for position, stored in enumerate(images.sizes()):
        height, width = size if stored is None else (max(1, round(side * n / max(stored))) for n in stored)
        [pixels] = images.take(np.array([position])).decode((height, width))
        pictures.append(Image.fromarray(pixels.permute(1, 2, 0).numpy()))
    return pictures


def contact_sheet(domains: list[Domain], size: Size, identities: int = 4, images: int = 4) -> Image.Image:
    """Draw one row per data set: ``identities`` people with ``images`` pictures each, of different cameras if possible.

    Training images are shown, or the gallery if there are none. ``size``: see :func:`true_to_shape`.
    """
    return join_sheets([_row(domain, size, identities, images) for domain in domains])


def write_contact_sheet(domains: list[Domain], size: Size, path: Path) -> None:
    """Write :func:`contact_sheet` to a file; raise DataError if an image cannot be read, or the file not written."""
    write_sheet(contact_sheet(domains, size), path, "--output")


def join_sheets(sheets: Sequence[Image.Image]) -> Image.Image:
    """Put sheets below each other, at the left border; raise ValueError if there are none."""
    if not sheets:
        raise ValueError("there are no sheets to join")
    tops = [0, *itertools.accumulate(sheet.height for sheet in sheets)]
    joined = Image.new("RGB", (max(sheet.width for sheet in sheets), tops[-1]), "white")
    for sheet, top in zip(sheets, tops, strict=False):
        joined.paste(sheet, (0, top))
    return joined


def write_sheet(sheet: Image.Image, path: Path, option: str) -> None:
    """Write a sheet to an image file in the format of its suffix; raise DataError, naming ``option``, if it fails."""
    try:
        kind = Image.registered_extensions().get(suffix_of(path))
        if kind not in Image.SAVE:
            raise ValueError(f"{path.suffix or 'no suffix'} is not an image format")
        with replacing(path) as partial:
            sheet.save(partial, format=kind)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot write the contact sheet ({error}); choose another {option}") from error


def _row(domain: Domain, size: Size, identities: int, images: int) -> Image.Image:
    """Draw a data set's caption, above strips of people side by side."""
    split = domain.train or domain.gallery
    role = "train" if domain.train else "unseen"
    caption = f"{domain.name} ({role}: {len(split.identities)} identities, {len(split)} images)"
    people = split.identities[split.identities > 0][:identities]
    strips = [_beside(_pictures(split, int(pid), images, size), _GAP) for pid in people]
    pictures = _beside(strips, _BETWEEN)
    font = ImageFont.load_default(12)
    width = max(pictures.width, int(font.getlength(caption)) + 8)
    row = Image.new("RGB", (width, pictures.height + _CAPTION + 6), "white")
    ImageDraw.Draw(row).text((2, 2), caption, fill="black", font=font)
    row.paste(pictures, (0, _CAPTION))
    return row


def _beside(pictures: Sequence[Image.Image], gap: int) -> Image.Image:
    """Put pictures side by side, at their upper edges."""
    width = sum(picture.width + gap for picture in pictures)
    joined = Image.new("RGB", (max(width, 1), max((picture.height for picture in pictures), default=1)), "white")
    left = 0
    for picture in pictures:
        joined.paste(picture, (left, 0))
        left += picture.width + gap
    return joined


def _pictures(split: Split, pid: int, count: int, size: Size) -> list[Image.Image]:
    """``count`` pictures of one person, camera after camera in turn."""
    index = np.flatnonzero(split.pids == pid)
    cameras = split.camids[index]
    chosen = index[np.lexsort((cameras, turns(cameras)))][:count]
    return true_to_shape(split.images.take(np.sort(chosen)), size)
