"""A client's training images, their batches on the device, and the loss of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from fedsim.core.transfer import send
from fedsim.data.augmentation import Augmentation
from fedsim.data.federated import ClientData
from fedsim.data.generated import Mixture
from fedsim.data.images import Images, Split
from fedsim.data.pixels import Pixels
from fedsim.functional.normalise import normalise_images


class Batch(NamedTuple):
    """A training batch on the device."""

    images: Tensor
    """[B, 3, H, W] float32, augmented and normalised"""
    labels: Tensor
    """[B] int64, 0 .. num_classes - 1, or proxies of clusters; for :meth:`Client.supervised_loss`"""
    views: tuple[Tensor, ...] = ()
    """further views of the same images, augmented independently, each like ``images``"""
    targets: Tensor | None = None
    """[B, num_classes] float32, soft labels, each with a sum in (0, 1]; None: the one-hot ``labels``"""
    cameras: Tensor | None = None
    """[B] int64, the camera of each image, or of the image whose place a generated one takes; None: no loss of
    the client needs it"""
    round: int = 0
    """the current round, from 0, where :attr:`cameras` are there"""
    on_host: Tensor | None = None
    """[B] int64, :attr:`labels` in the host's memory; None: an attacker may have changed them"""

    rows: Tensor | None = None
    """[B] int64, the position of each image among the client's training images, where :attr:`cameras` are there"""

    @property
    def most_repeated(self) -> int | None:
        """The largest number of images with one label, without a wait for the device; None: it is not known."""
        return None if self.on_host is None else max(self.on_host.bincount().tolist())

    def changed(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """Return a batch of what ``change`` makes of each tensor, without the labels in the host's memory."""
        views = tuple(change(view) for view in self.views)
        optional = (self.targets, self.cameras, self.rows)
        targets, cameras, rows = (None if tensor is None else change(tensor) for tensor in optional)
        return Batch(change(self.images), change(self.labels), views, targets, cameras, self.round, rows=rows)


class ScoredBatch(NamedTuple):
    """The loss and the guesses of a batch of B images."""

    loss: Tensor
    """scalar, with gradient"""
    guesses: Tensor
    """[B] int64, identity of the largest logit, or cluster of the most similar proxy"""
    truth: Tensor
    """[B] int64, identity or cluster of each image"""
    parts: tuple[Tensor, ...] = ()
    """scalars, the terms of the loss that ``Objective.parts`` names"""


class ClientImages:
    """A client's training images, and generated ones if it has some; their batches go to ``device``."""

    pixels: Pixels
    """n images; from :meth:`open` on"""

    def __init__(self, data: ClientData, augmentation: Augmentation, device: torch.device) -> None:
        self.data, self.augmentation, self.device = data, augmentation, device
        self.labels = torch.from_numpy(data.labels)
        """[n] int64"""
        self.cameras = torch.from_numpy(data.train.camids)
        """[n] int64"""
        self.mixture: Mixture | None = None
        """generated images, if there are any; from :meth:`open` on"""

    @property
    def is_open(self) -> bool:
        """Whether :meth:`open` has been called."""
        return hasattr(self, "pixels")

    @property
    def lists(self) -> list[Images]:
        """The images that :meth:`open` opens: its own, and generated ones if it has some."""
        return [self.data.train.images, *([] if self.data.generated is None else [self.data.generated.images])]

    def open(self, open_images: Callable[[Images, str, torch.device], Pixels]) -> None:
        """Open the images with ``open_images``, see FederatedDataModule.open_train."""
        data = self.data
        self._open_images = open_images
        self.pixels = open_images(data.train.images, data.name, self.device)
        if data.generated is not None:
            pixels = open_images(data.generated.images, f"{data.name}, generated", self.device)
            self.mixture = Mixture(data.generated, pixels, data.num_classes)

    @cached_property
    def held_out(self) -> tuple[tuple[Pixels, Split], ...]:
        """Images of ``data.val``, each once, with identities and cameras; they are opened at their first use."""
        assert self.data.val is not None, "the method must require held_out"
        val, name = self.data.val, f"{self.data.name}, held out"
        splits = (val.query, val.gallery) if val.own is None else (val.gallery,)
        return tuple((self._open_images(split.images, name, self.device), split) for split in splits)

    def plain_batches(self, index: Tensor, size: int) -> Iterator[Batch]:
        """Yield the images at ``index`` [m] int64, not augmented, ``size`` at a time; no random stream advances."""
        parts = index.split(size)
        for part, images in zip(parts, self.pixels.batches(parts), strict=True):
            labels, cameras, rows = send(torch.stack([self.labels[part], self.cameras[part], part]), self.device)
            yield Batch(normalise_images(images), labels, cameras=cameras, rows=rows)

    def sample(self, count: int, order: torch.Generator, augment: torch.Generator | None) -> Tensor:
        """Return ``count`` random images [B, 3, H, W], or all if there are fewer.

        The stream ``order`` chooses them. ``augment`` is the stream of their augmentation; None: no augmentation.
        """
        [images] = self.pixels.batches([torch.randperm(len(self.labels), generator=order)[:count]])
        return normalise_images(images) if augment is None else self.augmentation(images, augment)
