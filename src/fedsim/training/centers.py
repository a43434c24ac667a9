"""The centers of center loss: they stay with a client, and follow the features of its identities.

The loss itself is a pure function of them, :func:`~fedsim.training.objective.supervised_loss`.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from fedsim.functional.losses import moved_centers
from fedsim.training.batch import Batch, ScoredBatch
from fedsim.training.flat_model import Output
from fedsim.training.objective import CenterLoss, Objective, supervised_loss

CENTERS = "centers"
"""the name of the centers that a client keeps between rounds: [Z, D] float32"""


class KeepsCenters(Protocol):
    """The part of a client that the centers need."""

    objective: Objective
    num_classes: int
    """Z: its identities"""
    kept: dict[str, Tensor]
    """tensors that it keeps between rounds, by name"""

    def keep(self, name: str, tensor: Tensor) -> None:
        """Keep a copy of a tensor between rounds."""


def score_with_centers(
    client: KeepsCenters, settings: CenterLoss, output: Output, batch: Batch, counts: bool
) -> ScoredBatch:
    """Return the supervised loss of a batch, and then move the centers if the batch ``counts``.

    So the centers follow the model whose loss is logged.
    """
    features = output.features.layer(settings.features)
    centers = centers_of(client, features)
    scored = supervised_loss(client.objective, output, batch, centers)
    if counts:
        # in place, as graphs hold its address
        centers.copy_(moved_centers(centers, features, batch.labels, settings.rate))
    return scored


def centers_of(client: KeepsCenters, features: Tensor) -> Tensor:
    """Return the centers [Z, D] float32 that a client keeps, for features [B, D]; before its first batch they are 0."""
    if CENTERS not in client.kept:
        client.keep(CENTERS, features.new_zeros((client.num_classes, features.shape[1]), dtype=torch.float32))
    return client.kept[CENTERS]
