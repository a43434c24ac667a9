"""Swapped images from a trained generator: the appearance of one person with the structure of another."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedsim.core.seeding import numpy_generator
from fedsim.data.images import Index
from fedsim.generation.networks import AppearanceEncoder, Generator
from fedsim.generation.quality import SwapMeter, SwapQuality, discriminator_accuracy, similarity
from fedsim.generation.training import to_pixels, to_symmetric

_BATCH = 64
_JUDGED = 512  # images of each kind for discriminator_accuracy: enough for two digits, and little work at any size


class Pairs(NamedTuple):
    """Sources of m swapped images, of different identities: positions among a client's images, [m] int64 each."""

    structure: Index
    appearance: Index


def sample_pairs(client: str, labels: Index, count: int, seed: int) -> Pairs:
    """Sample ``count`` pairs of different identities; every image is a structure source about equally often.

    The sample is keyed by the client's name and ``seed``; ``labels`` [n] hold at least 2 different identities.
    """
    random = numpy_generator(seed, client, "swaps")
    rounds = -(-count // len(labels))
    structure = np.concatenate([random.permutation(len(labels)) for _ in range(rounds)])[:count].astype(np.int64)
    order = np.argsort(labels, kind="stable")
    sizes = np.bincount(labels)
    first = np.cumsum(sizes) - sizes
    identities = labels[structure]
    # the rank among images of other identities: those of the same identity are a gap in the sorted order
    rank = (random.random(count) * (len(labels) - sizes[identities])).astype(np.int64)
    rank += np.where(rank >= first[identities], sizes[identities], 0)
    return Pairs(structure, order[rank].astype(np.int64))


class Swaps(NamedTuple):
    """A batch of swapped images."""

    structure: Tensor
    """uint8 [b, 3, H, W], real images: the structure sources"""
    appearance: Tensor
    """the appearance sources, of the same type and shape"""
    images: Tensor
    """the swapped images, of the same type and shape"""
    beliefs: Tensor
    """[b, Z] float32, the teacher's probability of each identity in the swapped images"""


@torch.no_grad()
def make_swaps(generator: Generator, teacher: AppearanceEncoder, pixels: Tensor, pairs: Pairs) -> Iterator[Swaps]:
    """Yield batches of swapped images, on the CPU, of a generator and its teacher, both in evaluation mode.

    ``pixels`` uint8 [n, 3, H, W] are the client's images, and ``pairs`` the sources.
    """
    device = next(generator.parameters()).device
    for start in range(0, len(pairs.structure), _BATCH):
        positions = (torch.from_numpy(index[start : start + _BATCH]) for index in pairs)
        structure, appearance = (pixels[index] for index in positions)
        made = to_pixels(generator(*(to_symmetric(part.to(device)) for part in (structure, appearance))))
        # the teacher classifies the rounded image, as it will be in the file
        logits = teacher.logits(teacher(to_symmetric(made)))
        beliefs = logits.double().softmax(1).float()  # in float32, those of thousands of identities sum to more than 1
        yield Swaps(structure, appearance, made.cpu(), beliefs.cpu())


@torch.no_grad()
def measure_swaps(
    generator: Generator, teacher: AppearanceEncoder, pixels: Tensor, pairs: Pairs, labels: Index
) -> SwapQuality:
    """Measure the quality of all images' reconstructions, and of swaps; ``labels`` [n] are the images' identities.

    See :func:`make_swaps` for the other arguments.
    """
    meter, device = SwapMeter(), next(generator.parameters()).device
    total_similarity, judged = 0.0, list[Swaps]()
    for images in pixels.split(_BATCH):
        symmetric = to_symmetric(images.to(device))
        reconstructed = to_pixels(generator(symmetric, symmetric)).cpu() / 255
        meter.add_reconstructions(images / 255, reconstructed)
        total_similarity += float(similarity(images / 255, reconstructed).sum())
    wearers = torch.from_numpy(labels[pairs.appearance]).split(_BATCH)
    for batch, wearing in zip(make_swaps(generator, teacher, pixels, pairs), wearers, strict=True):
        recognised = batch.beliefs.argmax(1) == wearing
        meter.add_swaps(batch.images / 255, batch.structure / 255, batch.appearance / 255, recognised)
        judged += [batch] if _BATCH * len(judged) < _JUDGED else []
    real, made = (torch.cat([getattr(batch, part) for batch in judged]).to(device) for part in ("structure", "images"))
    accuracy = discriminator_accuracy(real, made, seed=0) if len(real) >= 4 else math.nan
    return replace(meter.result(), similarity=total_similarity / len(pixels), told_apart=accuracy)


@torch.no_grad()
def swap_grid(generator: Generator, structure: Tensor, appearance: Tensor) -> Tensor:
    """Combine every structure source [m, 3, H, W] with every appearance source [n, ...]: uint8 [m, n, 3, H, W]."""
    device = next(generator.parameters()).device
    maps = generator.structure(to_symmetric(structure.to(device)))
    codes = generator.appearance(to_symmetric(appearance.to(device)))
    rows = []
    for structure_map in maps:
        repeated = structure_map.expand(len(codes), *structure_map.shape)
        rows.append(to_pixels(generator.decoder(repeated, codes)).cpu())
    return torch.stack(rows)


def soft_labels(beliefs: Tensor, wearers: Index, pids: Index, least: float) -> list[dict[int, float]]:
    """Turn the teacher's probabilities [m, Z] into soft labels; see :func:`fedsim.data.write_generated`.

    The first label is that of the wearer, the person of the appearance source: ``wearers`` [m]. It always has a weight,
    since the image replaces one of the wearer. Other labels need a probability of at least ``least``, and images in the
    client's data.
    ``pids`` [Z] are the numbers of the identities in the data set; -1: no images.
    """
    labels = []
    for row, wearer in zip(beliefs.double().numpy(), wearers.tolist(), strict=True):
        likely = [int(label) for label in np.flatnonzero((row >= least) & (row > 0) & (pids >= 0)) if label != wearer]
        likely.sort(key=lambda label: -row[label])
        weight = max(float(row[wearer]), float(np.finfo(np.float32).tiny))  # a weight is more than 0
        labels.append({int(pids[wearer]): weight} | {int(pids[label]): float(row[label]) for label in likely})
    return labels
