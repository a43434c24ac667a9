"""Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization (FedNova).

J. Wang, Q. Liu, H. Liang, G. Joshi, H. V. Poor. NeurIPS 2020. arXiv:2007.07481.

| hook              | update rule of FedNova                                                                 |
|-------------------|----------------------------------------------------------------------------------------|
| upload            | norm of a_i: how often local steps count a gradient; tau_i for plain SGD               |
| weights           | d_i = (x - y_i) / norm of a_i, with weights p_i = n_i / n                              |
| weights           | x <- x - tau_eff sum over i of p_i d_i, with tau_eff = sum over i of p_i norm of a_i   |

With w_i = p_i / norm of a_i and W the sum of these, that update is ``x + tau_eff W (mean - x)``, where the mean has the
weights w_i / W. If all clients take equally many steps, it is FedAvg, bit for bit.

Deviations and silences:

- Running statistics get the mean with weights p_i.
- The paper gives norm of a_i for SGD without and with momentum, and for a proximal term. Here also for Nesterov's
  momentum. Weight decay counts as a part of the gradient, and rates must not change within a round.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from fedsim.functional.weighting import normalise, size_weights
from fedsim.methods.base import BodySharing, Method, Signal, Weights
from fedsim.training.client import Client
from fedsim.training.messages import Report, Upload
from fedsim.training.settings import LocalTraining


@dataclass(frozen=True, kw_only=True)
class FedNova(BodySharing, Method):
    """Averaging of updates that are divided by the amount of local work."""

    measures: ClassVar[Mapping[str, Signal]] = {"normaliser": "client"}
    sees_steps = True

    def check(self, training: LocalTraining, client: str) -> None:
        """Refuse optimizers for which the norm of a_i is not known."""
        training.check_counts("FedNova")

    def upload(self, client: Client) -> Upload:
        """Return the model and the norm of a_i."""
        return Upload(client.model.shared, signals={"normaliser": client.optimizer.normaliser})

    def weights(self, reports: Mapping[str, Report]) -> Weights:
        """Return w_i / W for parameters, n_i / n for statistics, and the step tau_eff W."""
        norms = {client: report.signals["normaliser"] for client, report in reports.items()}
        work = {client: norm / max(norms.values()) for client, norm in norms.items()}  # so that equal ones become 1
        sizes = {client: report.num_images for client, report in reports.items()}
        shares = normalise({client: n / work[client] for client, n in sizes.items()})
        effective = sum(n * work[client] for client, n in sizes.items())
        step_size = effective * sum(n / work[client] for client, n in sizes.items()) / sum(sizes.values()) ** 2
        return Weights(size_weights(sizes), {client: [weight] for client, weight in shares.items()}, step_size)
