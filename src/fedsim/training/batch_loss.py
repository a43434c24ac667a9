"""Losses of your own that see a batch: features of all views, labels, cameras, logits, and the round."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

from torch import Tensor, nn

from fedsim.core.checks import positive
from fedsim.core.errors import ConfigError
from fedsim.models.reid import Features
from fedsim.training.batch import Batch
from fedsim.training.flat_model import Output

_FIELD = "model.objective.metric"


class SeenBatch(NamedTuple):
    """All that a loss sees of a batch: B images, C pooled and D neck features, Z identities of the client."""

    views: tuple[Features, ...]
    """of each view ``pool`` [B, C] and ``neck`` [B, D], with gradient; the first is that of the other losses"""
    labels: Tensor
    """[B] int64, 0 .. Z - 1"""
    cameras: Tensor
    """[B] int64"""
    logits: Tensor
    """[B, Z] of the first view, with gradient"""
    head: Tensor
    """[Z, D], the weights of the identity head"""
    round: int
    """the current round, from 0"""

    @property
    def features(self) -> Features:
        """The features of the first view."""
        return self.views[0]


class BatchLoss(nn.Module, ABC):
    """Base of losses of your own: ``model.objective.metric: {class_path: your.package.YourLoss}``.

    A loss has no parameters, because no client would keep them, and no state. ``weight`` is its weight in the sum.
    """

    views: ClassVar[int] = 1
    """number of augmented views of each image: 2 costs a second forward pass of each batch"""

    def __init__(self, weight: float = 1.0) -> None:
        super().__init__()
        positive(_FIELD, weight=weight)
        self.weight = weight

    @abstractmethod
    def forward(self, seen: SeenBatch) -> Tensor:
        """Return the loss of a batch, a scalar float32 with gradient, without its weight."""

    def of(self, output: Output, batch: Batch) -> Tensor:
        """Return the loss of a model's output for a batch.

        Raises:
            ConfigError: if the method has not computed the views that the loss compares.
        """
        name, views = type(self).__name__, (output.features, *output.views)
        if len(views) < self.views:
            raise ConfigError(
                f"{_FIELD}: {name} compares {self.views} views, and the method computes one in a forward pass of its "
                "own; choose a method that trains by client.training_step, such as FedPav or FedProx"
            )
        assert batch.cameras is not None, "batches have cameras where a loss sees them"
        seen = SeenBatch(views[: self.views], batch.labels, batch.cameras, output.logits, output.head, batch.round)
        loss: Tensor = self(seen)
        return loss

    def __init_subclass__(cls) -> None:
        """Refuse a number of views that no batch has."""
        super().__init_subclass__()
        if cls.views < 1:
            raise ConfigError(f"{_FIELD}: {cls.__name__}.views is {cls.views}; give a number from 1")
