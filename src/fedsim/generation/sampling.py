"""The images of each training step of a generator; they depend on seed, client and step only."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedsim.core.errors import DataError
from fedsim.core.seeding import torch_generator
from fedsim.data.images import Index


class SampledImages(NamedTuple):
    """Positions of a step's images among the client's, [B] int64 each."""

    images: Tensor
    """i: of different identities, if there are B"""
    others: Tensor
    """t: another image of the same identity; the same image if there is no other"""
    lenders: Tensor
    """j: position in this batch, 0 .. B - 1, of the image that lends its structure to image i; another identity"""


class Sampler:
    """Samples ``batch_size`` B >= 2 pairs of images of the same person, for as many persons as possible.

    Samples are keyed by the client's name and ``seed``. ``labels`` [n] are the identities of its images, 0 .. Z - 1;
    some identities may have no images. Raises DataError for a single identity, since a swap needs two.
    """

    def __init__(self, client: str, labels: Index, batch_size: int, seed: int) -> None:
        check_identities(client, labels)
        self.client, self.batch_size, self.seed = client, batch_size, seed
        self.order = torch.from_numpy(np.argsort(labels, kind="stable"))
        """[n] images, sorted by identity"""
        self.counts = torch.from_numpy(np.bincount(labels))
        self.present = self.counts.nonzero()[:, 0]
        """identities with images"""
        self.first = self.counts.cumsum(0) - self.counts
        self.turns = torch.arange(batch_size) % len(self.present)
        """[B] positions in the sampled order of identities; after the last one, the first ones again"""
        self.lenders = torch.arange(1, batch_size + 1) % batch_size
        if self.turns[-1] == 0:  # the last image has the identity of the first, whose structure it would get
            self.lenders[-1] = 1

    def sample(self, step: int) -> SampledImages:
        """Sample the images of step 0, 1, ..."""
        generator = torch_generator(self.seed, self.client, step, "pairs")
        identities = self.present[torch.randperm(len(self.present), generator=generator)[self.turns]]
        u = torch.rand((2, self.batch_size), generator=generator, dtype=torch.float64)
        counts = self.counts[identities]
        image = (u[0] * counts).long()
        # a step of 1 .. count - 1, or to the only image
        other_image = (image + 1 + (u[1] * (counts - 1)).long()) % counts
        first = self.first[identities]
        return SampledImages(self.order[first + image], self.order[first + other_image], self.lenders)


def check_identities(client: str, labels: Index) -> None:
    """Raise DataError if all images of a client show the same person."""
    if np.count_nonzero(np.bincount(labels)) < 2:
        raise DataError(f"client {client}: a generator needs images of at least 2 identities; leave the client out")
