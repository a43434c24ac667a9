"""The interface of a task: from images to a model's outputs, and from outputs to scores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple, TypeAlias, final

from torch import Tensor

from fedsim.data.federated import FederatedData, RetrievalSet
from fedsim.data.images import Images
from fedsim.data.pixels import Pixels
from fedsim.evaluation.ranking import Floats
from fedsim.evaluation.settings import Evaluation
from fedsim.evaluation.summary import QueryResults, SplitName
from fedsim.training.features import FLOAT32, Passes
from fedsim.training.flat_model import FlatModel


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


class Outputs(NamedTuple):
    """A model's outputs on a data set, float32, on one device."""

    query: Tensor
    """[Q, D]"""
    gallery: Tensor
    """[G, D]"""


class Scores(NamedTuple):
    """Scores of a model on a data set."""

    metrics: Floats
    """[trials, metrics] means over queries, fractions of 1"""
    queries: QueryResults


Writer: TypeAlias = Callable[[str, ScoredSet, Outputs], None]
"""Writes files about a model's outputs on a data set, under a name."""


class Scorer(ABC):
    """A task, such as retrieval. Tables hold the scores of single queries: ranks fill them and exchange them."""

    metrics: ClassVar[tuple[str, ...]]
    """names of the metrics"""

    def select(self, images: RetrievalSet) -> RetrievalSet:
        """Return the images on which models run: all."""
        return images

    @abstractmethod
    def check(self, data: ScoredSet) -> None:
        """Raise DataError if models cannot be scored on a data set."""

    @abstractmethod
    def width(self, model: FlatModel) -> int:
        """Return D, the number of outputs per image."""

    @abstractmethod
    def outputs(self, model: FlatModel, images: Pixels) -> Tensor:
        """Return the outputs for n images, float32 [n, D], on the model's device."""

    @abstractmethod
    def blank(self, data: ScoredSet) -> list[Tensor]:
        """Return the tables of a data set, one per trial, float64 zeros [Q, columns]."""

    @abstractmethod
    def score(self, data: ScoredSet, outputs: Outputs, is_assigned: Callable[[int], bool]) -> list[Floats]:
        """Return the tables with the scores of this rank's blocks of queries; all other rows are zero.

        ``is_assigned`` gets the number of a block. Raises NotFiniteError if outputs cannot be compared.
        """

    @abstractmethod
    def results(self, data: ScoredSet, tables: Sequence[Tensor]) -> Scores:
        """Return the scores in full tables."""

    @abstractmethod
    def feature_writer(self, folder: Path) -> Writer:
        """Return a function that writes ``folder``/NAME.npz; raises ConfigError if the task has no features."""

    @abstractmethod
    def list_writer(self, folder: Path) -> Writer:
        """Return a function that writes ranked lists to ``folder``; raises ConfigError if the task ranks nothing."""


def passes_of(settings: Evaluation, precision: str, model: FlatModel) -> Passes:
    """Return how a model is run: in float32, or as in training in a run of this ``precision``."""
    return Passes(precision, model.channels_last) if settings.precision == "run" else FLOAT32
