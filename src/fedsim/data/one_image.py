"""One image file as pixels of one size, with the bits of Pillow's own reading and resizing.

Only one thread of a process can run Python at a time. So this way spends less time in Python: a plain JPEG is read
without Pillow's reader of headers, and the colours leave Pillow one by one, as they lie in the result.

A plain JPEG, as nearly all images are, needs no more of its header than the size: three colours of 8 bits, no camera's
notes that could turn it, no profile, no second picture. What is not plain, or not whole, is left to
:func:`fedsim.data.reading.read_rgb`, which knows all kinds and has the words for all errors. Segments: ITU-T T.81,
B.1.1.4 and B.2; numbers are big-endian. APP0 of JFIF: ITU-T T.871, 10.1.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fedsim.data.reading import read_rgb

_LARGEST = 65_535
"""bytes of a file: Pillow hands as many to the decoder in one call, and so does this module"""
_MOST_PIXELS = 2**24
"""far below the number at which Pillow warns; a damaged header may promise more"""
_START = b"\xff\xd8"
_FRAMES = frozenset((0xC0, 0xC1, 0xC2))  # baseline, extended and progressive, with Huffman codes
_TABLES = frozenset((0xC4, 0xDB, 0xDD, 0xFE))  # DHT, DQT, DRI and comments
_JFIF, _SCAN = 0xE0, 0xDA
_FRAME = struct.Struct(">BHHB")  # bits, height, width, colours


def read_plain_jpeg(path: Path) -> Image.Image | None:
    """Return the pixels, RGB, of a file that is a plain and whole JPEG of at most 64 KB; else None."""
    try:
        state = path.stat()
        # a pipe would be waited for without end, and a device has no end
        if not stat.S_ISREG(state.st_mode) or state.st_size > _LARGEST:
            return None
        data = _read(path)
        size = plain_size(data)
        # the decoder and the arguments that Pillow's own reader calls with these bytes
        return None if size is None else Image.frombytes("RGB", size, data, "jpeg", "RGB", "")
    except Exception:  # damaged: the general way names file and reason
        return None


def _read(path: Path) -> bytes:
    """Return the first 64 KB of a file; Python's own files free the interpreter, and wait for it again, more often."""
    file = os.open(path, os.O_RDONLY)
    try:
        return os.read(file, _LARGEST)
    finally:
        os.close(file)


def plain_size(data: bytes) -> tuple[int, int] | None:
    r"""Return width and height in pixels of a plain JPEG; None if it is none.

    Raises:
        ValueError, IndexError, struct.error: if the header is damaged.

    >>> frame = b"\xff\xc0\0\x11" b"\x08\0\x80\0\x40\x03" + bytes(9)
    >>> plain_size(b"\xff\xd8" + frame + b"\xff\xda")
    (64, 128)
    >>> plain_size(b"another format") is None
    True
    """
    if not data.startswith(_START) or data.endswith(bytes(8)):
        return None
    frames = []
    for marker, content in _segments(data):
        if marker in _FRAMES:
            frames.append(content)
        elif marker not in _TABLES and not (marker == _JFIF and content.startswith(b"JFIF\0") and len(content) >= 14):
            return None
    [frame] = frames
    bits, height, width, colours = _FRAME.unpack_from(frame)
    is_plain = (bits, colours) == (8, 3) and 0 < height * width <= _MOST_PIXELS
    return (width, height) if is_plain else None


def _segments(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield marker and content of each segment before the first scan; raise ValueError or IndexError without a scan."""
    start = len(_START)
    while data[start] == 0xFF and (marker := data[start + 1]) != _SCAN:
        end = start + 2 + (data[start + 2] << 8 | data[start + 3])
        yield marker, data[start + 4 : end]
        start = end
    if data[start] != 0xFF:
        raise ValueError("neither a segment nor a scan")


Pixels = NDArray[np.uint8]


def read_into(pixels: Pixels, path: Path) -> None:
    """Write a file into ``pixels`` uint8 [3, H, W], RGB, resized with antialiasing (bicubic).

    Raises:
        DataError: naming the file, if it cannot be read.
    """
    resize_into(pixels, read_plain_jpeg(path) or read_rgb(path))


def resize_into(pixels: Pixels, image: Image.Image) -> None:
    """Write an RGB image into ``pixels`` uint8 [3, H, W], resized with antialiasing (bicubic)."""
    height, width = pixels.shape[1:]
    resized = image.resize((width, height), Image.Resampling.BICUBIC)
    for channel, name in zip(pixels, "RGB", strict=True):
        channel[...] = np.frombuffer(resized.tobytes("raw", name), dtype=np.uint8).reshape(height, width)
