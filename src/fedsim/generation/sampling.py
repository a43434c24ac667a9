"""Which images a step of a generator's training sees: a function of seed, client and step alone."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedsim.core.errors import DataError
from fedsim.core.seeding import torch_generator
from fedsim.data.images import Index

__all__ = ["Draw", "Sampler", "check_identities"]


class Draw(NamedTuple):
    """Positions of a step's images among the client's, [B] int64 each."""

    images: Tensor
    """i: of different identities, as far as there are enough"""
    others: Tensor
    """t: of the same identities; another image of each that has several"""
    lenders: Tensor
    """j: who in this batch, 0 .. B - 1, lends each image i a structure; of another identity"""


class Sampler:
    """Draws pairs of images of the same person, of as many persons as possible.

    Args:
        client: its name, which also keys the draws.
        labels: [n] identity of each image, 0 .. Z - 1; there may be some without images.
        batch_size: B, at least 2.
        seed: of the run.

    Raises:
        DataError: of clients with a single identity: nobody's appearance could be put on somebody else.
    """

    def __init__(self, client: str, labels: Index, batch_size: int, seed: int) -> None:
        check_identities(client, labels)
        counts = np.bincount(labels)
        self.client, self.batch_size, self.seed = client, batch_size, seed
        self.order = torch.from_numpy(np.argsort(labels, kind="stable"))
        """[n] images, identity after identity"""
        self.present = torch.from_numpy(np.flatnonzero(counts))
        """identities with images"""
        self.counts = torch.from_numpy(counts)
        self.first = self.counts.cumsum(0) - self.counts
        self.turns = torch.arange(batch_size) % len(self.present)
        """[B] whose turn it is: all in the order of a draw, and then the first ones again"""
        self.lenders = torch.arange(1, batch_size + 1) % batch_size
        if self.turns[-1] == 0:  # of the same identity as the first, whose structure it would get
            self.lenders[-1] = 1

    def draw(self, step: int) -> Draw:
        """Draw the images of step 0, 1, ..."""
        generator = torch_generator(self.seed, self.client, step, "pairs")
        identities = self.present[torch.randperm(len(self.present), generator=generator)[self.turns]]
        u = torch.rand((2, self.batch_size), generator=generator, dtype=torch.float64)
        counts = self.counts[identities]
        one = (u[0] * counts).long()
        # any of the others, by a step of 1 .. count - 1; the only image of a person stands for itself
        step_on = 1 + (u[1] * (counts - 1)).long()
        other = (one + step_on) % counts
        first = self.first[identities]
        return Draw(self.order[first + one], self.order[first + other], self.lenders)


def check_identities(client: str, labels: Index) -> None:
    """Raise DataError if all images of a client show the same person."""
    if np.count_nonzero(np.bincount(labels)) < 2:
        raise DataError(f"client {client}: a generator needs images of at least 2 identities; leave the client out")
