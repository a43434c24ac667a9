"""From images to retrieval features."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from fedsim.data.pixels import Pixels
from fedsim.functional.normalise import normalise_images
from fedsim.models.reid import Features, ReIDModel
from fedsim.training.settings import autocast


class Extraction(Protocol):
    """Settings of the extraction, such as :class:`~fedsim.evaluation.settings.Evaluation`."""

    @property
    def layer(self) -> Literal["neck", "pool"]:
        """The layer whose features are extracted."""

    @property
    def flip(self) -> bool:
        """Whether the features of the mirror image are added."""

    @property
    def batch_size(self) -> int:
        """Images per forward pass."""


@dataclass(frozen=True)
class _Plain:
    layer: Literal["neck", "pool"] = "neck"
    flip: bool = False
    batch_size: int = 64


PLAIN: Extraction = _Plain()
"""The neck's features, without the mirror image."""
POOLED: Extraction = _Plain(layer="pool")
"""The backbone's pooled features, without the mirror image."""


def shard_of(num_images: int, batch_size: int, rank: int, world_size: int) -> slice:
    """Return a rank's share of a list of images: whole batches, every image on exactly one rank.

    >>> [shard_of(10, 3, rank, 2) for rank in range(2)]
    [slice(0, 6, None), slice(6, 10, None)]
    """
    batches = -(-num_images // batch_size)
    first, last = (batches * r // world_size * batch_size for r in (rank, rank + 1))
    return slice(min(first, num_images), min(last, num_images))


class Passes(NamedTuple):
    """How forward passes are computed."""

    precision: str = "32-true"
    """32-true or bf16-mixed"""
    channels_last: bool = False
    """order of the images in memory"""


FLOAT32 = Passes()


@torch.no_grad()
def extract_features(
    model: ReIDModel, images: Pixels, settings: Extraction, device: torch.device, passes: Passes = FLOAT32
) -> Tensor:
    """Return a model's features of n images, float32 [n, D], not normalised, in evaluation mode; see run_batches."""
    model.eval()

    def network(x: Tensor) -> Tensor:
        features: Features = model(x)
        return features.neck if settings.layer == "neck" else features.pool

    return run_batches(network, images, model.width_of(settings.layer), settings, device, passes)


@torch.no_grad()
def run_batches(
    network: Callable[[Tensor], Tensor],
    images: Pixels,
    width: int,
    settings: Extraction,
    device: torch.device,
    passes: Passes = FLOAT32,
) -> Tensor:
    """Run a network on a list of images, by default in float32.

    Batch boundaries depend only on the number of images: the last bits of matrix products vary with the number of rows.
    ``network`` maps normalised images [B, 3, H, W] to [B, D], D being ``width``, in evaluation mode. With
    ``settings.flip``, outputs of mirror images are added. Returns float32 [n, D] on ``device``, that of the network.
    """
    features = torch.empty(len(images), width, device=device)
    if not len(images):  # a rank's share may be empty, and torch would split it into one batch of no images
        return features
    with autocast(device, passes.precision):
        order = torch.arange(len(images)).split(settings.batch_size)
        for batch, out in zip(images.batches(order), features.split(settings.batch_size), strict=False):
            x = normalise_images(batch)
            if passes.channels_last:
                x = x.contiguous(memory_format=torch.channels_last)
            out.copy_(network(x))  # of outputs in bfloat16, the sum with those of mirror images is float32, too
            if settings.flip:
                out += network(x.flip(-1))
    return features
