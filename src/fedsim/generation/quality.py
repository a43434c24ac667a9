"""Quality of swapped images, measured without masks of people.

A swapped image has the structure (pose, background) of one image and the appearance (clothes) of another. So its edges
should correlate with the edges of the structure source, and its colours with those of the appearance source. The same
measures on the unchanged sources are given for comparison.

Paper silent on a measure of the quality of generated images (Figure 5 shows some).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor
from torchmetrics.functional.image import structural_similarity_index_measure

from fedsim.core.seeding import seeded_host
from fedsim.generation.losses import realness_loss
from fedsim.generation.networks import LUMA, Discriminator


@dataclass(frozen=True)
class SwapQuality:
    """Quality of a generator's reconstructions and swaps; all are means over images."""

    reconstruction: float
    """mean absolute difference of images and their self-reconstructions, for values in [0, 1]; 0 is perfect"""
    edges: float
    """correlation, in [-1, 1], of edge strengths of the swapped image and its structure source"""
    edges_before: float
    """the same for the appearance source instead of the swapped image"""
    colours: float
    """correlation, in [-1, 1], of colour histograms of the swapped image and its appearance source"""
    colours_before: float
    """the same for the structure source instead of the swapped image"""
    identity: float
    """share, in [0, 1], of swapped images that the teacher recognises as the person of the appearance source; chance is
    1 / identities"""
    similarity: float = math.nan
    """structural similarity of images and their self-reconstructions, in [-1, 1]; 1 is perfect (Wang et al., IEEE TIP
    2004); NaN: not measured, as in earlier versions"""
    told_apart: float = math.nan
    """share, in [0, 1], of unseen images that a new discriminator classifies correctly as real or swapped; 1/2 is
    perfect, see :func:`discriminator_accuracy`; NaN: not measured"""


def edge_strength(images: Tensor) -> Tensor:
    """Return the magnitude of Sobel gradients of the luma (ITU-R BT.601), with replicated borders: [n, H, W].

    It is exactly 0 where an image is constant. ``images`` are float [n, 3, H, W] in [0, 1], RGB.

    >>> step = torch.tensor([0.0, 0.0, 1.0, 1.0]).expand(1, 3, 2, 4)
    >>> edge_strength(step).round(decimals=3)
    tensor([[[0., 4., 4., 0.],
             [0., 4., 4., 0.]]])
    """
    red, green, blue = images.unbind(1)
    luma = LUMA[0] * red + LUMA[1] * green + LUMA[2] * blue
    # with channels, F.pad also takes empty batches
    luma = F.pad(luma[:, None], (1, 1, 1, 1), mode="replicate").squeeze(1)
    # smoothed first, then subtracted: a convolution would leave rounding errors where there is no edge
    down = luma[:, :-2] + 2 * luma[:, 1:-1] + luma[:, 2:]
    along = luma[:, :, :-2] + 2 * luma[:, :, 1:-1] + luma[:, :, 2:]
    return torch.hypot(down[:, :, 2:] - down[:, :, :-2], along[:, 2:] - along[:, :-2])


def colour_histogram(images: Tensor, bins: int = 8) -> Tensor:
    """Return the share of values in each bin, for the centre of each image: float32 [n, 3 * bins], red first.

    The centre leaves out a tenth of the rows at the top and at the bottom, and a quarter of the columns at each side,
    which are mostly background and belong to the structure. ``images`` are float [n, 3, H, W] in [0, 1], RGB; a value
    of 1 is in the last bin. Bins are equally wide; each channel's shares sum to 1.

    >>> colour_histogram(torch.tensor([0.1, 0.6, 1.0]).view(1, 3, 1, 1), bins=2)
    tensor([[1., 0., 0., 1., 0., 1.]])
    """
    n, channels, height, width = images.shape
    top, left = height // 10, width // 4
    part = images[:, :, top : height - top, left : width - left].flatten(2)
    index = (part * bins).long().clamp(0, bins - 1)
    first = bins * torch.arange(n * channels, device=images.device).view(n, channels, 1)
    counts = torch.bincount((first + index).flatten(), minlength=n * channels * bins)
    return counts.view(n, channels * bins).float() / part.shape[2]


def pearson(a: Tensor, b: Tensor) -> Tensor:
    """Return the correlation of each row of ``a`` [n, d] with that of ``b`` [n, d]: float64 [n], 0 for constant rows.

    >>> rising = torch.tensor([[1.0, 2.0, 3.0]])
    >>> pearson(rising.repeat(3, 1), torch.cat([2 * rising, -rising, torch.ones(1, 3)])).round(decimals=6)
    tensor([ 1., -1.,  0.], dtype=torch.float64)
    """
    return (_standardise(a) * _standardise(b)).sum(1)


def _standardise(rows: Tensor) -> Tensor:
    """Subtract means of rows [n, d] and scale them to unit length, in float64; constant rows become 0."""
    rows = rows.double()
    constant = rows.amax(1, keepdim=True) == rows.amin(1, keepdim=True)
    # else the rounding error of the mean would count
    centred = (rows - rows.mean(1, keepdim=True)).masked_fill(constant, 0)
    return F.normalize(centred, eps=torch.finfo(torch.float64).tiny)


@torch.no_grad()
def similarity(images: Tensor, reconstructed: Tensor) -> Tensor:
    """Return the structural similarity of pairs of images, float [n, 3, H, W] in [0, 1] of at least 6 pixels: [n].

    The window is Gaussian, of 11 x 11 pixels, at every pixel; borders are mirrored.
    """
    values = structural_similarity_index_measure(reconstructed, images, reduction="none", data_range=1.0)
    assert isinstance(values, Tensor)
    return values.view(-1)


