"""The centers of center loss: they stay with a client, and follow the features of its identities.

The loss itself is a pure function of them, :func:`~fedsim.training.objective.supervised_loss`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedsim.functional.losses import moved_centers
from fedsim.training.batch import Batch, ScoredBatch
from fedsim.training.flat_model import Output
from fedsim.training.objective import Objective, supervised_loss

CENTERS = "centers"
"""the name of the centers that a client keeps between rounds: [Z, D] float32"""


def score_with_centers(
    objective: Objective, kept: dict[str, Tensor], num_classes: int, output: Output, batch: Batch, *, counts: bool
) -> ScoredBatch:
    """Return the supervised loss of a batch, and then move the centers if the batch ``counts``.

    So the centers follow the model whose loss is logged. They are among the tensors that a client of ``num_classes``
    identities has ``kept``; before its first batch they are 0.
    """
    assert objective.center is not None, "there is a center loss"
    features = output.features.layer(objective.center.features)
    if CENTERS not in kept:
        kept[CENTERS] = features.new_zeros((num_classes, features.shape[1]), dtype=torch.float32).detach()
    scored = supervised_loss(objective, output, batch, kept[CENTERS])
    if counts:
        # in place, as graphs hold its address
        kept[CENTERS].copy_(moved_centers(kept[CENTERS], features, batch.labels, objective.center.rate))
    return scored
