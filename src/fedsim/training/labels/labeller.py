"""Labels of a client's images in a session: identities, or clusters that are found in it.

The loss of identities is in :mod:`fedsim.training.objective`, that of clusters in :mod:`fedsim.training.proxy_loss`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsim.core.errors import NoClustersError
from fedsim.data.batches import identity_batches, people_batches, shuffled_batches
from fedsim.functional.memory import update_memory
from fedsim.training.batch import ClientImages, ScoredBatch
from fedsim.training.features import PLAIN, POOLED, Extraction
from fedsim.training.flat_model import FlatModel
from fedsim.training.labels import BottomUp, Clustering
from fedsim.training.labels.bottom_up import merge_clusters
from fedsim.training.labels.pseudo_labels import find_clusters
from fedsim.training.proxies import Proxies, make_proxies, proxy_batches
from fedsim.training.proxy_loss import ProxyLoss, similarities
from fedsim.training.settings import LocalTraining

CLUSTERS = "bottom_up"
"""the name of the clusters that a client keeps between rounds, where they grow: [n] int64, the cluster of each image"""
FACTS = ("clusters", "clustered")
"""numbers about a session of a client that clusters: clusters of the last local epoch, share of the images in them"""


class PseudoLabels:
    """Labels of a local epoch that come from clusters. Proxies replace the head, and move with each batch.

    ``labels`` [n * r] int64 on the CPU are the proxy of each copy of each image, -1: none; copy c of image i is at
    c * n + i. ``proxies`` are on the device; ``loss`` is of similarities to them, ``momentum`` of their memory.
    ``batches`` makes an epoch's batches, as positions in ``labels``, by a random stream; ``max_per_proxy`` is
    the largest number of images of one proxy in a batch.
    """

    def __init__(
        self,
        labels: Tensor,
        proxies: Proxies,
        loss: ProxyLoss,
        momentum: float,
        batches: Callable[[torch.Generator], list[Tensor]],
        max_per_proxy: int,
    ) -> None:
        self.labels, self.proxies = labels, proxies
        self.loss, self.momentum, self.batches, self.max_per_proxy = loss, momentum, batches, max_per_proxy
        self.num_clusters = int(proxies.clusters.max()) + 1 if len(proxies) else 0
        self.share = float((labels >= 0).double().mean())
        """share of the images that are in clusters"""

    def score(self, features: Tensor, labels: Tensor) -> ScoredBatch:
        """Return the loss of neck features [B, D] of any length, with proxies ``labels`` [B] int64; then move these."""
        proxies = self.proxies
        similarity = similarities(features, proxies, self.loss.temperature)
        loss = self.loss(similarity, labels, proxies)
        guesses, truth = proxies.clusters[similarity.argmax(1)], proxies.clusters[labels]
        unit = F.normalize(features.detach())
        proxies.memory = update_memory(proxies.memory, unit, labels, self.momentum, self.max_per_proxy)
        return ScoredBatch(loss, guesses, truth)


def label_by_density(features: Tensor, cameras: Tensor, training: LocalTraining, settings: Clustering) -> PseudoLabels:
    """Cluster images by DBSCAN, and make their proxies."""
    features, cameras = features.repeat(settings.replicate, 1), cameras.repeat(settings.replicate)
    clusters = find_clusters(
        features, k1=settings.k1, k2=settings.k2, eps=settings.eps, min_samples=settings.min_samples
    )
    if settings.proxies == "cluster":
        cameras = torch.zeros_like(cameras)
    proxies, labels = make_proxies(features, torch.from_numpy(clusters), cameras)
    size = training.batch_of(len(labels))
    batches = partial(proxy_batches, labels, size // training.num_instances, training.num_instances)
    return PseudoLabels(labels, proxies, settings.loss, settings.momentum, batches, training.num_instances)


def label_by_clusters(labels: Tensor, model: FlatModel, training: LocalTraining, settings: BottomUp) -> PseudoLabels:
    """Make pseudo-labels of clusters with an empty memory: a proxy is 0 until the first image moves it."""
    clusters = torch.arange(int(labels.max()) + 1, device=model.device)
    memory = torch.zeros(len(clusters), model.network.num_features, device=model.device)
    loss = ProxyLoss(intra=1.0, inter=0.0, camera=0.0, temperature=settings.temperature)
    size = training.batch_of(len(labels))
    batches = partial(shuffled_batches, len(labels), size, drop_partial=training.drop_partial)
    proxies, largest = Proxies(memory, clusters, torch.zeros_like(clusters)), int(labels.bincount().max())
    return PseudoLabels(labels, proxies, loss, settings.momentum, batches, largest)


class Labelled(Protocol):
    """The part of a client that a labeller needs."""

    client_name: str
    round: int
    """the current one, from 0"""
    training_settings: LocalTraining
    images: ClientImages
    model: FlatModel
    kept: dict[str, Tensor]
    """tensors that it keeps between rounds, by name"""

    def keep(self, name: str, tensor: Tensor) -> None:
        """Keep a tensor between rounds."""

    def plain_features(self, extraction: Extraction = PLAIN) -> Tensor:
        """Return the features [n, D] of all images without augmentation."""


class Labeller:
    """The labels of a client's images during one session: their identities."""

    pseudo: PseudoLabels | None = None
    """of the current local epoch, where labels are clusters"""

    def __init__(self, client: Labelled) -> None:
        self._client = client

    def plan(self, stream: torch.Generator, is_used: bool) -> tuple[Tensor, list[Tensor]]:  # noqa: ARG002 - the stream always advances
        """Return labels [m] and the random batches of a local epoch, as positions in them.

        ``is_used``: whether the client trains on a batch of the epoch.
        """
        settings, labels = self._client.training_settings, self._client.images.labels
        size = settings.batch_of(len(labels))
        if settings.draws_people:
            cameras = self._client.images.cameras if settings.positives == "other_cameras" else None
            draw = people_batches if settings.sampler == "people" else identity_batches
            return labels, draw(labels, size, settings.num_instances, stream, cameras=cameras)
        return labels, shuffled_batches(len(labels), size, stream, settings.drop_partial)

    def rows(self, positions: Tensor) -> Tensor:
        """Return the images at positions in the labels."""
        return positions

    @property
    def facts(self) -> dict[str, float]:
        """Numbers about the session, by the names in :data:`FACTS`."""
        return {}

    def check(self) -> None:
        """Raise NoClustersError if the session had no labels."""


