"""One image file as its owner means it: upright, and as 8-bit RGB whatever depth it is stored in.

Pillow's conversion to RGB cuts deep greys off at 255. Here they are scaled by their range:

16 bits: 0 to 65,535 (12-bit TIFF: 0 to 4,095; signed: 0 to 32,767), as PNG and TIFF define it.
32-bit integers: the smallest of 0 to 255, 0 to 65,535 and the range of the type that has all values of the image.
floats: 0 to 1, 0 to 255 or 0 to 65,535, likewise.

Other images are converted by Pillow: palettes, CMYK, and alpha, which is dropped.
"""

from __future__ import annotations

import os
import stat
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, UnidentifiedImageError

from fedsim.core.errors import DataError

_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""EXIF orientation -> the turn that makes the picture upright (EXIF 2.32, tag 0x0112)"""
_LYING = (5, 6, 7, 8)
_BITS, _PHOTOMETRIC, _FORMAT = 258, 262, 339  # tags of TIFF 6.0
_WHITE_IS_ZERO, _UNSIGNED = 0, 1  # values of the last two
_BYTE, _WORD = 255, 65_535
_FEWEST = 8  # bytes: no image has fewer
_END_MARKS = {b"\x89PNG": b"IEND\xaeB`\x82", b"\xff\xd8": b"\xff\xd9"}  # PNG 5.6; ITU-T T.81, B.2.1

Values = NDArray[Any]


class _Depth(NamedTuple):
    """The numbers of a grey image, and the number that is white."""

    values: Values
    white: float


class _Quiet:
    """Silences Pillow's warnings, of several lines, on notes and palettes that do not change the pixels.

    The filters of warnings belong to the process. So the first of the threads and blocks that are inside sets one, and
    the last one restores the others; each by itself would restore what it saw, also the filter of another thread.
    """

    def __init__(self) -> None:
        self._lock, self._inside = threading.Lock(), 0
        self._saved = warnings.catch_warnings()

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._saved = warnings.catch_warnings()
                self._saved.__enter__()
                warnings.filterwarnings("ignore", module=r"PIL\.")
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._saved.__exit__(None, None, None)


QUIET = _Quiet()
"""a block in which Pillow does not warn; around many files, it saves the change of the filters for each of them"""


@contextmanager
def opened(path: Path, remedy: str = "replace or remove it") -> Iterator[Image.Image]:
    """Open a file, whose pixels are read later; errors, also in the block, become a DataError that names the file."""
    try:
        # a pipe would be waited for without end, and a device has no end
        state = path.stat()
        if not stat.S_ISREG(state.st_mode):
            raise OSError("it is a folder, a pipe or a device, not a file")
        if state.st_size < _FEWEST:
            raise OSError(f"it has only {state.st_size} bytes" if state.st_size else "the file is empty")
        # of a path, Pillow maps the pixels of some TIFF into memory, and mixes up the rows of those that lie
        with QUIET, path.open("rb") as file:
            _check_end(file)
            with Image.open(file) as image:
                yield image
    except DataError:
        raise
    except PermissionError as error:
        raise DataError(
            f"{path}: cannot read this image ({error.strerror}); give yourself the right to read it"
        ) from error
    except UnidentifiedImageError as error:
        raise DataError(f"{path}: cannot read this image (Pillow lacks its format or depth); {remedy}") from error
    except Exception as error:  # damaged files raise nearly every type, also RuntimeError and IndexError
        reason = str(error) or type(error).__name__
        raise DataError(f"{path}: cannot read this image ({reason}); {remedy}") from error


def _check_end(file: BinaryIO) -> None:
    """Raise OSError if a PNG or JPEG ends in zeros before its end mark, as a copy that was broken off leaves it.

    The decoders read on over zeros. The other formats have no mark.
    """
    file.seek(-_FEWEST, os.SEEK_END)
    ends_in_zeros = not any(file.read())
    file.seek(0)
    if ends_in_zeros:
        content = file.read()
        file.seek(0)
        mark = next((mark for start, mark in _END_MARKS.items() if content.startswith(start)), b"")
        if not (written := content.rstrip(b"\0")).endswith(mark):
            raise OSError(f"its last {len(content) - len(written):,} bytes are zeros; it was not copied whole")


def read_rgb(path: Path) -> Image.Image:
    """Return an image upright as RGB, 8 bits a channel; raise DataError naming the file if it cannot be read."""
    with opened(path) as image:
        return upright_rgb(image)


def upright_rgb(image: Image.Image) -> Image.Image:
    """Return an opened picture upright as RGB, 8 bits a channel; raise ValueError or OSError if it is damaged."""
    image.load()
    if 0 in image.size:
        raise ValueError("it has no pixels")
    turn = _TURNS.get(_orientation(image))  # after loading: Pillow itself turns TIFF then
    is_deep = image.mode in ("I", "F") or image.mode.startswith("I;16")
    rgb = (_grey(image) if is_deep else image).convert("RGB")
    return rgb if turn is None else rgb.transpose(turn)


def upright_size(path: Path) -> tuple[int, int]:
    """Return height and width in pixels, as the image is shown; raise DataError if its beginning cannot be read."""
    with opened(path) as image:
        is_turned = image.format != "TIFF" and _orientation(image) in _LYING  # of TIFF the size is turned already
        return (image.width, image.height) if is_turned else (image.height, image.width)


def problem_of(path: Path) -> str | None:
    """Return the reason why a file cannot be opened as an image, if there is one; its pixels are not decoded."""
    try:
        with opened(path):
            return None
    except DataError as error:
        return str(error)


def _orientation(image: Image.Image) -> int:
    """Return the EXIF orientation; 1, upright, if there is none, or the notes of the camera are damaged."""
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation)
    except Exception:  # the pixels are whole
        return 1
    return orientation if isinstance(orientation, int) else 1


def _grey(image: Image.Image) -> Image.Image:
    """Scale a deep grey image to 8 bits, rounded to the nearest (PNG specification, sample depth rescaling)."""
    values, white = _depth_of(image)
    scaled = np.floor(np.clip(values.astype(np.float64) / white, 0, 1) * _BYTE + 0.5).astype(np.uint8)
    # Pillow inverts such TIFF of 8 bits, and no others
    return Image.fromarray(_BYTE - scaled if _tag(image, _PHOTOMETRIC) == _WHITE_IS_ZERO else scaled)


def _depth_of(image: Image.Image) -> _Depth:
    values = np.asarray(image)
    if image.mode == "F":
        return _float_depth(values)
    bits = _tag(image, _BITS)
    if image.mode.startswith("I;16"):
        return _Depth(values, 4095 if bits == 12 else _WORD)
    if image.format == "PPM":  # Pillow has scaled it
        return _Depth(values, _WORD)
    if bits == 32 and _tag(image, _FORMAT) in (None, _UNSIGNED):
        return _integer_depth(values.view(np.uint32), 2**32 - 1)
    return _Depth(_not_negative(values), 2**15 - 1) if bits == 16 else _integer_depth(values, 2**31 - 1)


def _tag(image: Image.Image, number: int) -> int | None:
    """Return a number among the tags of TIFF; None for other formats, or if it is missing."""
    value = getattr(image, "tag_v2", {}).get(number)
    first = value[0] if isinstance(value, tuple) and value else value
    return first if isinstance(first, int) else None


def _integer_depth(values: Values, largest: int) -> _Depth:
    top = _not_negative(values).max(initial=0)
    return _Depth(values, next(white for white in (_BYTE, _WORD, largest) if top <= white))


def _float_depth(values: Values) -> _Depth:
    top = _not_negative(values).max(initial=0)
    # 1.02 is neither: from 0 to 1 with a bright spot, or a black image from 0 to 255
    if not np.isfinite(values).all() or 1 < top < 2 or top > _WORD:
        raise ValueError(
            f"its floats reach {top:g}, and only 0 to 1, 0 to 255 and 0 to 65535 are known ranges; "
            "save it with 8 or 16 bits"
        )
    return _Depth(values, next(white for white in (1, _BYTE, _WORD) if top <= white))


def _not_negative(values: Values) -> Values:
    if (lowest := values.min(initial=0)) < 0:
        raise ValueError(f"its values begin at {lowest:g}, and black is 0; save it with 8 or 16 bits")
    return values