_TWO_SCALES = 16
"""Pixels that an image needs for a second scale, at half of its size; each scale halves it three times."""


def discriminator_accuracy(real: Tensor, made: Tensor, seed: int, steps: int = 200) -> float:
    """Return the accuracy, in [0, 1], of a new discriminator between real and made images that it did not train on.

    1/2 is chance; 1: always right. A discriminator that trained with the generator is no measure, since both may have
    diverged. This one learns from the first half of the images, in ``steps`` batches of 16 of each kind, and scores the
    second half. The score of an image is the mean over patches and scales: two, or one for images below 16 pixels.

    ``real`` and ``made`` are uint8 [m, 3, H, W], m at least 4; row i of ``made`` is made from row i of ``real``.
    """
    half = len(real) // 2
    with seeded_host(seed), torch.enable_grad():
        scales = 2 if min(real.shape[2:]) >= _TWO_SCALES else 1
        judge = Discriminator(width=16, scales=scales).to(real.device)
        optimizer = torch.optim.Adam(judge.parameters(), lr=1e-3, betas=(0.5, 0.999))
        for _ in range(steps):
            rows = torch.randint(half, (min(16, half),)).to(real.device)
            pairs = [part.index_select(0, rows) / 127.5 - 1 for part in (real, made)]
            loss = realness_loss(judge(pairs[0]), 1.0) + realness_loss(judge(pairs[1]), 0.0)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        scores = [
            torch.cat([torch.stack([s.mean((1, 2, 3)) for s in judge(batch / 127.5 - 1)]).mean(0) for batch in part])
            for part in (real[half:].split(64), made[half:].split(64))
        ]
    return float(torch.cat([scores[0] > 0.5, scores[1] < 0.5]).double().mean())


class SwapMeter:
    """Adds up the quality of one generator's images, batch after batch.

    >>> images = torch.rand(4, 3, 8, 4)
    >>> meter = SwapMeter()
    >>> meter.add_reconstructions(images, images)
    >>> meter.add_swaps(images, images, images, recognised=torch.tensor([True, False, True, True]))
    >>> meter.result().identity
    0.75
    """

    def __init__(self) -> None:
        self._sums = torch.zeros(5, dtype=torch.float64)
        self._num_swaps = 0
        self._error = 0.0
        self._num_values = 0

    @torch.no_grad()
    def add_swaps(self, swapped: Tensor, structure: Tensor, appearance: Tensor, recognised: Tensor) -> None:
        """Add n swapped images and their sources, all float [n, 3, H, W] in [0, 1]; raise ValueError for other tensors.

        ``recognised`` is bool [n]: whether the teacher recognises the person of the appearance source.
        """
        _check_shapes(swapped=swapped, structure=structure, appearance=appearance)
        if recognised.dtype != torch.bool or recognised.shape != swapped.shape[:1]:
            description = f"{recognised.dtype} {list(recognised.shape)}"
            raise ValueError(f"recognised is {description}; give bool [{len(swapped)}], one per swapped image")
        edges = edge_strength(structure).flatten(1)
        colours = colour_histogram(appearance)
        of_images = [  # in the order of SwapQuality's fields
            pearson(edge_strength(swapped).flatten(1), edges),
            pearson(edge_strength(appearance).flatten(1), edges),
            pearson(colour_histogram(swapped), colours),
            pearson(colour_histogram(structure), colours),
            recognised.double(),
        ]
        self._sums += torch.stack(of_images).sum(1).cpu()
        self._num_swaps += len(swapped)

    @torch.no_grad()
    def add_reconstructions(self, images: Tensor, reconstructed: Tensor) -> None:
        """Add n images and their reconstructions, float [n, 3, H, W] in [0, 1]; raise ValueError for other tensors."""
        _check_shapes(images=images, reconstructed=reconstructed)
        self._error += float((images.double() - reconstructed.double()).abs().sum())
        self._num_values += images.numel()

    def result(self) -> SwapQuality:
        """Return the means; raise ValueError if there are no swapped images or no reconstructions."""
        if not (self._num_swaps and self._num_values):
            raise ValueError("there is nothing to average; add both swapped images and reconstructions")
        return SwapQuality(self._error / self._num_values, *(self._sums / self._num_swaps).tolist())


def _check_shapes(**images: Tensor) -> None:
    """Raise ValueError unless all are float [n, 3, H, W] of one shape."""
    first, reference = next(iter(images.items()))
    for name, tensor in images.items():
        if not tensor.is_floating_point() or tensor.dim() != 4 or tensor.shape[1] != 3:
            raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}; give floats [n, 3, H, W] in [0, 1]")
        if tensor.shape != reference.shape:
            raise ValueError(f"{name} is {list(tensor.shape)}, {first} {list(reference.shape)}; give equal shapes")


def quality_table(rows: Mapping[str, SwapQuality]) -> str:
    """Return a table with one line per client: client -> the quality of its generator's images."""
    lines = [
        [client, f"{quality.reconstruction:.3f}", f"{quality.edges:.2f} ({quality.edges_before:.2f})",
         f"{quality.colours:.2f} ({quality.colours_before:.2f})", f"{100 * quality.identity:.1f} %",
         f"{quality.similarity:.2f}".replace("nan", "-"), f"{100 * quality.told_apart:.0f} %".replace("nan %", "-")]
        for client, quality in rows.items()
    ]  # fmt: skip
    headers = ["client", "reconstruction error", "edges (before)", "colours (before)", "recognised"]
    headers += ["SSIM", "distinguished"]
    return tabulate(lines, headers=headers, disable_numparse=True, colalign=("left", *["right"] * 6))
