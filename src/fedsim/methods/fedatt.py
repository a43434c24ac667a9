"""Learning Private Neural Language Modeling with Attentive Aggregation (FedAtt).

S. Ji, S. Pan, G. Long, X. Li, J. Jiang, Z. Huang. IJCNN 2019. arXiv:1812.07108.

| hook              | attentive aggregation of the server                                        |
|-------------------|----------------------------------------------------------------------------|
| upload            | s_k^l = norm of theta^l - theta_k^l, for each tensor l                     |
| weights           | alpha_k^l = softmax of s_k^l over the clients k                            |
| weights           | theta^l <- theta^l - epsilon sum over k of alpha_k^l (theta^l - theta_k^l) |

Deviations and silences:

- Clients that are farther away get more weight, as in the equations and the authors' code.
- The norm is that of the flattened tensor. The code's "ord 2" is a spectral norm for matrices, and fails on the four
  dimensions of a convolution.
- Running statistics, which language models do not have, get the plain mean: ``theta + 1.2 (mean - theta)`` of
  variances can be negative.
- The paper adds noise to the update. Paper 001, which compares with FedAtt, adds none, and there is none here.
- Paper 001, Table 2, shares everything with a head of the largest label space (``share_head: true``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from fedsim.core.checks import not_negative
from fedsim.functional.weighting import softmax_weights, uniform_weights
from fedsim.methods.base import BodySharing, Method, Signal, Weights
from fedsim.training.client import Client
from fedsim.training.messages import Measured, Report, Upload


@dataclass(frozen=True, kw_only=True)
class FedAtt(BodySharing, Method):
    """Averaging with an attention over clients for each tensor."""

    measures: ClassVar[Mapping[str, Signal]] = {"change": "tensor"}

    epsilon: float = 1.2
    """$\\epsilon$, step size of the server"""
    share_head: bool = True
    """average the identity head, too; for clients with a common label space"""

    def __post_init__(self) -> None:
        not_negative("model.method", epsilon=self.epsilon)

    def upload(self, client: Client) -> Upload:
        """Return the model, and the Euclidean norm of each tensor's change."""
        flat = client.model.flat
        change = client.received.vector.double() - flat.shared
        norms = torch.stack([change[entry.span].norm() for entry in flat.shared_parameters])
        return Upload(flat.shared, signals={"change": Measured(norms, list)})

    def weights(self, reports: Mapping[str, Report]) -> Weights:
        """Return the attention and epsilon; running statistics get the plain mean.

        With weights that sum to 1, the paper's update is a step of size epsilon towards the weighted mean.
        """
        attention = softmax_weights({client: report.tensor_signals["change"] for client, report in reports.items()})
        return Weights(uniform_weights(reports), attention, self.epsilon)
