"""Federated Optimization in Heterogeneous Networks (FedProx).

T. Li, A. K. Sahu, M. Zaheer, M. Sanjabi, A. Talwalkar, V. Smith. MLSys 2020. arXiv:1812.06127.

| hook        | Algorithm 2                                                                              |
|-------------|------------------------------------------------------------------------------------------|
| take_step   | line 5: clients minimise h_k(w; w^t) = F_k(w) + (mu / 2) times the squared norm of w - w^t |
| weights     | line 7: w^{t+1} <- (1 / K) sum over S_t of w_k^{t+1}                                     |

Deviations and silences:

- The term acts on shared parameters: not on running statistics or private parameters.
- Its gradient, mu (w - w^t), is added to the gradient after back-propagation: the same mathematics, at less cost. It is
  added once per step, and counts when gradients are clipped.
- The paper samples clients with probability n_k / n and averages them uniformly; here weights follow ``weighting``.
- No mu suits all data: the authors tune it in {0.001, 0.01, 0.1, 1}. Paper 000, which compares with "FedProx+D", does
  not print its value.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedsim.core.checks import not_negative
from fedsim.methods.base import Method, PartSharing, WeightingChoice
from fedsim.training.client import Client


@dataclass(frozen=True, kw_only=True)
class FedProx(PartSharing, WeightingChoice, Method):
    """Averaging of clients that are held near the received model."""

    mu: float = 0.01
    """$\\mu$, weight of the proximal term"""

    def __post_init__(self) -> None:
        not_negative("model.method", mu=self.mu)

    def take_step(self, client: Client, loss: Tensor) -> None:
        """Step, with mu (w - w^t), the gradient of the proximal term (Algorithm 2, line 5)."""
        client.step(loss, lambda: client.optimizer.pull(client.received.vector, self.mu))
