"""Drawn towns whose pixels have a style of their own: contrast and light of each colour, the same in a whole town."""

from dataclasses import replace

import numpy as np
import torch

from fedsim.core.seeding import numpy_generator
from fedsim.data import ReIDSource, SyntheticReID
from fedsim.data.images import Images

STRENGTH = 0.5


class StyledImages(Images):
    """Images whose pixels x become (x - 127.5) g + 127.5 + b, clipped to bytes."""

    def __init__(self, images, gain, shift):
        self.images, self.gain, self.shift = images, gain, shift

    def __len__(self):
        return len(self.images)

    def take(self, index):
        return StyledImages(self.images.take(index), self.gain, self.shift)

    def decode(self, size):
        x = (self.images.decode(size).double() - 127.5) * self.gain + 127.5 + self.shift
        return x.round().clamp(0, 255).to(torch.uint8)


class StyledTowns(ReIDSource):
    """The towns of SyntheticReID, each with g and b [3, 1, 1] of its own.

    With strength t, log g is uniform with width 1.4 t for all colours, and with 0.6 t for each; b with 120 t and 80 t.
    """

    def __init__(self, clients=3, unseen=2, scale=1.0, seed=0, strength=STRENGTH):
        self.towns, self.seed, self.strength = SyntheticReID(clients, unseen, scale, seed), seed, strength

    def domains(self):
        return [self.styled(town) for town in self.towns.domains()]

    def styled(self, town):
        stream = numpy_generator(self.seed, "style", town.name)
        widths = np.array([1.4, 0.6, 0.6, 0.6, 120.0, 80.0, 80.0, 80.0]) * self.strength
        numbers = (stream.random(8) - 0.5) * widths
        log_gain, shift = (torch.from_numpy(n[0] + n[1:]).view(3, 1, 1) for n in (numbers[:4], numbers[4:]))
        return town.map_splits(lambda split: replace(split, images=StyledImages(split.images, log_gain.exp(), shift)))
