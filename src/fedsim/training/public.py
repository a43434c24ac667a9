"""Unlabelled images that server and clients have in common."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fedsim.core.seeding import torch_generator
from fedsim.core.transfer import send
from fedsim.data.augmentation import Augmentation
from fedsim.functional.normalise import normalise_images


class PublicImages:
    """Public images [n, 3, H, W] uint8 in host memory; their batches go to ``device``."""

    def __init__(self, images: Tensor, augmentation: Augmentation, seed: int, device: torch.device) -> None:
        self.images = images
        self._augmentation, self._seed, self._device = augmentation, seed, device

    def __len__(self) -> int:
        return len(self.images)

    def batches(self, round_: int, size: int, augmented: bool) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield all images once, in the random order of round ``round_``, equally for clients and server.

        Yields (index [b] int64 into the images, normalised images [b, 3, H, W] on the device), ``size`` at a time.
        They are ``augmented`` as in training, by the random stream of the round, or as they are.
        """
        order = torch.randperm(len(self.images), generator=torch_generator(self._seed, round_, "public order"))
        stream = torch_generator(self._seed, round_, "public augment", device=self._device)
        for index in order.split(size):
            images = send(self.images[index], self._device)
            yield index, self._augmentation(images, stream) if augmented else normalise_images(images)

    def plain_batches(self, size: int) -> Iterator[Tensor]:
        """Yield normalised images in file order, without a last batch of one image."""
        for batch in self.images.split(size):
            if len(batch) > 1:
                yield normalise_images(send(batch, self._device))
