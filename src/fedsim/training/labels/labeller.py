"""Where the labels of a client's images come from in a session: identities, or clusters that are found on the way."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fedsim.core.errors import NoClustersError
from fedsim.data.batches import identity_batches, shuffled_batches
from fedsim.functional.losses import batch_hard_triplet, center_loss, moved_centers, smoothed_cross_entropy
from fedsim.models.reid import Features
from fedsim.training.batch import Batch, ClientImages
from fedsim.training.features import PLAIN, POOLED, Extraction
from fedsim.training.flat_model import FlatModel, Output
from fedsim.training.labels import BottomUp, Clustering
from fedsim.training.labels.bottom_up import merge_clusters
from fedsim.training.labels.losses import ProxyLoss, similarities
from fedsim.training.labels.proxies import Proxies, make_proxies, proxy_batches, update_memory
from fedsim.training.labels.pseudo_labels import find_clusters
from fedsim.training.settings import CenterLoss, LocalTraining, Objective

CLUSTERS = "bottom_up"
"""the name of the clusters that a client keeps between rounds, where they grow: [n] int64, the cluster of each image"""
CENTERS = "centers"
"""the name of the centers that a client keeps between rounds, for center loss: [Z, D] float32"""
FACTS = ("clusters", "clustered")
"""numbers about a session of a client that clusters: clusters of the last local epoch, share of the images in them"""


class ScoredBatch(NamedTuple):
    """The loss and the guesses of a batch of B images."""

    loss: Tensor
    """scalar, with gradient"""
    guesses: Tensor
    """[B] int64, identity of the largest logit, or cluster of the most similar proxy"""
    truth: Tensor
    """[B] int64, the own identity or cluster"""
    parts: tuple[Tensor, ...] = ()
    """scalars, the parts of the loss that ``Objective.parts`` names"""


class PseudoLabels:
    """Labels of a local epoch that come from clusters: proxies replace the head, and move with each batch.

    ``labels`` [n * r] int64 on the CPU are the proxy of each copy of each image, -1: none; copy c of image i is at
    c * n + i. ``proxies`` are on the device; ``loss`` is of similarities to them, ``momentum`` of their memory.
    ``batches`` makes an epoch's batches, as positions in ``labels``, of a random stream; ``most`` images of a proxy, or
    fewer, are in one.
    """

    def __init__(
        self,
        labels: Tensor,
        proxies: Proxies,
        loss: ProxyLoss,
        momentum: float,
        batches: Callable[[torch.Generator], list[Tensor]],
        most: int,
    ) -> None:
        self.labels, self.proxies = labels, proxies
        self.loss, self.momentum, self.batches, self.most = loss, momentum, batches, most
        self.num_clusters = int(proxies.clusters.max()) + 1 if len(proxies) else 0
        self.share = float((labels >= 0).double().mean())
        """of the images that are in clusters"""

    def score(self, features: Tensor, labels: Tensor) -> ScoredBatch:
        """Return the loss of neck features [B, D], of any length, with proxies ``labels`` [B]; then move these."""
        similarity = similarities(features, self.proxies, self.loss.temperature)
        loss = self.loss(similarity, labels, self.proxies)
        guesses, truth = self.proxies.clusters[similarity.argmax(1)], self.proxies.clusters[labels]
        unit = torch.nn.functional.normalize(features.detach())
        self.proxies.memory = update_memory(self.proxies.memory, unit, labels, self.momentum, self.most)
        return ScoredBatch(loss, guesses, truth)


def label_by_density(features: Tensor, cameras: Tensor, training: LocalTraining, how: Clustering) -> PseudoLabels:
    """Cluster images by DBSCAN, and make their proxies."""
    features, cameras = features.repeat(how.replicate, 1), cameras.repeat(how.replicate)
    found = find_clusters(features, k1=how.k1, k2=how.k2, eps=how.eps, min_samples=how.min_samples)
    if how.proxies == "cluster":
        cameras = torch.zeros_like(cameras)
    proxies, labels = make_proxies(features, torch.from_numpy(found), cameras)
    size = training.batch_of(len(labels))
    batches = partial(proxy_batches, labels, size // training.num_instances, training.num_instances)
    return PseudoLabels(labels, proxies, how.loss, how.momentum, batches, training.num_instances)


def remember_clusters(labels: Tensor, model: FlatModel, training: LocalTraining, how: BottomUp) -> PseudoLabels:
    """Make an empty memory of given clusters: the loss of one that no image has moved yet compares with 0."""
    clusters = torch.arange(int(labels.max()) + 1, device=model.device)
    memory = torch.zeros(len(clusters), model.network.num_features, device=model.device)
    loss = ProxyLoss(intra=1.0, inter=0.0, camera=0.0, temperature=how.temperature)
    size = training.batch_of(len(labels))
    batches = partial(shuffled_batches, len(labels), size, drop_partial=training.drop_partial)
    proxies, most = Proxies(memory, clusters, torch.zeros_like(clusters)), int(labels.bincount().max())
    return PseudoLabels(labels, proxies, loss, how.momentum, batches, most)


class Labelled(Protocol):
    """The view that a label source has of its client."""

    client_name: str
    num_classes: int
    """Z: its identities"""
    round: int
    """the current one, from 0"""
    training_settings: LocalTraining
    objective: Objective
    images: ClientImages
    model: FlatModel
    kept: dict[str, Tensor]
    """tensors that it keeps between rounds, by name"""

    def keep(self, name: str, tensor: Tensor) -> None:
        """Keep a tensor between rounds."""

    def plain_features(self, how: Extraction = PLAIN) -> Tensor:
        """Return the features [n, D] of all images without augmentation."""


class Labeller:
    """The labels of a client's images during one session: the people on them."""

    pseudo: PseudoLabels | None = None
    """of the current local epoch, where labels are clusters"""

    def __init__(self, client: Labelled) -> None:
        self._client = client

    def plan(self, stream: torch.Generator, is_wanted: bool) -> tuple[Tensor, list[Tensor]]:  # noqa: ARG002 - streams move alike
        """Return labels [m] and the random batches of a local epoch, as positions in them.

        ``is_wanted`` says whether the client gets to any batch of the epoch.
        """
        how, labels = self._client.training_settings, self._client.images.labels
        size = how.batch_of(len(labels))
        if how.sampler == "identity":
            return labels, identity_batches(labels, size, how.num_instances, stream)
        return labels, shuffled_batches(len(labels), size, stream, how.drop_partial)

    def rows(self, positions: Tensor) -> Tensor:
        """Return the images at positions in the labels."""
        return positions

    def score(self, output: Output, batch: Batch, counts: bool = True) -> ScoredBatch:
        """Return the supervised loss of a batch: cross-entropy, and those metric losses that have a weight.

        Where it ``counts``, the centers of center loss move: they follow the model whose loss is logged.
        """
        goal, labels = self._client.objective, batch.labels
        entropy = smoothed_cross_entropy(output.logits, labels, goal.label_smoothing, batch.targets)
        loss = entropy if goal.cross_entropy == 1 else goal.cross_entropy * entropy
        parts = [entropy]
        if goal.triplet > 0:
            features = output.features.pool if goal.triplet_on == "pool" else output.features.neck
            features = torch.nn.functional.normalize(features) if goal.unit_length else features
            parts.append(batch_hard_triplet(features, labels, goal.margin, goal.squared))
            loss = loss + goal.triplet * parts[-1]
        if goal.center is not None:
            parts.append(self._center_loss(goal.center, output.features, labels, counts))
            loss = loss + goal.center.weight * parts[-1]
        if goal.metric is not None:
            parts.append(goal.metric(output.features, labels, output.head))
            loss = loss + goal.metric.weight * parts[-1]
        logged = tuple(part.detach() for part in parts) if len(parts) > 1 else ()
        return ScoredBatch(loss, output.logits.argmax(1), labels, logged)

    def _center_loss(self, how: CenterLoss, of_batch: Features, labels: Tensor, moves: bool) -> Tensor:
        """Return the center loss of a batch; then move the centers, if asked."""
        client = self._client
        features = of_batch.pool if how.features == "pool" else of_batch.neck
        if CENTERS not in client.kept:
            client.keep(CENTERS, features.new_zeros((client.num_classes, features.shape[1]), dtype=torch.float32))
        centers = client.kept[CENTERS]
        loss = center_loss(features, labels, centers)
        if moves:
            centers.copy_(moved_centers(centers, features, labels, how.rate))  # in place, as graphs hold its address
        return loss

    @property
    def facts(self) -> dict[str, float]:
        """Numbers about the session, by the names in :data:`FACTS`."""
        return {}

    def check(self) -> None:
        """Raise NoClustersError if the session had no labels."""


