"""Images with one person's appearance on another one's structure, from a trained generator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedsim.core.seeding import numpy_generator
from fedsim.data.images import Index
from fedsim.generation.networks import AppearanceEncoder, Generator
from fedsim.generation.quality import SwapMeter, SwapQuality
from fedsim.generation.training import to_pixels, to_symmetric

__all__ = ["Pairs", "Swaps", "draw_pairs", "make_swaps", "measure_swaps", "soft_labels", "swap_grid"]

_BATCH = 64


class Pairs(NamedTuple):
    """Who lends what, as positions among a client's images, [m] int64 each; of different identities."""

    structure: Index
    appearance: Index


def draw_pairs(client: str, labels: Index, count: int, seed: int) -> Pairs:
    """Draw pairs of different identities; every image lends its structure about equally often.

    Args:
        client: its name, the key of the draw.
        labels: [n] identities, of at least 2.
        count: m.
        seed: of the draw.
    """
    random = numpy_generator(seed, client, "swaps")
    rounds = -(-count // len(labels))
    structure = np.concatenate([random.permutation(len(labels)) for _ in range(rounds)])[:count].astype(np.int64)
    order = np.argsort(labels, kind="stable")
    sizes = np.bincount(labels)
    first = np.cumsum(sizes) - sizes
    own = labels[structure]
    # one of the images of others: those of one's own identity are a gap in the sorted order
    rank = (random.random(count) * (len(labels) - sizes[own])).astype(np.int64)
    rank += np.where(rank >= first[own], sizes[own], 0)
    return Pairs(structure, order[rank].astype(np.int64))


class Swaps(NamedTuple):
    """A batch of swapped images."""

    structure: Tensor
    """uint8 [b, 3, H, W], the real images that lent their structure"""
    appearance: Tensor
    """the same of appearance"""
    images: Tensor
    """uint8 [b, 3, H, W], of both"""
    beliefs: Tensor
    """[b, Z] float32: with what probability the teacher takes an image for whom"""


@torch.no_grad()
def make_swaps(generator: Generator, teacher: AppearanceEncoder, pixels: Tensor, pairs: Pairs) -> Iterator[Swaps]:
    """Yield batches of swapped images, on the CPU.

    Args:
        generator: in evaluation mode.
        teacher: in evaluation mode.
        pixels: uint8 [n, 3, H, W], the client's images.
        pairs: who lends what.
    """
    device = next(generator.parameters()).device
    for start in range(0, len(pairs.structure), _BATCH):
        lent = (torch.from_numpy(index[start : start + _BATCH]) for index in pairs)
        structure, appearance = (pixels[index] for index in lent)
        made = to_pixels(generator(*(to_symmetric(part.to(device)) for part in (structure, appearance))))
        # of what will be in the file, not of what it was before rounding
        logits = teacher.logits(teacher(to_symmetric(made)))
        beliefs = logits.double().softmax(1).float()  # in float32 those of thousands of identities sum to more than 1
        yield Swaps(structure, appearance, made.cpu(), beliefs.cpu())


@torch.no_grad()
def measure_swaps(
    generator: Generator, teacher: AppearanceEncoder, pixels: Tensor, pairs: Pairs, labels: Index
) -> SwapQuality:
    """Say how good a generator's images are.

    Args:
        generator: in evaluation mode.
        teacher: in evaluation mode.
        pixels: uint8 [n, 3, H, W], which it takes apart and puts together again.
        pairs: who lends what.
        labels: [n] identities.
    """
    meter, device = SwapMeter(), next(generator.parameters()).device
    for images in pixels.split(_BATCH):
        given = to_symmetric(images.to(device))
        meter.add_reconstructions(images / 255, to_pixels(generator(given, given)).cpu() / 255)
    wearers = torch.from_numpy(labels[pairs.appearance]).split(_BATCH)
    for batch, wearing in zip(make_swaps(generator, teacher, pixels, pairs), wearers, strict=True):
        recognised = batch.beliefs.argmax(1) == wearing
        meter.add_swaps(batch.images / 255, batch.structure / 255, batch.appearance / 255, recognised)
    return meter.result()


@torch.no_grad()
def swap_grid(generator: Generator, structure: Tensor, appearance: Tensor) -> Tensor:
    """Return every structure with every appearance, uint8 [m, n, 3, H, W], of images uint8 [m, ...] and [n, ...]."""
    device = next(generator.parameters()).device
    maps = generator.structure(to_symmetric(structure.to(device)))
    codes = generator.appearance(to_symmetric(appearance.to(device)))
    rows = [to_pixels(generator.decoder(one.expand(len(codes), *one.shape), codes)).cpu() for one in maps]
    return torch.stack(rows)


def soft_labels(beliefs: Tensor, wearers: Index, pids: Index, least: float) -> list[dict[int, float]]:
    """Turn the teacher's probabilities into soft labels; see :func:`fedsim.data.write_generated`.

    First comes the identity whose appearance an image has, in whose place it will stand. Probabilities below ``least``
    are left out, except its own, and so are those of identities of whom the client has no images.

    Args:
        beliefs: [m, Z].
        wearers: [m] label of the identity whose appearance an image has.
        pids: [Z] the identities' numbers in the data set; -1 of those without images.
        least: in [0, 1].
    """
    found = []
    for row, wearer in zip(beliefs.double().numpy(), wearers.tolist(), strict=True):
        likely = [int(label) for label in np.flatnonzero((row >= least) & (row > 0) & (pids >= 0)) if label != wearer]
        likely.sort(key=lambda label: -row[label])
        own = max(float(row[wearer]), float(np.finfo(np.float32).tiny))  # a weight is more than 0
        found.append({int(pids[wearer]): own} | {int(pids[label]): float(row[label]) for label in likely})
    return found
