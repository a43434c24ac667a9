"""FedCAPR: federated camera-aware unsupervised person re-identification.

CVPR Workshops 2025; the baseline that paper 004 (FedKLPR) continues. Its text was not available: this file follows its
public code (github.com/maho666/FedCAPR) and the description in paper 004.

| hook         | code                                                                                    |
|--------------|-----------------------------------------------------------------------------------------|
| train        | the received model w^t, in evaluation mode, is the reference                            |
| loss         | L_capr (paper 004, Eq. 2) + 0.13 mean(1 - cos(f, f^t)) from the second round            |
| upload       | m_k, mean(1 - cos) of the features of the first 32 images before and after training     |
| weights      | m_k / sum over j of m_j                                                                 |

Clients cluster their images with ``model.client.cluster``, which any method can: this one adds the regulariser and the
weights. On clients with identities the regulariser is added to the supervised loss.

Deviations and silences:

- The code adds the regulariser after its loop over cameras, so that only images of the batch's last camera count:
  ``reg_last_camera_only``. Here all count.
- The code rounds weights down to thousandths; a round of small changes then divides 0 by 0: ``quantise``. Here nothing
  is rounded, and if all weights are 0 they are uniform.
- The code's clients also upload the centroids of their clusters, which are never used. Here they do not.
- The code trains 50 local epochs in the last of 20 rounds (``model.client.long_round``), and reports the best epoch of
  the local model by test rank-1. ``fedsim report --rule oracle`` chooses in this way, but among evaluated rounds.
- The published code has L_cam and the replication of images switched off; the paper lists both as contributions. It is
  unknown which setting the printed numbers have.
- FedUCA (MMSP 2022; no public code) is FedAvg with ``model.client.cluster`` and CAP's weights of the losses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch.nn.functional as F
from torch import Tensor

from fedsim.core.checks import at_least, not_negative
from fedsim.functional.losses import mean_cosine_distance, mean_of_chosen
from fedsim.functional.weighting import normalise
from fedsim.methods.base import Method, Replicas, Signal, Weights
from fedsim.methods.reference import RECEIVED, first_features, received_features, remember_received
from fedsim.models.groups import BODY
from fedsim.settings.facts import Facts
from fedsim.training.client import Batch, Client
from fedsim.training.messages import Measured, Report, Upload

_REGULAR = Facts(needs="regulariser")


@dataclass(frozen=True, kw_only=True)
class FedCAPR(Method):
    """Averaging of clients whose features stay near the received model's, weighted by the change of features."""

    shared_groups = BODY  # there is no head
    requires = frozenset({"built_in_model"})  # for the features that are compared
    measures: ClassVar[Mapping[str, Signal]] = {"cdw": "client"}
    replicas: ClassVar[Replicas] = {RECEIVED: "frozen"}

    regulariser: float = 0.13
    """weight of the cosine distance from the received model's features"""
    reg_from: Annotated[int, _REGULAR] = 2
    """the first round with the regulariser, from 1"""
    reg_last_camera_only: Annotated[bool, _REGULAR] = False
    """count only images of the batch's last camera, as in the code"""
    quantise: bool = False
    """round m_k down to thousandths, as in the code"""

    def __post_init__(self) -> None:
        not_negative("model.method", regulariser=self.regulariser)
        at_least("model.method", 1, ", the first round", reg_from=self.reg_from)

    def train(self, client: Client) -> None:
        """Keep a copy of the received model as the reference, and train."""
        remember_received(client)
        super().train(client)

    def loss(self, client: Client, batch: Batch) -> Tensor:
        """Return the loss of the clusters plus the regulariser."""
        output = client.forward(batch.images)
        loss = client.supervised_loss(output, batch)
        if self.regulariser == 0 or client.round + 1 < self.reg_from:
            return loss
        reference = received_features(client, batch.images)
        features, pseudo = output.features.neck, client.session.pseudo
        if self.reg_last_camera_only and pseudo is not None:
            cameras = pseudo.proxies.cameras[batch.labels]
            distances = 1 - F.cosine_similarity(features, reference, dim=1)
            return loss + self.regulariser * mean_of_chosen(distances, cameras == cameras.max())
        return loss + self.regulariser * mean_cosine_distance(features, reference)

    def upload(self, client: Client) -> Upload:
        """Return the model and m_k, the change of the features of the first images by training."""
        change = mean_cosine_distance(*first_features(client))
        return Upload(client.model.shared, signals={"cdw": Measured(change)})

    def weights(self, reports: Mapping[str, Report]) -> Weights:
        """Return the share of each client in the average."""
        distances = {client: report.signals["cdw"] for client, report in reports.items()}
        if self.quantise:
            distances = {client: float(int(1000 * distance)) for client, distance in distances.items()}
        return Weights(normalise(distances))
