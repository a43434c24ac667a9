"""Drawn towns whose pixels have a style of their own, and towns whose unseen pictures have the style of ImageNet's."""

from dataclasses import replace

import numpy as np
import torch

from fedsim.core.seeding import numpy_generator
from fedsim.data import ReIDSource, SyntheticReID
from fedsim.data.images import Images
from fedsim.functional.normalise import IMAGENET_MEAN, IMAGENET_STD

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


class StandardisedImages(Images):
    """Images whose channels all have mean and deviation of ImageNet's, clipped to bytes."""

    def __init__(self, images):
        self.images = images

    def __len__(self):
        return len(self.images)

    def take(self, index):
        return StandardisedImages(self.images.take(index))

    def decode(self, size):
        x = self.images.decode(size).double()
        mean, std = x.mean((2, 3), keepdim=True), x.std((2, 3), correction=0, keepdim=True)
        wanted_mean, wanted_std = (torch.tensor(v).view(3, 1, 1) * 255 for v in (IMAGENET_MEAN, IMAGENET_STD))
        return ((x - mean) / std.clamp_min(1e-8) * wanted_std + wanted_mean).round().clamp(0, 255).to(torch.uint8)


class StandardisedTargets(ReIDSource):
    """The towns of SyntheticReID, as they are drawn; pictures of the unseen ones are standardised.

    Normalised, these have channels of mean 0 and deviation 1: the style into which DACS turns all images at its start.
    """

    def __init__(self, clients=3, unseen=2, scale=1.0, seed=0):
        self.towns = SyntheticReID(clients, unseen, scale, seed)

    def domains(self):
        return [
            town.map_splits(lambda split: replace(split, images=StandardisedImages(split.images)))
            if town.name.startswith("new")
            else town
            for town in self.towns.domains()
        ]
