"""One image file as pixels of one size.

The colours leave Pillow one by one, as they lie in the result: only one thread of a process can run Python at a time.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fedsim.data.reading import read_rgb

Pixels = NDArray[np.uint8]


def read_into(pixels: Pixels, path: Path) -> None:
    """Write a file into ``pixels`` uint8 [3, H, W], RGB, resized with antialiasing (bicubic).

    Raises:
        DataError: naming the file, if it cannot be read.
    """
    resize_into(pixels, read_rgb(path))


def resize_into(pixels: Pixels, image: Image.Image) -> None:
    """Write an RGB image into ``pixels`` uint8 [3, H, W], resized with antialiasing (bicubic)."""
    height, width = pixels.shape[1:]
    resized = image.resize((width, height), Image.Resampling.BICUBIC)
    for channel, name in zip(pixels, "RGB", strict=True):
        channel[...] = np.frombuffer(resized.tobytes("raw", name), dtype=np.uint8).reshape(height, width)
