"""How fast images come: fedsim's data path against torchvision's ImageFolder and DataLoader, on the same JPEGs.

Both resize to 256x128, pad by 10 and crop, mirror, normalise and erase, in batches of 32, in the order of a random
permutation. One process, one thread, nothing else; the versions take turns, and a figure is the median of the rounds.
"images per CPU-second" counts the time of the process and of its workers.

    python benchmarks/data_path.py                  # the table
    python benchmarks/data_path.py --workers 1      # ImageFolder with worker processes, and cache: none
    python benchmarks/data_path.py --device cuda    # images per second on a GPU
    python benchmarks/data_path.py --start          # decoding at the start, by one thread and by one on each core
"""

from __future__ import annotations

import argparse
import hashlib
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tabulate import tabulate
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

from fedsim.core.allocator import keep_freed_memory
from fedsim.core.room import usable_cores
from fedsim.data import decoded
from fedsim.data.augmentation import Augmentation
from fedsim.data.decoded import Wanted
from fedsim.data.images import ImageFiles, Index, Size, Split
from fedsim.data.pixels import HeldPixels, Pixels, ReadPixels, read_all
from fedsim.data.reading import read_rgb
from fedsim.data.synthetic import SyntheticReID
from fedsim.functional.normalise import IMAGENET_MEAN, IMAGENET_STD

SIZE, BATCH = (256, 128), 32
AUGMENTATION = Augmentation(pad=10, flip=0.5, erase=0.5)
TARGET = 4.0
"""smallest ratio of the cached path to ImageFolder"""
START_TARGET = 1.8
"""smallest ratio of two threads to one at the start, on two cores"""
ON_DEVICE_TARGET = 20_000
"""images per second on a GPU"""


def write_images(root: Path, count: int) -> list[Path]:
    """JPEGs of Market-1501's size, 128x64, one folder per identity."""
    train = SyntheticReID(clients=1, unseen=0, scale=4.0).domains()[0].train
    assert train is not None
    pixels = torch.cat([part.decode((128, 64)) for part in train.images.chunks()])
    paths = []
    for number in range(count):
        path = root / f"{number // 20:04d}" / f"{number:05d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels[number % len(pixels)].permute(1, 2, 0).numpy()).save(path, quality=90)
        paths.append(path)
    return paths


def image_folder(root: Path, workers: int, device: torch.device) -> Iterator[Tensor]:
    """The usual way: one image after another, decoded anew in each epoch."""
    pipeline = transforms.Compose(
        [
            transforms.Resize(SIZE, interpolation=transforms.InterpolationMode.BICUBIC),
            transforms.Pad(10),
            transforms.RandomCrop(SIZE),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD),
            transforms.RandomErasing(p=0.5, scale=(0.02, 0.4), ratio=(0.3, 1 / 0.3)),
        ]
    )
    loader = DataLoader(ImageFolder(str(root), pipeline), BATCH, shuffle=True, num_workers=workers, drop_last=True)
    for images, _ in loader:
        yield images.to(device)


def fedsim_path(pixels: Pixels, device: torch.device) -> Iterator[Tensor]:
    """A client's epoch, less the training."""
    order = [index for index in torch.randperm(len(pixels)).split(BATCH) if len(index) == BATCH]
    generator = torch.Generator(device).manual_seed(0)
    for images in pixels.batches(order):
        yield AUGMENTATION(images, generator)


def cpu_seconds() -> float:
    """Of this process and of its workers that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def epoch(batches: Iterator[Tensor], device: torch.device) -> float:
    """Run one epoch; return CPU-seconds, or seconds where a GPU works."""
    clock: Callable[[], float] = time.perf_counter if device.type == "cuda" else cpu_seconds
    started = clock()
    for images in batches:
        assert images.shape == (BATCH, 3, *SIZE)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return clock() - started


def write_large(paths: list[Path]) -> list[Path]:
    """The same JPEGs in 440x180, a size of MSMT17's larger images."""
    large = []
    for path in paths:
        large.append(path.with_suffix(".large.jpg"))
        Image.open(path).resize((180, 440)).save(large[-1], quality=90)
    return large


def gain_of_processes(count: int) -> float:
    """Return how much faster plain loops are in ``count`` processes than in one: all that the machine gives now."""
    context = torch.multiprocessing.get_context("fork")
    seconds = []
    for number in (1, count):
        children = [context.Process(target=_loop) for _ in range(number)]
        begin = time.perf_counter()
        for child in children:
            child.start()
        for child in children:
            child.join()
        seconds.append((time.perf_counter() - begin) / number)
    return seconds[0] / seconds[1]


def _loop() -> None:
    digest, block = hashlib.sha256(), bytes(2**20)
    for _ in range(400):
        digest.update(block)