class Clusters(Labeller):
    """Clusters of the images as labels: by density for each local epoch, or growing from round to round."""

    _has_clusters = False

    def find(self) -> PseudoLabels:
        """Cluster the images for the local epoch that begins; growing clusters are merged once in a round."""
        client, settings = self._client, self._client.training_settings
        if settings.cluster is not None:
            self.pseudo = label_by_density(client.plain_features(), client.images.cameras, settings, settings.cluster)
        elif self.pseudo is None:
            assert settings.bottom_up is not None
            labels = self._grown(settings.bottom_up)
            client.keep(CLUSTERS, labels)
            self.pseudo = label_by_clusters(labels, client.model, settings, settings.bottom_up)
        return self.pseudo

    def _grown(self, settings: BottomUp) -> Tensor:
        """Return the cluster of each image [n]: at first each image is one, then clusters of the last round merge."""
        client, count = self._client, len(self._client.images.labels)
        if CLUSTERS not in client.kept:
            return torch.arange(count)
        last = client.kept[CLUSTERS].cpu()
        return merge_clusters(client.plain_features(POOLED), last, int(settings.merge * count), settings.size_penalty)

    def plan(self, stream: torch.Generator, is_used: bool) -> tuple[Tensor, list[Tensor]]:
        """Return the proxies of all copies of all images, and batches of those that have one."""
        if not is_used:
            return self._client.images.labels, []
        pseudo = self.find()
        self._has_clusters |= pseudo.num_clusters > 0
        return pseudo.labels, pseudo.batches(stream)

    def rows(self, positions: Tensor) -> Tensor:
        """Return the images at positions in the labels: copy c of image i is at c * n + i."""
        return positions % len(self._client.images.labels)

    @property
    def facts(self) -> dict[str, float]:
        """Clusters of the last local epoch, and the share of the images in them."""
        if self.pseudo is None:
            return {}
        return dict(zip(FACTS, (float(self.pseudo.num_clusters), self.pseudo.share), strict=True))

    def check(self) -> None:
        """Raise NoClustersError if no local epoch had any."""
        if not self._has_clusters:
            name, round_ = self._client.client_name, self._client.round + 1
            raise NoClustersError(f"client {name}, round {round_}: no clusters of its images")


def labeller_of(client: Labelled) -> Labeller:
    """Return the labeller of a client's settings."""
    return (Clusters if client.training_settings.clusters else Labeller)(client)