class Clusters(Labeller):
    """Clusters of the images instead, by density and anew for each local epoch, or growing from round to round."""

    _found = False

    def find(self) -> PseudoLabels:
        """Cluster the images for the local epoch that begins; clusters that grow do so once in a round."""
        client, how = self._client, self._client.training_settings
        if how.cluster is not None:
            self.pseudo = label_by_density(client.plain_features(), client.images.cameras, how, how.cluster)
        elif self.pseudo is None:
            assert how.bottom_up is not None
            labels = self._grown(how.bottom_up)
            client.keep(CLUSTERS, labels)
            self.pseudo = remember_clusters(labels, client.model, how, how.bottom_up)
        return self.pseudo

    def _grown(self, how: BottomUp) -> Tensor:
        """Return the cluster of each image [n]: one for each at first, then the last round's, of which some merge."""
        client, count = self._client, len(self._client.images.labels)
        if CLUSTERS not in client.kept:
            return torch.arange(count)
        last = client.kept[CLUSTERS].cpu()
        return merge_clusters(client.plain_features(POOLED), last, int(how.merge * count), how.size_penalty)

    def plan(self, stream: torch.Generator, is_wanted: bool) -> tuple[Tensor, list[Tensor]]:
        """Return the proxies of all copies of all images, and batches of those that have one."""
        if not is_wanted:
            return self._client.images.labels, []
        pseudo = self.find()
        self._found |= pseudo.num_clusters > 0
        return pseudo.labels, pseudo.batches(stream)

    def score(self, output: Output, batch: Batch, counts: bool = True) -> ScoredBatch:  # noqa: ARG002 - proxies have one model
        """Return the loss of the proxies, and move them."""
        assert self.pseudo is not None, "there are no clusters before the first local epoch"
        return self.pseudo.score(output.features.neck, batch.labels)

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
        if not self._found:
            name, round_ = self._client.client_name, self._client.round + 1
            raise NoClustersError(f"client {name}, round {round_}: no clusters of its images")


def source_of(client: Labelled) -> Labeller:
    """Return the source that a client's settings ask for."""
    return (Clusters if client.training_settings.clusters else Labeller)(client)
