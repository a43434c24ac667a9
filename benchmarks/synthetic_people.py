"""Images per CPU-second of the synthetic people, one thread, beside decoding the same images from JPEG files.

python benchmarks/synthetic_people.py
"""

import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tabulate import tabulate

from fedsim.data import ImageFiles, Images, SyntheticReID
from fedsim.data.images import Size

SIZES = [(64, 32), (128, 64), (256, 128)]
IMAGES = 480
REPEATS = 5


def per_second(images: Images, size: Size) -> float:
    """Median over repeats of images per CPU-second."""
    rates = []
    for _ in range(REPEATS):
        start = time.process_time()
        images.decode(size)
        rates.append(len(images) / (time.process_time() - start))
    return float(np.median(rates))


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    drawn = SyntheticReID().domains()[0].train.images.take(np.arange(IMAGES))
    rows = []
    for size in SIZES:
        with tempfile.TemporaryDirectory() as folder:
            paths = [Path(folder) / f"{i}.jpg" for i in range(IMAGES)]
            for path, picture in zip(paths, drawn.decode(size).permute(0, 2, 3, 1).numpy(), strict=True):
                Image.fromarray(picture).save(path, quality=90)
            draw, read = per_second(drawn, size), per_second(ImageFiles(paths), size)
        rows.append([f"{size[0]}x{size[1]}", round(draw), round(read), f"{draw / read:.2f}"])
    print(tabulate(rows, headers=["size", "drawn / s", "read from JPEG / s", "ratio"]))


if __name__ == "__main__":
    main()
