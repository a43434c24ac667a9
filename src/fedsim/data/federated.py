"""Who holds what: plain records of a federation's data, without decoded images."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fedsim.data.images import GallerySplit, Images, Index, Split

__all__ = ["ClientData", "FederatedData", "GeneratedImages", "RetrievalSet", "map_splits"]


@dataclass(frozen=True)
class RetrievalSet:
    """Queries and the gallery in which to find them."""

    query: Split
    gallery: Split
    own: Index | None = None
    """[Q] where each query stands in the gallery itself, if it does: no match for itself"""
    splits: tuple[GallerySplit, ...] = ()
    """ways to part the gallery into queries and gallery; then ``query`` is empty, and scores are means over these"""


@dataclass(frozen=True)
class ClientData:
    """What one virtual client holds."""

    name: str
    train: Split
    """private training images; ``pids`` are the data set's own"""
    labels: Index
    """[n] training labels 0 .. num_classes - 1"""
    val: RetrievalSet | None
    """held-out training data for model selection"""
    tests: tuple[str, ...]
    """names of the test sets that belong to this client"""
    common_classes: int | None = None
    """classes that all clients number alike, whether this one has images of them or not; None: labels are its own;
    0: identities are unknown, and all labels 0"""
    generated: GeneratedImages | None = None
    """generated images that join its local training; in no other number of this client"""

    @property
    def knows_identities(self) -> bool:
        """Whether :attr:`labels` mean anything."""
        return self.common_classes != 0

    def without_identities(self) -> ClientData:
        """Return the same client without knowledge of who is on its training images."""
        nobody = np.zeros_like(self.labels)
        return replace(self, train=replace(self.train, pids=nobody), labels=nobody, common_classes=0)

    @property
    def num_classes(self) -> int:
        """Size of the label space: by default the number of training identities; 0 where these are unknown."""
        return int(self.labels.max()) + 1 if self.common_classes is None else self.common_classes

    @property
    def num_images(self) -> int:
        """Number of training images."""
        return len(self.labels)

    @property
    def num_cameras(self) -> int:
        """Number of cameras among the training images."""
        return len(np.unique(self.train.camids))


@dataclass(frozen=True)
class FederatedData:
    """The whole federation, known to every rank; images are decoded only where they are needed."""

    clients: tuple[ClientData, ...]
    tests: dict[str, RetrievalSet]
    """test sets by domain name, unseen ones included"""
    unseen: tuple[str, ...]
    """domains on which nobody trains"""
    public: Split | None
    """unlabelled images that the server may use"""
    public_name: str | None = None
    """the data set that they are from"""
    classes: Index | None = None
    """[Z] identity of each label, where all clients have the same labels"""

    def without_identities(self, names: Collection[str]) -> FederatedData:
        """Return a federation in which these clients do not know who is on their training images."""
        clients = (client.without_identities() if client.name in names else client for client in self.clients)
        return replace(self, clients=tuple(clients))

    @property
    def has_unlabelled(self) -> bool:
        """Whether some client knows no identities."""
        return not all(client.knows_identities for client in self.clients)


def map_splits(federated: FederatedData, change: Callable[[Split], Split]) -> FederatedData:
    """Return a federation with every list of images changed; their numbers and labels must stay."""

    def change_set(one: RetrievalSet) -> RetrievalSet:
        return replace(one, query=change(one.query), gallery=change(one.gallery))

    clients = tuple(
        replace(client, train=change(client.train), val=None if client.val is None else change_set(client.val))
        for client in federated.clients
    )
    tests = {name: change_set(one) for name, one in federated.tests.items()}
    public = None if federated.public is None else change(federated.public)
    return replace(federated, clients=clients, tests=tests, public=public)


@dataclass(frozen=True)
class GeneratedImages:
    """The generated images of one client."""

    images: Images
    labels: Index
    """[m] training labels of the client in whose place they are put, ascending"""
    classes: Index
    """[m, K] training labels of those whom they show, for K the most of an image; padded with any"""
    weights: NDArray[np.float32]
    """[m, K] of these, in (0, 1], of sums at most 1; 0 where padded"""
    share: float
    """see :class:`Generated`"""

    def __len__(self) -> int:
        """Return m."""
        return len(self.labels)
