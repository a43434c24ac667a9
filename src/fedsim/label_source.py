"""Labels of clients that know no identities: clusters of their images, found anew before each local epoch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fedsim.clustering.bottom_up import merge_clusters
from fedsim.clustering.losses import ProxyLoss, similarities
from fedsim.clustering.proxies import Proxies, make_proxies, proxy_batches, update_memory
from fedsim.clustering.pseudo_labels import find_clusters
from fedsim.data.batches import shuffled_batches
from fedsim.data.pixels import Pixels
from fedsim.extraction import extract_features
from fedsim.resident import Resident
from fedsim.settings import Evaluation, LocalTraining

__all__ = ["PseudoLabels", "ScoredBatch", "grow_clusters", "label_images"]


class ScoredBatch(NamedTuple):
    """What pseudo-labels say about a batch of B images."""

    loss: Tensor
    """scalar, with gradient"""
    guesses: Tensor
    """[B] cluster of the most similar proxy"""
    truth: Tensor
    """[B] cluster of the own proxy"""


class PseudoLabels:
    """What a client trains on in a local epoch: its proxies take the place of a head, and move with each batch.

    Args:
        labels: [n * r] int64 proxy of each copy of each image, -1: none, on the CPU. Copy c of image i is c * n + i.
        proxies: on the device.
        loss: of similarities to proxies.
        momentum: of the memory.
        draw: an epoch's batches, as positions in ``labels``, from a random stream.
    """

    def __init__(
        self,
        labels: Tensor,
        proxies: Proxies,
        loss: ProxyLoss,
        momentum: float,
        draw: Callable[[torch.Generator], list[Tensor]],
    ) -> None:
        self.labels = labels
        self.proxies = proxies
        self.loss = loss
        self.momentum = momentum
        self.batches = draw
        self.num_clusters = int(proxies.clusters.max()) + 1 if len(proxies) else 0
        self.share = float((labels >= 0).double().mean())
        """of the images that are in clusters"""

    def score(self, features: Tensor, labels: Tensor) -> ScoredBatch:
        """Return the loss of a batch, then move the proxies of its images towards them.

        Args:
            features: [B, D] float32 of the neck, of any length.
            labels: [B] int64 proxies, on the device.
        """
        similarity = similarities(features, self.proxies, self.loss.temperature)
        loss = self.loss(similarity, labels, self.proxies)
        guesses, truth = self.proxies.clusters[similarity.argmax(1)], self.proxies.clusters[labels]
        unit = torch.nn.functional.normalize(features.detach())
        self.proxies.memory = update_memory(self.proxies.memory, unit, labels, self.momentum)
        return ScoredBatch(loss, guesses, truth)


def label_images(resident: Resident, images: Pixels, cameras: Tensor, training: LocalTraining) -> PseudoLabels:
    """Cluster a client's images by what its model, in evaluation mode, says of them, and make their proxies.

    Args:
        resident: the client's model, in training mode.
        images: n training images.
        cameras: [n] int64 on the CPU.
        training: settings, with ``cluster``.
    """
    how = training.cluster
    assert how is not None
    features = extract_features(resident.model, images, Evaluation(), resident.device).repeat(how.replicate, 1)
    resident.model.train()
    found = find_clusters(features, k1=how.k1, k2=how.k2, eps=how.eps, min_samples=how.min_samples)
    cameras = cameras.repeat(how.replicate)
    if how.proxies == "cluster":
        cameras = torch.zeros_like(cameras)
    proxies, labels = make_proxies(features, torch.from_numpy(found), cameras)
    num_proxies = training.batch_size // training.num_instances

    def draw(generator: torch.Generator) -> list[Tensor]:
        return proxy_batches(labels, num_proxies, training.num_instances, generator)

    return PseudoLabels(labels, proxies, how.loss, how.momentum, draw)


def grow_clusters(resident: Resident, images: Pixels, last: Tensor | None, training: LocalTraining) -> PseudoLabels:
    """Merge clusters by what the client's model, in evaluation mode, says of the images; at first, each is one.

    The memory begins empty: the exclusive loss of a cluster that no image has moved yet compares with 0.

    Args:
        resident: the client's model, in training mode.
        images: n training images.
        last: [n] int64 clusters of the last round; None: there was none.
        training: settings, with ``bottom_up``.
    """
    how, num = training.bottom_up, len(images)
    assert how is not None
    labels = torch.arange(num) if last is None else last.cpu()
    if last is not None:
        features = extract_features(resident.model, images, Evaluation(), resident.device)
        resident.model.train()
        labels = merge_clusters(features, labels, round(how.merge * num), how.size_penalty)
    clusters = torch.arange(int(labels.max()) + 1, device=resident.device)
    memory = torch.zeros(len(clusters), resident.model.num_features, device=resident.device)
    loss = ProxyLoss(intra=1.0, inter=0.0, camera=0.0, temperature=how.temperature)

    def draw(generator: torch.Generator) -> list[Tensor]:
        return shuffled_batches(num, training.batch_size, generator, training.drop_partial)

    return PseudoLabels(labels, Proxies(memory, clusters, torch.zeros_like(clusters)), loss, how.momentum, draw)
