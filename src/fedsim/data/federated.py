"""Plain records of a federation's data: clients and test sets, without decoded images."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fedsim.core.errors import DataError
from fedsim.core.names import problem_of_name
from fedsim.data.images import GallerySplit, Images, Index, Split

ONE_IDENTITY = "only one training identity; training needs at least 2"
"""the problem of a data set or client without a second person"""


@dataclass(frozen=True)
class RetrievalSet:
    """Queries, and the gallery to search."""

    query: Split
    gallery: Split
    own: Index | None = None
    """[Q] position in the gallery of the query itself, which is no match; None: queries are not in the gallery"""
    splits: tuple[GallerySplit, ...] = ()
    """if not empty, scores are means over these splits of the gallery, and ``query`` is empty"""


@dataclass(frozen=True)
class ClientData:
    """The data of one client."""

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
    """number of classes, if all clients have the same labels; None: the client numbers its own identities; 0:
    identities are unknown, and all labels are 0"""
    generated: GeneratedImages | None = None
    """generated images for its local training; they count in none of the numbers below"""
    mean_images: float = np.nan
    """mean number of training images of all clients, once the federation is assembled"""

    def __post_init__(self) -> None:
        """Raise DataError if the name is none: files, metrics and tables are named after it."""
        if problem := problem_of_name(self.name):
            raise DataError(f"data.source: of a client, {problem}; rename it")

    @property
    def knows_identities(self) -> bool:
        """Whether the identities are known, so that :attr:`labels` have a meaning."""
        return self.common_classes != 0

    def without_identities(self) -> ClientData:
        """Return a client with the same images and unknown identities."""
        unknown = np.zeros_like(self.labels)
        return replace(self, train=replace(self.train, pids=unknown), labels=unknown, common_classes=0)

    @property
    def num_classes(self) -> int:
        """Size of the label space: normally the number of training identities; 0 if these are unknown."""
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
    """The whole federation. Every rank has this record, and decodes only the images of its own clients."""

    clients: tuple[ClientData, ...]
    tests: dict[str, RetrievalSet]
    """test sets by domain name, unseen ones included"""
    unseen: tuple[str, ...]
    """domains on which no client trains"""
    public: Split | None
    """unlabelled images that the server may use"""
    public_name: str | None = None
    """the data set of the public images"""
    classes: Index | None = None
    """[Z] identity of each label, if all clients have the same labels"""
    root: ClientData | None = None
    """the labelled training images among the public ones, as those of a client; None: there are none"""

    def without_identities(self, names: Collection[str]) -> FederatedData:
        """Return a federation in which the identities of these clients' training images are unknown."""
        clients = (client.without_identities() if client.name in names else client for client in self.clients)
        return replace(self, clients=tuple(clients))

    @cached_property
    def has_unlabelled(self) -> bool:
        """Whether the identities of some client are unknown."""
        return not all(client.knows_identities for client in self.clients)


def map_splits(federated: FederatedData, change: Callable[[Split], Split]) -> FederatedData:
    """Return a federation with every split changed; ``change`` must keep the number of images and the labels."""

    def change_set(pair: RetrievalSet) -> RetrievalSet:
        return replace(pair, query=change(pair.query), gallery=change(pair.gallery))

    clients = tuple(
        replace(client, train=change(client.train), val=None if client.val is None else change_set(client.val))
        for client in federated.clients
    )
    tests = {name: change_set(test) for name, test in federated.tests.items()}
    public, root = federated.public, federated.root
    return replace(
        federated,
        clients=clients,
        tests=tests,
        public=None if public is None else change(public),
        root=None if root is None else replace(root, train=change(root.train)),
    )


@dataclass(frozen=True)
class GeneratedImages:
    """The generated images of one client."""

    images: Images
    labels: Index
    """[m] training labels, ascending: an image takes the place of a real image with this label"""
    classes: Index
    """[m, K] training labels in each soft label, K at most; padded with any label"""
    weights: NDArray[np.float32]
    """[m, K] weights of these, in (0, 1], with sums of at most 1; 0 for padding"""
    share: float
    """see :class:`Generated`"""

    def __len__(self) -> int:
        return len(self.labels)
