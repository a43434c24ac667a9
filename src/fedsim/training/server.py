"""The server: one global vector per architecture, its batch-norm policy, and adaptive server optimizers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fedsim.core.messages import Received
from fedsim.core.seeding import torch_generator
from fedsim.data.augmentation import Augmentation
from fedsim.functional.normalise import normalise_images
from fedsim.training.flat_model import Resident

__all__ = ["Server"]


class Server(nn.Module):
    """The global model: a flat vector per architecture. ``state_dict()`` is exactly that.

    Args:
        residents: architecture -> resident model whose initial weights the server starts from.
        archs: client -> architecture, for all clients.
        augmentation: of training images.
        seed: of the run.
        num_public: how many public images the data have, known before they are decoded.
    """

    def __init__(
        self,
        residents: Mapping[str, Resident],
        archs: Mapping[str, str] | None = None,
        augmentation: Augmentation | None = None,
        seed: int = 0,
        num_public: int = 0,
    ) -> None:
        super().__init__()
        self.residents = dict(residents)
        self._archs = archs or {}
        self.augmentation = augmentation or Augmentation()
        self.seed = seed
        self.num_public = num_public
        self.round = 0
        """the current round, from 0"""
        self.received: Mapping[str, Received] = {}
        """by architecture: of the last round, without architectures in which nobody returned an update"""
        self.kept: dict[str, dict[str, Tensor]] = {arch: {} for arch in residents}
        """architecture -> what the method remembers between rounds, by name; see :meth:`keep`"""
        self._sent: dict[str, Tensor] = {}
        self.public_images: Tensor | None = None
        """unlabelled images that the server may use, uint8 [n, 3, H, W] in host memory"""
        self.vectors = nn.ParameterDict({a: residents[a].flat.shared.cpu().clone() for a in sorted(residents)})

    @property
    def num_clients(self) -> Mapping[str, int]:
        """Architecture -> clients in the federation."""
        return Counter(self._archs.values())

    def model(self, arch: str) -> Tensor:
        """Return the global vector [num_shared] of an architecture, without gradient; see :meth:`sending`."""
        vector: Tensor = self._sent.get(arch, self.vectors[arch])
        return vector.detach()

    @contextmanager
    def sending(self, arch: str, vector: Tensor) -> Iterator[None]:
        """Let :meth:`model` be ``vector`` while a client visits that received it instead of the global model."""
        self._sent[arch] = vector
        try:
            yield
        finally:
            del self._sent[arch]

    @contextmanager
    def in_round(self, round_: int) -> Iterator[None]:
        """Let a method be asked what it does in another round, from 0."""
        now, self.round = self.round, round_
        try:
            yield
        finally:
            self.round = now

    def keep(self, arch: str, name: str, tensor: Tensor) -> None:
        """Remember a copy of ``tensor`` between rounds and in checkpoints, on the device of the models."""
        self.kept[arch][name] = tensor.detach().to(self.residents[arch].device, copy=True)

    def load_kept(self, kept: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Restore :attr:`kept` from a checkpoint."""
        for arch, tensors in kept.items():
            for name, tensor in tensors.items():
                self.keep(arch, name, tensor)

    def public_batches(self, size: int, augmented: bool) -> Iterator[tuple[Tensor, Tensor]]:
        """Go through the public images once, in the round's random order.

        Whoever asks gets the same batches in the same views: clients and server can talk about them.

        Args:
            size: images per batch, the last one maybe fewer.
            augmented: views as in training, drawn for the round; else the images as they are.

        Yields:
            (index [b] int64 into the public images, normalised images [b, 3, H, W] on the device).
        """
        assert self.public_images is not None
        device = next(iter(self.residents.values())).device
        order = torch.randperm(
            len(self.public_images), generator=torch_generator(self.seed, self.round, "public order")
        )
        stream = torch_generator(self.seed, self.round, "public augment", device=device)
        for index in order.split(size):
            images = self.public_images[index].to(device)
            yield index, self.augmentation(images, stream) if augmented else normalise_images(images)

    def recalibrate(self, batch_size: int) -> None:
        """Replace all running statistics by plain averages over batches of the public images."""
        assert self.public_images is not None
        for arch, resident in self.residents.items():
            resident.flat.shared.copy_(self.model(arch))
            device = resident.flat.buffer.device
            batches = (normalise_images(b.to(device)) for b in self.public_images.split(batch_size) if len(b) > 1)
            torch.optim.swa_utils.update_bn(batches, resident.model)
            self.model(arch).copy_(resident.flat.shared)

    def step(
        self,
        optimizer: Callable[[], Any],
        means: Mapping[str, Tensor],
        exact: Mapping[str, slice],
        sizes: Mapping[str, float] | None = None,
        untouched: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Step every vector with the pseudo-gradient ``theta - mean`` (Reddi et al., ICLR 2021).

        Args:
            optimizer: the server optimizer's step.
            means: architecture -> weighted mean of the uploads [num_shared], float32; architectures in which nobody
                returned an update are missing and keep their vector.
            exact: architecture -> the part of the vector that simply becomes the mean: running statistics, which no
                optimizer should touch, or all of it for plain averaging.
            sizes: architecture -> how far the parameters move towards the mean, where it is not 1; statistics always
                become their mean.
            untouched: architecture -> the parameters without a mean, bool [num_shared_parameters], where there are
                any: they stay, whatever the optimizer's momentum says.
        """
        held = {arch: mask.nonzero()[:, 0] for arch, mask in (untouched or {}).items()}
        before = {arch: self.model(arch)[index] for arch, index in held.items()}
        means = {arch: self._between(arch, mean, (sizes or {}).get(arch, 1.0)) for arch, mean in means.items()}
        for arch, mean in means.items():
            steps = exact[arch] != slice(None)  # else the optimizer has nothing to do but to count
            gradient = self.model(arch) - mean if steps else None
            if gradient is not None and arch in held:
                gradient[held[arch]] = 0.0
            self.vectors[arch].grad = gradient
        optimizer()
        with torch.no_grad():
            for arch, mean in means.items():
                self.vectors[arch][exact[arch]] = mean[exact[arch]]
            for arch, index in held.items():
                self.model(arch)[index] = before[arch]
        for vector in self.vectors.values():
            vector.grad = None

    def _between(self, arch: str, mean: Tensor, size: float) -> Tensor:
        """Return ``theta + size * (mean - theta)`` of the parameters, in float64, with the mean's statistics."""
        if size == 1.0:
            return mean
        result, parameters = mean.clone(), slice(self.residents[arch].flat.num_shared_parameters)
        theta = self.model(arch)[parameters].double()
        result[parameters] = theta + size * (mean[parameters].double() - theta)
        return result
