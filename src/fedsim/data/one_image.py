"""One image file as pixels of one size, in two ways with the same bits: the obvious one, and the fast one of a run.

Only one thread of a process can run Python at a time. So the fast way spends less time in Python: a plain JPEG is read
without Pillow's reader of headers, and the colours leave Pillow one by one, as they lie in the result.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fedsim.data.plain_jpeg import read_plain_jpeg
from fedsim.data.reading import read_rgb

Pixels = NDArray[np.uint8]


def read_obvious(path: Path, size: tuple[int, int]) -> Pixels:
    """Return a file as uint8 [3, H, W], RGB, resized with antialiasing (bicubic) to ``size`` (H, W).

    Raises:
        DataError: naming the file, if it cannot be read.
    """
    image = read_rgb(path).resize((size[1], size[0]), Image.Resampling.BICUBIC)
    return np.asarray(image).transpose(2, 0, 1)


def read_into(pixels: Pixels, path: Path) -> None:
    """Write what :func:`read_obvious` returns into ``pixels`` uint8 [3, H, W]; errors are the same."""
    resize_into(pixels, read_plain_jpeg(path) or read_rgb(path))


def resize_into(pixels: Pixels, image: Image.Image) -> None:
    """Write an RGB image into ``pixels`` uint8 [3, H, W], resized with antialiasing (bicubic)."""
    height, width = pixels.shape[1:]
    resized = image.resize((width, height), Image.Resampling.BICUBIC)
    for channel, name in zip(pixels, "RGB", strict=True):
        channel[...] = np.frombuffer(resized.tobytes("raw", name), dtype=np.uint8).reshape(height, width)
