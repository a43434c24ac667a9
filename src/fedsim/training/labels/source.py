"""Labels of clients that know no identities: clusters of their images, found before a local epoch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fedsim.data.batches import shuffled_batches
from fedsim.training.flat_model import Resident
from fedsim.training.labels import BottomUp, Clustering
from fedsim.training.labels.bottom_up import merge_clusters
from fedsim.training.labels.losses import ProxyLoss, similarities
from fedsim.training.labels.proxies import Proxies, make_proxies, proxy_batches, update_memory
from fedsim.training.labels.pseudo_labels import find_clusters
from fedsim.training.settings import LocalTraining

__all__ = ["CLUSTERS", "PseudoLabels", "ScoredBatch", "grow_clusters", "label_by_density", "remember_clusters"]

CLUSTERS = "bottom_up"
"""what a client keeps whose clusters grow from round to round: [n] int64, the cluster of each image"""


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


def grow_clusters(features: Tensor | None, last: Tensor | None, num_images: int, how: BottomUp) -> Tensor:
    """Return the cluster of each image [n] int64: at first each its own, then some of the last ones merged.

    Args:
        features: [n, D]; None in a client's first round.
        last: [n] the clusters of its last round; None in its first.
        num_images: n.
        how: how many merge.
    """
    if features is None or last is None:
        return torch.arange(num_images)
    return merge_clusters(features, last, round(how.merge * num_images), how.size_penalty)


def label_by_density(features: Tensor, cameras: Tensor, training: LocalTraining, how: Clustering) -> PseudoLabels:
    """Cluster images by DBSCAN, and make their proxies."""
    features, cameras = features.repeat(how.replicate, 1), cameras.repeat(how.replicate)
    found = find_clusters(features, k1=how.k1, k2=how.k2, eps=how.eps, min_samples=how.min_samples)
    if how.proxies == "cluster":
        cameras = torch.zeros_like(cameras)
    proxies, labels = make_proxies(features, torch.from_numpy(found), cameras)
    num_proxies = training.batch_size // training.num_instances

    def draw(generator: torch.Generator) -> list[Tensor]:
        return proxy_batches(labels, num_proxies, training.num_instances, generator)

    return PseudoLabels(labels, proxies, how.loss, how.momentum, draw)


def remember_clusters(labels: Tensor, resident: Resident, training: LocalTraining, how: BottomUp) -> PseudoLabels:
    """Make an empty memory of given clusters: the loss of one that no image has moved yet compares with 0."""
    clusters = torch.arange(int(labels.max()) + 1, device=resident.device)
    memory = torch.zeros(len(clusters), resident.model.num_features, device=resident.device)
    loss = ProxyLoss(intra=1.0, inter=0.0, camera=0.0, temperature=how.temperature)

    def draw(generator: torch.Generator) -> list[Tensor]:
        return shuffled_batches(len(labels), training.batch_size, generator, training.drop_partial)

    return PseudoLabels(labels, Proxies(memory, clusters, torch.zeros_like(clusters)), loss, how.momentum, draw)
