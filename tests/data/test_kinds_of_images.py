"""A table of kinds of image files, with the pixels that their owners mean: computed here, without fedsim and Pillow.

Modes and depths are written by hand (``stored_images.py``). JPEG and WebP are encoded by Pillow: their stored pixels
are those that Pillow decodes, and the table turns them.
"""

import io

import numpy as np
import pytest
from PIL import Image
from stored_images import (
    GREY,
    GREY_ALPHA,
    PALETTE,
    RGB,
    RGB_ALPHA,
    bmp,
    chunk,
    exif,
    netpbm,
    pfm,
    png,
    shown,
    tiff,
    twelve_bits,
    with_app1,
)  # fmt: skip

from fedsim.data.images import ImageFiles
from fedsim.data.leftovers import SUFFIXES

H, W = 6, 4
RNG = np.random.default_rng(0)
PICTURE = RNG.integers(0, 256, (H, W, 3), dtype=np.uint8)
SHADES = RNG.integers(0, 256, (H, W), dtype=np.uint8)
ALPHA = RNG.integers(0, 256, (H, W), dtype=np.uint8)
WORDS = RNG.integers(0, 65_536, (H, W), dtype=np.uint16)
COLOURS = RNG.integers(0, 256, (256, 3), dtype=np.uint8)


def grey(values):
    """[H, W] of 0 to 255, as RGB."""
    return np.repeat(np.asarray(values, dtype=np.uint8)[..., None], 3, axis=2)


def scaled(values, white):
    """Rounded to the nearest of 256 shades."""
    return grey(np.floor(values.astype(np.float64) / white * 255 + 0.5))


def with_ends(values, white):
    """The same values with black and white among them, which fix the range of an image of integers or floats."""
    ends = values.copy()
    ends[0, 0], ends[-1, -1] = 0, white
    return ends


def encoded(pixels, form, mode="RGB", **options):
    file = io.BytesIO()
    Image.frombytes(mode, pixels.shape[1::-1], pixels.tobytes()).save(file, form, **options)
    return file.getvalue()


def decoded_by_pillow(data):
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def low(depth):
    """Samples of few bits."""
    return RNG.integers(0, 2**depth, (H, W))


TABLE = {}  # kind -> (name of the file, bytes, pixels)


def kind(name, suffix, data, pixels):
    assert name not in TABLE, name
    TABLE[name] = (f"image{suffix}", data, pixels)


# -- PNG: every colour type and depth of its table 11.1 ----------------------------------------------------------------

