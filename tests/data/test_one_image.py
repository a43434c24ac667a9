"""The fast way to read an image file has the bits and the errors of the obvious one, and plain JPEGs do take it."""

import io
import os
import struct

import numpy as np
import pytest
from PIL import Image
from stored_images import exif, with_app1
from test_damaged_images import FILES, damage
from test_kinds_of_images import TABLE

from fedsim.core.errors import DataError
from fedsim.data import one_image
from fedsim.data.images import ImageArray, ImageFiles
from fedsim.data.one_image import read_into, read_plain_jpeg
from fedsim.data.reading import read_rgb

RNG = np.random.default_rng(0)
PICTURE = RNG.integers(0, 256, (48, 20, 3), dtype=np.uint8)
SIZES = ((48, 20), (96, 40), (17, 9), (1, 1))


def jpeg(mode="RGB", picture=PICTURE, **options):
    file = io.BytesIO()
    Image.fromarray(picture).convert(mode).save(file, "JPEG", **options)
    return file.getvalue()


def with_segment(data, marker, content):
    """A JPEG with one more segment after SOI."""
    return data[:2] + bytes((0xFF, marker)) + struct.pack(">H", len(content) + 2) + content + data[2:]


PLAIN = {
    "baseline": jpeg(), "progressive": jpeg(progressive=True), "optimised": jpeg(optimize=True),
    "4:4:4": jpeg(subsampling=0), "4:2:2": jpeg(subsampling=1), "poor": jpeg(quality=1), "best": jpeg(quality=100),
    "restarts": jpeg(restart_marker_blocks=1), "comment": jpeg(comment=b"\xff\xd9"), "density": jpeg(dpi=(72, 72)),
    "no JFIF": jpeg()[:2] + jpeg()[20:], "bytes behind": jpeg() + b"behind",
}  # fmt: skip
TABLES = jpeg()[: jpeg().index(b"\xff\xda")]  # and the frame
OTHER = {
    "grey": jpeg("L"), "cmyk": jpeg("CMYK"), "rgb stored": jpeg(keep_rgb=True), "profile": jpeg(icc_profile=b"colours"),
    "upright": with_app1(jpeg(), exif(1)), "turned": with_app1(jpeg(), exif(6)),
    "turned progressive": with_app1(jpeg(progressive=True), exif(8)),
    "turned by XMP": with_segment(jpeg(), 0xE1, b'http://ns.adobe.com/xap/1.0/\0<x tiff:Orientation="3"/>'),
    "turned behind the tables": jpeg()[:20] + with_app1(b"\xff\xd8" + jpeg()[20:], exif(3))[2:],
    "turned behind junk": TABLES + b"junk" + with_app1(b"\xff\xd8", exif(6))[2:] + jpeg()[len(TABLES) :],
    "two pictures": with_segment(jpeg(), 0xE2, b"MPF\0" + exif(1)),
    "short JFIF": with_segment(jpeg(), 0xE0, b"JFIF\0"),
    "foreign APP0": with_segment(jpeg(), 0xE0, b"AVI1" + bytes(14)),
    "filled": jpeg()[:2] + b"\xff" + jpeg()[2:], "junk": jpeg()[:20] + b"junk" + jpeg()[20:],
    "two frames": with_segment(jpeg(), 0xC0, jpeg()[jpeg().index(b"\xff\xc0") + 4 :][:15]),
    "12 bits": jpeg().replace(b"\xff\xc0\0\x11\x08", b"\xff\xc0\0\x11\x0c"),
    "lossless": jpeg().replace(b"\xff\xc0", b"\xff\xc3"),
    "no height": jpeg().replace(b"\x11\x08\0\x30", b"\x11\x08\0\0"),
    "huge": jpeg().replace(b"\x11\x08\0\x30\0\x14", b"\x11\x08\xff\xff\xff\xff"),
    "no tables": jpeg().replace(b"\xff\xdb", b"\xff\xfe"), "half": jpeg()[: len(jpeg()) // 2], "no end": jpeg()[:-2],
    "header": jpeg()[:300], "two bytes": b"\xff\xd8", "start": b"\xff\xd8\xff", "marker": b"\xff\xd8\xff\xe0",
    "endless": b"\xff\xd8\xff\xe0\0\0", "empty": b"", "text": b"<html>",
    "large": jpeg(picture=RNG.integers(0, 256, (256, 256, 3), dtype=np.uint8), quality=100),
}  # fmt: skip
CUT = {"fewer rows than its header says": jpeg().replace(b"\x11\x08\0\x30", b"\x11\x08\0\x90")}  # Pillow pads it


def outcome(read, path, size):
    """The pixels, or the line of the error."""
    try:
        return read(path, size)
    except DataError as error:
        return str(error)


def obvious(path, size):
    return np.asarray(read_rgb(path).resize(size[::-1], Image.Resampling.BICUBIC)).transpose(2, 0, 1)


def fast(path, size):
    pixels = np.full((3, *size), 77, dtype=np.uint8)
    read_into(pixels, path)
    return pixels


def agree(path, size):
    expected, result = outcome(obvious, path, size), outcome(fast, path, size)
    if isinstance(expected, str) or isinstance(result, str):
        return expected == result
    return expected.shape == result.shape and np.array_equal(expected, result)


@pytest.mark.parametrize("name", [*PLAIN, *OTHER, *CUT, *TABLE])
@pytest.mark.filterwarnings("ignore:.*:UserWarning:PIL")
def test_both_ways_agree_on_every_kind_of_file(tmp_path, name):
    file, data = TABLE[name][:2] if name in TABLE else ("a.jpg", {**PLAIN, **OTHER, **CUT}[name])
    path = tmp_path / file
    path.write_bytes(data)
    for size in SIZES:
        assert agree(path, size), size


@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_jpeg_is_read_without_pillows_reader_of_headers(tmp_path, monkeypatch, name):
    """Else nothing would be faster, and no other test would fail."""
    path = tmp_path / "a.jpg"
    path.write_bytes(PLAIN[name])
    expected = np.asarray(Image.open(io.BytesIO(PLAIN[name])))
    monkeypatch.delattr(Image, "open")
    assert np.array_equal(ImageFiles([path]).decode((48, 20))[0].permute(1, 2, 0).numpy(), expected)


@pytest.mark.parametrize("name", OTHER)
def test_what_is_not_plain_or_not_whole_is_left_to_the_general_way(tmp_path, name):
    path = tmp_path / "a.jpg"
    path.write_bytes(OTHER[name])
    assert read_plain_jpeg(path) is None


@pytest.mark.parametrize("name", ["baseline", "progressive", "restarts", "4:4:4", "comment"])
def test_both_ways_agree_on_damage_drawn_at_random(tmp_path, name):
    rng, path = np.random.default_rng([2, *name.encode()]), tmp_path / "a.jpg"
    refused, read = 0, 0
    for number in range(200):
        path.write_bytes(damage(PLAIN[name], rng))
        assert agree(path, (8, 4)), number
        is_refused = isinstance(outcome(fast, path, (8, 4)), str)
        refused, read = refused + is_refused, read + (not is_refused and read_plain_jpeg(path) is not None)
    assert min(refused, read) > 5  # both happen


@pytest.mark.parametrize("form", FILES)
def test_both_ways_agree_on_damaged_files_of_all_formats(tmp_path, form):
    rng, path = np.random.default_rng([3, *form.encode()]), tmp_path / "a.png"
    for number in range(20):
        path.write_bytes(damage(FILES[form], rng))
        assert agree(path, (8, 4)), number


@pytest.mark.parametrize("kind", ["pipe", "folder", "absent"])
def test_what_is_no_file_is_left_to_the_general_way_at_once(tmp_path, kind):
    path = tmp_path / "a.jpg"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    assert read_plain_jpeg(path) is None
    assert agree(path, (8, 4))


def test_the_largest_plain_file_is_one_that_pillow_decodes_in_one_call():
    from PIL import ImageFile

    assert one_image._LARGEST < ImageFile.MAXBLOCK


@pytest.mark.parametrize("size", SIZES)
def test_images_in_memory_have_the_bits_of_pillows_resizing(size):
    expected = Image.fromarray(PICTURE).resize(size[::-1], Image.Resampling.BICUBIC)
    pixels = ImageArray(PICTURE[None]).decode(size)[0]
    assert np.array_equal(pixels.permute(1, 2, 0).numpy(), np.asarray(expected))
