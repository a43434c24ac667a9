"""Federated stochastic gradient descent (FedSGD): the baseline of FedAvg.

H. B. McMahan, E. Moore, D. Ramage, S. Hampson, B. Aguera y Arcas. "Communication-Efficient Learning of Deep Networks
from Decentralized Data". AISTATS 2017. arXiv:1602.05629.

| hook            | Section 2                                                                       |
|-----------------|---------------------------------------------------------------------------------|
| train           | g_k, the gradient of F_k at w_t; one step w_{t+1}^k <- w_t - eta g_k            |
| upload, weights | w_{t+1} <- sum_k (n_k / n) w_{t+1}^k, which is w_t - eta sum_k (n_k / n) g_k    |

Deviations and silences:

- McMahan et al. take g_k over all local images (B = infinity, E = 1): ``model.client.batch_size: null``, or as many
  batches as there are in ``accumulate``, where memory is short and batch normalisation may see fewer images. By
  default g_k is that of a batch.
- Paper 001's FedSGD trains one local epoch with all clients in each round ("S = 1, t_max = 1"): ``steps: null`` with
  ``weighting: uniform``. On re-ID that is FedAvg with S = 1: its Table 2 prints the same numbers for both.
- The optimizer is the client's, new in each round: for a single step, momentum has no effect.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedsim.core.checks import at_least
from fedsim.methods.base import BodySharing, Method, Weighting, WeightingChoice
from fedsim.training.client import Client


@dataclass(frozen=True, kw_only=True)
class FedSGD(BodySharing, WeightingChoice, Method):
    """One optimizer step of every client in each round."""

    steps: int | None = 1
    """optimizer steps per round; null: all of the local epochs (paper 001)"""
    share_head: bool = True
    """average the identity head, too; for clients with a common label space"""
    weighting: Weighting = "size"
    """$n_k / n$; ``uniform`` is $1 / K$ (paper 001)"""

    def __post_init__(self) -> None:
        at_least("model.method", 1, "; use null for whole epochs", steps=self.steps)

    def train(self, client: Client) -> None:
        """Take the first ``steps`` steps of plain local training."""
        client.fit(self, max_steps=self.steps)
