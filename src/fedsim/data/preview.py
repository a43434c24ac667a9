"""Contact sheets: a few identities of each data set, seen by several cameras."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from fedsim.core.errors import DataError
from fedsim.data.images import Domain, Size, Split, turns

_MARGIN = 16


def contact_sheet(domains: list[Domain], size: Size, identities: int = 4, images: int = 4) -> Image.Image:
    """Draw one row per data set: ``identities`` people with ``images`` pictures each, of different cameras if possible.

    Training images are shown, or the gallery if there are none. ``size``: height and width of a picture, pixels.
    """
    height, width = size
    sheet = Image.new("RGB", (identities * (images * width + 4), len(domains) * (height + _MARGIN)), "white")
    draw = ImageDraw.Draw(sheet)
    for row, domain in enumerate(domains):
        split = domain.train or domain.gallery
        top = row * (height + _MARGIN)
        kind = "train" if domain.train else "unseen"
        caption = f"{domain.name} ({kind}: {len(split.identities)} identities, {len(split)} images)"
        draw.text((2, top + 2), caption, fill="black")
        people = split.identities[split.identities > 0][:identities]
        for column, pid in enumerate(people):
            strip = _pictures(split, int(pid), images, size)
            sheet.paste(Image.fromarray(strip), (column * (images * width + 4), top + _MARGIN))
    return sheet


def write_contact_sheet(domains: list[Domain], size: Size, path: Path) -> None:
    """Write :func:`contact_sheet` to an image file; raise DataError if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        contact_sheet(domains, size).save(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot write the contact sheet ({error}); choose another --output") from error


def _pictures(split: Split, pid: int, count: int, size: Size) -> NDArray[np.uint8]:
    """``count`` pictures of one person side by side, [H, count * W, 3], camera after camera in turn."""
    index = np.flatnonzero(split.pids == pid)
    cameras = split.camids[index]
    chosen = index[np.lexsort((cameras, turns(cameras)))][:count]
    pictures = split.take(np.sort(chosen)).images.decode(size)
    blank = torch.full((count - len(pictures), *pictures.shape[1:]), 255, dtype=torch.uint8)
    strip: NDArray[np.uint8] = torch.cat([*pictures.permute(0, 2, 3, 1), *blank.permute(0, 2, 3, 1)], dim=1).numpy()
    return strip
