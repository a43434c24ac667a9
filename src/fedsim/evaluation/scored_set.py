"""A data set on which models are scored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from fedsim.data.federated import FederatedData, RetrievalSet
from fedsim.data.images import Images
from fedsim.evaluation.summary import SplitName


@final
@dataclass(frozen=True, eq=False)  # a key of dictionaries: two sets are equal only if they are the same object
class ScoredSet:
    """A data set on which models are scored."""

    split: SplitName
    domain: str
    images: RetrievalSet

    @property
    def name(self) -> str:
        """The set's name in messages."""
        return f"{self.split} set of {self.domain}"

    @property
    def lists(self) -> dict[str, Images]:
        """Queries and gallery by their names in messages."""
        prefix = f"{self.split} {self.domain}"
        return {f"{prefix} queries": self.images.query.images, f"{prefix} gallery": self.images.gallery.images}

    @property
    def num_images(self) -> int:
        """Number of queries and gallery images."""
        return len(self.images.query) + len(self.images.gallery)


def images_of(federated: FederatedData, split: SplitName, domain: str) -> RetrievalSet:
    """Return the queries and the gallery of a test set, or of a client's validation set."""
    if split == "test":
        return federated.tests[domain]
    images = next(client.val for client in federated.clients if client.name == domain)
    assert images is not None
    return images