for depth in (1, 2, 4):
    samples = low(depth)
    kind(f"png grey {depth} bit", ".png", png(samples, GREY, depth), grey(samples * (255 // (2**depth - 1))))
    kind(f"png palette {depth} bit", ".png",
         png(samples, PALETTE, depth, chunk(b"PLTE", COLOURS[: 2**depth].tobytes())), COLOURS[samples])  # fmt: skip
PLTE = chunk(b"PLTE", COLOURS.tobytes())
kind("png grey 8 bit", ".png", png(SHADES, GREY, 8), grey(SHADES))
kind("png grey 16 bit", ".png", png(WORDS, GREY, 16), scaled(WORDS, 65_535))
kind("png grey 16 bit, dark", ".png", png(WORDS // 300, GREY, 16), scaled(WORDS // 300, 65_535))
kind("png grey 16 bit, black", ".png", png(WORDS * 0, GREY, 16), grey(SHADES * 0))
kind("png grey 16 bit with a transparent shade", ".png",
     png(WORDS, GREY, 16, chunk(b"tRNS", WORDS[0, 0].astype(">u2").tobytes())), scaled(WORDS, 65_535))  # fmt: skip
kind("png rgb 8 bit", ".png", png(PICTURE, RGB, 8), PICTURE)
kind("png rgb 16 bit", ".png", png(PICTURE * np.uint16(257), RGB, 16), PICTURE)
kind("png palette 8 bit", ".png", png(SHADES, PALETTE, 8, PLTE), COLOURS[SHADES])
kind("png palette with alpha", ".png", png(SHADES, PALETTE, 8, PLTE, chunk(b"tRNS", ALPHA.tobytes())), COLOURS[SHADES])
kind("png grey and alpha 8 bit", ".png", png(np.dstack([SHADES, ALPHA]), GREY_ALPHA, 8), grey(SHADES))
kind("png grey and alpha 16 bit", ".png",
     png(np.dstack([SHADES, ALPHA]) * np.uint16(257), GREY_ALPHA, 16), grey(SHADES))  # fmt: skip
kind("png rgb and alpha 8 bit", ".png", png(np.dstack([PICTURE, ALPHA]), RGB_ALPHA, 8), PICTURE)
kind("png rgb and alpha 16 bit", ".png",
     png(np.dstack([PICTURE, ALPHA]) * np.uint16(257), RGB_ALPHA, 16), PICTURE)  # fmt: skip

# -- TIFF --------------------------------------------------------------------------------------------------------------

for order in "<>":
    kind(f"tiff rgb 8 bit {order}", ".tif", tiff(PICTURE, order, photometric=2), PICTURE)
    kind(f"tiff rgb 16 bit {order}", ".tif", tiff(PICTURE * np.uint16(257), order, photometric=2), PICTURE)
    kind(f"tiff grey 8 bit {order}", ".tif", tiff(SHADES, order), grey(SHADES))
    kind(f"tiff grey 8 bit, white is 0 {order}", ".tif", tiff(SHADES, order, photometric=0), grey(255 - SHADES))
    kind(f"tiff grey 16 bit {order}", ".tif", tiff(WORDS, order), scaled(WORDS, 65_535))
    signed = (WORDS // 2).astype(np.int16)
    kind(f"tiff signed 16 bit {order}", ".tif", tiff(signed, order, sample_format=2), scaled(signed, 32_767))
    for white in (255, 65_535, 2**31 - 1):
        values = with_ends(RNG.integers(0, white, (H, W)).astype(np.int32), white)
        kind(
            f"tiff signed 32 bit to {white} {order}",
            ".tif",
            tiff(values, order, sample_format=2),
            scaled(values, white),
        )
    for white in (1, 255, 65_535):
        values = with_ends(RNG.random((H, W), dtype=np.float32) * np.float32(white), white)
        kind(f"tiff float to {white} {order}", ".tif", tiff(values, order, sample_format=3), scaled(values, white))
    kind(f"tiff float, white is 0 {order}", ".tif", tiff(values, order, sample_format=3, photometric=0),
         255 - scaled(values, 65_535))  # fmt: skip
for white in (255, 65_535, 2**32 - 1):
    values = with_ends(RNG.integers(0, white, (H, W)).astype(np.uint32), white)
    kind(f"tiff unsigned 32 bit to {white}", ".tiff", tiff(values), scaled(values, white))
kind("tiff grey 16 bit, white is 0", ".tif", tiff(WORDS, photometric=0), 255 - scaled(WORDS, 65_535))
kind("tiff grey 12 bit", ".tif", tiff(WORDS >> 4, data=twelve_bits(WORDS >> 4), bits=12), scaled(WORDS >> 4, 4095))
kind("tiff palette", ".tif",
     tiff(SHADES, photometric=3, colours=(COLOURS.T.astype(int) * 257).ravel().tolist()), COLOURS[SHADES])  # fmt: skip
CMYK = np.dstack([PICTURE, SHADES * 0])
kind("tiff cmyk", ".tif", tiff(CMYK, photometric=5), 255 - PICTURE)

# -- other formats, also below the suffix of another one ---------------------------------------------------------------

kind("bmp rgb", ".bmp", bmp(PICTURE), PICTURE)
kind("bmp palette", ".bmp", bmp(SHADES, COLOURS), COLOURS[SHADES])
kind("pgm 8 bit", ".png", netpbm(SHADES, 255), grey(SHADES))
kind("pgm 16 bit", ".png", netpbm(WORDS, 65_535), scaled(WORDS, 65_535))
kind("pgm 16 bit, dark", ".png", netpbm(WORDS // 300, 65_535), scaled(WORDS // 300, 65_535))
kind("ppm", ".jpg", netpbm(PICTURE, 255), PICTURE)
FLOATS = with_ends(RNG.random((H, W), dtype=np.float32), 1)
kind("pfm <", ".tif", pfm(FLOATS), scaled(FLOATS, 1))
kind("pfm >", ".tif", pfm(FLOATS, ">"), scaled(FLOATS, 1))
for suffix in sorted({*SUFFIXES, *map(str.upper, SUFFIXES)}):
    kind(f"png called {suffix}", suffix, png(PICTURE, RGB, 8), PICTURE)

# -- orientation -------------------------------------------------------------------------------------------------------

JPEG, WEBP = encoded(PICTURE, "JPEG", quality=95), encoded(PICTURE, "WEBP", lossless=True)
for tag in range(1, 9):
    kind(f"jpeg orientation {tag}", ".jpg", with_app1(JPEG, exif(tag)), shown(decoded_by_pillow(JPEG), tag))
    kind(f"jpeg orientation {tag} >", ".jpg", with_app1(JPEG, exif(tag, ">")), shown(decoded_by_pillow(JPEG), tag))
    kind(f"png orientation {tag}", ".png", png(PICTURE, RGB, 8, chunk(b"eXIf", exif(tag))), shown(PICTURE, tag))
    kind(f"png grey 16 bit orientation {tag}", ".png",
         png(WORDS, GREY, 16, chunk(b"eXIf", exif(tag))), shown(scaled(WORDS, 65_535), tag))  # fmt: skip
    kind(f"tiff orientation {tag}", ".tif", tiff(PICTURE, photometric=2, orientation=tag), shown(PICTURE, tag))
    kind(f"tiff grey 16 bit orientation {tag}", ".tif", tiff(WORDS, orientation=tag), shown(scaled(WORDS, 65_535), tag))
    kind(f"tiff grey 8 bit orientation {tag}", ".tif", tiff(SHADES, orientation=tag), shown(grey(SHADES), tag))
    kind(f"tiff cmyk orientation {tag}", ".tif", tiff(CMYK, photometric=5, orientation=tag), shown(255 - PICTURE, tag))
    kind(f"webp orientation {tag}", ".webp",
         encoded(PICTURE, "WEBP", lossless=True, exif=b"Exif\0\0" + exif(tag)), shown(PICTURE, tag))  # fmt: skip
for tag in (0, 9, 65_535):  # the standard has 1 to 8
    kind(f"jpeg orientation {tag}", ".jpg", with_app1(JPEG, exif(tag)), decoded_by_pillow(JPEG))
kind("jpeg with damaged notes of the camera", ".jpg", with_app1(JPEG, b"II*\0\xff\xff"), decoded_by_pillow(JPEG))
kind("jpeg with notes that are none", ".jpg", with_app1(JPEG, b"no notes"), decoded_by_pillow(JPEG))
CMYK_JPEG = encoded(CMYK, "JPEG", mode="CMYK")
kind("jpeg cmyk", ".jpg", CMYK_JPEG, decoded_by_pillow(CMYK_JPEG))


@pytest.mark.parametrize("name", TABLE)
def test_a_kind_of_file_has_the_pixels_that_its_owner_means(tmp_path, name):
    file, data, pixels = TABLE[name]
    (tmp_path / file).write_bytes(data)
    files = ImageFiles([tmp_path / file])
    assert files.sizes() == [pixels.shape[:2]]
    assert np.array_equal(files.decode(pixels.shape[:2])[0].permute(1, 2, 0).numpy(), pixels)
