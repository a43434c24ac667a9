"""Small data sets in Market-1501 layout, whose names are those of the files; no two images have the same colour."""

from hashlib import blake2b

from PIL import Image

from fedsim.data.market import PARTS

TRAIN, QUERY, GALLERY = PARTS


def put(path, size=(4, 8)):
    """An image, whatever its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # no checksum: names that differ in the same letters would share its value
    colour = int.from_bytes(blake2b(bytes(path), digest_size=3).digest(), "big")
    Image.new("RGB", size, colour).save(path, format="PNG")
    return path


def site(folder, train=range(1, 6), tested=range(11, 14), cameras=(1, 2)):
    """A data set in Market-1501 layout: an image of each person, camera and part."""
    for camera in cameras:
        for pid in train:
            put(folder / TRAIN / f"{pid:04d}_c{camera}s1_1.png")
        for pid in tested:
            put(folder / GALLERY / f"{pid:04d}_c{camera}s1_1.png")
    for pid in tested:
        put(folder / QUERY / f"{pid:04d}_c{cameras[0]}s1_2.png")
    return folder


def one_line(text):
    return " ".join(text.split())
