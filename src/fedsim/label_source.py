"""Labels of clients that know no identities: clusters of their images, found anew before each local epoch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedsim.clustering.losses import similarities
from fedsim.clustering.proxies import Proxies, make_proxies, proxy_batches, update_memory
from fedsim.clustering.pseudo_labels import find_clusters
from fedsim.data.pixels import Pixels
from fedsim.extraction import extract_features
from fedsim.resident import Resident
from fedsim.settings import Clustering, Evaluation, LocalTraining

__all__ = ["PseudoLabels", "ScoredBatch", "label_images"]


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
        how: momentum and loss.
        training: P * K and K of the batches.
    """

    def __init__(self, labels: Tensor, proxies: Proxies, how: Clustering, training: LocalTraining) -> None:
        self.labels = labels
        self.proxies = proxies
        self.how = how
        self.num_instances = training.num_instances
        self.num_proxies = training.batch_size // training.num_instances
        self.num_clusters = int(proxies.clusters.max()) + 1 if len(proxies) else 0
        self.share = float((labels >= 0).double().mean())
        """of the images that are in clusters"""

    def batches(self, generator: torch.Generator) -> list[Tensor]:
        """Return the epoch's batches as positions in :attr:`labels`: P proxies with K images each."""
        return proxy_batches(self.labels, self.num_proxies, self.num_instances, generator)

    def score(self, features: Tensor, labels: Tensor) -> ScoredBatch:
        """Return the loss of a batch, then move the proxies of its images towards them.

        Args:
            features: [B, D] float32 of the neck, of any length.
            labels: [B] int64 proxies, on the device.
        """
        similarity = similarities(features, self.proxies, self.how.loss.temperature)
        loss = self.how.loss(similarity, labels, self.proxies)
        guesses, truth = self.proxies.clusters[similarity.argmax(1)], self.proxies.clusters[labels]
        unit = torch.nn.functional.normalize(features.detach())
        self.proxies.memory = update_memory(self.proxies.memory, unit, labels, self.how.momentum)
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
    return PseudoLabels(labels, proxies, how, training)