class Obvious(ImageFiles):
    """The same files, read in the obvious way: what fedsim did before, and what the fast way has to equal."""

    def take(self, index: Index) -> Obvious:
        """Return the files at the positions ``index``."""
        return Obvious([self.paths[i] for i in index])

    def decode(self, size: Size) -> Tensor:
        """Read one file after another."""
        pixels = np.empty((len(self), 3, *size), dtype=np.uint8)
        for row, path in zip(pixels, self.paths, strict=True):
            row[...] = np.asarray(read_rgb(path).resize(size[::-1], Image.Resampling.BICUBIC)).transpose(2, 0, 1)
        return torch.from_numpy(pixels)


WAYS = {"before": Obvious, "today": ImageFiles}


def start(root: Path, count: int, repeats: int) -> None:
    """Print the rates of decoding at the start, before and today, for one thread and for all cores, by turns.

    Other work on the machine lowers the gains of threads: so their best turn is named, beside that of plain processes.
    """
    cores = max(1, int(usable_cores()))
    small, plain, rows = write_images(root, count), [], []
    for kind, paths in (("128x64", small), ("440x180", write_large(small))):
        pixels = torch.empty((count, 3, *SIZE), dtype=torch.uint8)
        expected = Obvious(paths).decode(SIZE)  # the files are in the system's cache now
        assert torch.equal(read_all(ImageFiles(paths), "", pixels, cores), expected)
        spent: dict[tuple[str, int], list[tuple[float, float]]] = {}
        for _ in range(repeats):
            plain.append(gain_of_processes(cores))
            for way, files in WAYS.items():
                for threads in sorted({1, cores}):
                    wall, cpu = time.perf_counter(), time.process_time()
                    read_all(files(paths), "", pixels, threads)
                    times = time.perf_counter() - wall, time.process_time() - cpu
                    spent.setdefault((way, threads), []).append(times)
        for (way, threads), turns in spent.items():
            wall, cpu = (statistics.median(column) for column in zip(*turns, strict=True))
            rows.append([kind, way, threads, f"{count / wall:,.0f}", f"{count / cpu:,.0f}"])
            for bases in (spent[way, 1], spent["before", threads]):
                ratios = [base[0] / turn[0] for base, turn in zip(bases, turns, strict=True)]
                rows[-1].append(f"{statistics.median(ratios):.2f} ({max(ratios):.2f})")
    header = ["JPEGs", "way", "threads", "images/s", "per CPU-second", "to one thread (best)", "to before (best)"]
    print(tabulate(rows, headers=header, disable_numparse=True, stralign="right"))
    print(f"{cores} cores, load {os.getloadavg()[0]:.1f}; to one thread it is to be {START_TARGET} on two quiet cores")
    print(f"{cores} plain processes to one: {statistics.median(plain):.2f} ({max(plain):.2f})")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--images", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--start", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as every run does; ImageFolder profits, too
    device = torch.device(args.device)
    if args.start:
        with tempfile.TemporaryDirectory() as folder:
            start(Path(folder), args.images, args.repeats)
        return
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        paths = write_images(root / "jpeg", args.images)
        count = args.images // BATCH * BATCH
        files = ImageFiles(paths)
        wanted = Wanted("benchmark", tuple(paths), SIZE)
        started = cpu_seconds()
        decoded.build(root / "cache", wanted)
        decoding = cpu_seconds() - started
        file = decoded.open_decoded(root / "cache", wanted)
        assert file is not None
        labels = torch.zeros(len(files), dtype=torch.int64).numpy()
        split = Split(files, labels, labels)
        mapped = decoded.use(split, [file]).images
        pixels = files.decode(SIZE)
        ways: dict[str, Callable[[], Iterator[Tensor]]] = {
            "ImageFolder + DataLoader": lambda: image_folder(root / "jpeg", args.workers, device),
            "fedsim, cache: device": lambda: fedsim_path(HeldPixels(pixels.to(device), device), device),
            "fedsim, cache: host": lambda: fedsim_path(HeldPixels(pixels, device), device),
            "fedsim, cache: host, mapped": lambda: fedsim_path(ReadPixels(mapped, SIZE, device, 0), device),
            "fedsim, cache: none": lambda: fedsim_path(ReadPixels(files, SIZE, device, args.workers), device),
        }
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(args.repeats):
            for name, way in ways.items():
                times[name].append(epoch(way(), device))
    rates = {name: count / statistics.median(seconds) for name, seconds in times.items()}
    base = rates["ImageFolder + DataLoader"]
    unit = "images/s" if device.type == "cuda" else "images per CPU-second"
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, {args.images} JPEGs, {args.workers} workers, {device}")
    rows = [[name, f"{rate:,.0f}", f"{rate / base:.2f}"] for name, rate in rates.items()]
    print(tabulate(rows, headers=["", unit, "ratio"], disable_numparse=True, stralign="right"))
    print(f"decoding once: {args.images / decoding:,.0f} images per CPU-second")
    best = rates["fedsim, cache: device"]
    if device.type == "cuda":
        print(f"at least {ON_DEVICE_TARGET:,} images/s: {'yes' if best >= ON_DEVICE_TARGET else 'no'}")
    else:
        print(f"at least {TARGET:g} times ImageFolder: {'yes' if best / base >= TARGET else 'no'}")


if __name__ == "__main__":
    main()
