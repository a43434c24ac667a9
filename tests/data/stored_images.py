"""Bytes of image files, written by hand from the specifications of their formats, without Pillow.

PNG: W3C, Portable Network Graphics (third edition), sections 5 and 11; sample depths are rescaled as in section 13.12.
TIFF: Adobe, TIFF 6.0, sections 2 to 8 and 16 (CMYK), 19 (SampleFormat). BMP: Microsoft, BITMAPFILEHEADER and
BITMAPINFOHEADER. PGM, PPM: Netpbm, pgm(5) and ppm(5); PFM: Debevec's description. EXIF: JEITA CP-3451 2.32, 4.6.
"""

import struct
import zlib

import numpy as np

GREY, RGB, PALETTE, GREY_ALPHA, RGB_ALPHA = 0, 2, 3, 4, 6  # colour types of PNG
SHORT, LONG = 3, 4  # types of tags of TIFF


def chunk(kind, data):
    """A chunk of PNG."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def packed(samples, depth):
    """Rows of samples [H, W * channels] of ``depth`` bits, each padded to whole bytes."""
    if depth >= 8:
        return [row.astype(">u2" if depth == 16 else np.uint8).tobytes() for row in samples]
    bits = (samples[..., None] >> np.arange(depth - 1, -1, -1)) & 1
    return [np.packbits(row.ravel().astype(np.uint8)).tobytes() for row in bits]


def png(samples, colour, depth, *extra, first=()):
    """``samples`` [H, W] or [H, W, C]; ``first`` and ``extra``: chunks before the header's follower and the data."""
    height, width = samples.shape[:2]
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    lines = b"".join(b"\0" + row for row in packed(samples.reshape(height, -1), depth))
    body = b"".join([chunk(b"IHDR", header), *first, *extra, chunk(b"IDAT", zlib.compress(lines)), chunk(b"IEND", b"")])
    return b"\x89PNG\r\n\x1a\n" + body


def directory(order, tags, start):
    """An image file directory at byte ``start`` of a TIFF; tags: number -> (type, values)."""
    letter = {SHORT: "H", LONG: "I"}
    table, outside = b"", b""
    after = start + 2 + 12 * len(tags) + 4
    for number, (kind, values) in sorted(tags.items()):
        data = struct.pack(f"{order}{len(values)}{letter[kind]}", *values)
        if len(data) > 4:
            place = struct.pack(f"{order}I", after + len(outside))
            outside += data
        else:
            place = data.ljust(4, b"\0")
        table += struct.pack(f"{order}HHI", number, kind, len(values)) + place
    return struct.pack(f"{order}H", len(tags)) + table + struct.pack(f"{order}I", 0) + outside


def tiff(samples, order="<", *, photometric=1, sample_format=1, orientation=None, colours=None, data=None, bits=None):
    """One strip, not compressed; ``order``: < or >; ``colours`` [3 * 256]: a palette; ``data``, ``bits``: packed."""
    height, width = samples.shape[:2]
    channels = 1 if samples.ndim == 2 else samples.shape[2]
    data = samples.astype(samples.dtype.newbyteorder(order)).tobytes() if data is None else data
    bits = 8 * samples.dtype.itemsize if bits is None else bits
    tags = {
        256: (LONG, [width]), 257: (LONG, [height]), 258: (SHORT, [bits] * channels), 259: (SHORT, [1]),
        262: (SHORT, [photometric]), 273: (LONG, [8]), 277: (SHORT, [channels]), 278: (LONG, [height]),
        279: (LONG, [len(data)]), 339: (SHORT, [sample_format] * channels),
    }  # fmt: skip
    if orientation is not None:
        tags[274] = (SHORT, [orientation])
    if colours is not None:
        tags[320] = (SHORT, colours)
    start = 8 + len(data) + len(data) % 2
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(f"{order}I", start)
    return head + data.ljust(start - 8, b"\0") + directory(order, tags, start)


def twelve_bits(samples):
    """Samples of 12 bits, two in three bytes, rows padded to whole bytes."""
    bits = (samples[..., None] >> np.arange(11, -1, -1)) & 1
    return b"".join(np.packbits(row.ravel().astype(np.uint8)).tobytes() for row in bits)


def bmp(samples, colours=None):
    """``samples`` [H, W, 3] RGB, or [H, W] with ``colours`` [256, 3]; rows go up, and are padded to four bytes."""
    height, width = samples.shape[:2]
    bits = 24 if colours is None else 8
    rows = (samples[::-1, :, ::-1] if colours is None else samples[::-1]).reshape(height, -1)
    data = b"".join(row.tobytes().ljust(-(-rows.shape[1] // 4) * 4, b"\0") for row in rows)
    palette = b"" if colours is None else np.pad(colours[:, ::-1], ((0, 0), (0, 1))).astype(np.uint8).tobytes()
    start = 54 + len(palette)
    head = b"BM" + struct.pack("<IHHI", start + len(data), 0, 0, start)
    info = struct.pack("<IiiHHIIiiII", 40, width, height, 1, bits, 0, len(data), 2835, 2835, 0, 0)
    return head + info + palette + data


def netpbm(samples, largest):
    """PGM or PPM, binary."""
    kind = "P5" if samples.ndim == 2 else "P6"
    head = f"{kind}\n{samples.shape[1]} {samples.shape[0]}\n{largest}\n".encode()
    return head + samples.astype(">u2" if largest > 255 else np.uint8).tobytes()


def pfm(samples, order="<"):
    """Portable float map, whose rows go up; a negative scale means that the lowest byte comes first."""
    head = f"Pf\n{samples.shape[1]} {samples.shape[0]}\n{-1.0 if order == '<' else 1.0}\n".encode()
    return head + samples[::-1].astype(f"{order}f4").tobytes()


def exif(orientation, order="<"):
    """EXIF's TIFF structure with one tag, the orientation."""
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(f"{order}I", 8)
    return head + directory(order, {274: (SHORT, [orientation])}, 8)


def with_app1(jpeg, notes):
    """A JPEG with EXIF, as its first segment after SOI (EXIF 2.32, 4.5.4)."""
    assert jpeg[:2] == b"\xff\xd8"
    body = b"Exif\0\0" + notes
    return jpeg[:2] + b"\xff\xe1" + struct.pack(">H", len(body) + 2) + body + jpeg[2:]


def shown(stored, orientation):
    """The picture [H, W, C] that is meant: row 0 and column 0 are at the sides that EXIF 2.32 lists for the tag."""
    turned = stored.transpose(1, 0, 2) if orientation > 4 else stored
    return {
        1: turned, 2: turned[:, ::-1], 3: turned[::-1, ::-1], 4: turned[::-1],
        5: turned, 6: turned[:, ::-1], 7: turned[::-1, ::-1], 8: turned[::-1],
    }[orientation]  # fmt: skip
