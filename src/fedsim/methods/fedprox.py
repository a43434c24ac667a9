"""Federated Optimization in Heterogeneous Networks (FedProx).

T. Li, A. K. Sahu, M. Zaheer, M. Sanjabi, A. Talwalkar, V. Smith. MLSys 2020. arXiv:1812.06127.

| hook        | Algorithm 2                                                                              |
|-------------|------------------------------------------------------------------------------------------|
| before_step | line 5: clients minimise h_k(w; w^t) = F_k(w) + (mu / 2) times the squared norm of w - w^t |
| weights     | line 7: w^{t+1} <- (1 / K) sum over S_t of w_k^{t+1}                                     |

Deviations and silences:

- The term acts on shared parameters: not on running statistics, nor on what stays with the client.
- Its gradient, mu (w - w^t), is added to the gradient after back-propagation: the same mathematics, at less cost. It is
  added once per step, and counts when gradients are clipped.
- The paper samples clients with probability n_k / n and averages them alike; here weights follow ``weighting``.
- No mu suits all data: the authors tune it in {0.001, 0.01, 0.1, 1}. Paper 000, which compares with "FedProx+D", does
  not say which it took.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from fedsim.core.errors import ConfigError
from fedsim.methods.base import Method, Weighting, Weights, weigh
from fedsim.models.groups import Group, body_groups
from fedsim.training.client import Client
from fedsim.training.messages import Report

__all__ = ["FedProx"]


@dataclass(frozen=True, kw_only=True)
class FedProx(Method):
    """Averaging of clients that are held near the received model."""

    mu: float = 0.01
    """$\\mu$, weight of the proximal term"""
    share_head: bool = False
    """whether the identity head is averaged, too; for clients with a common label space"""
    share_neck: bool = True
    """whether the embedding layers before the head are averaged"""
    weighting: Weighting = "size"
    """$n_k / n$; ``uniform`` is $1 / K$"""

    def __post_init__(self) -> None:
        """Check the range."""
        if self.mu < 0:
            raise ConfigError(f"model.method.mu: {self.mu} is negative")

    @property
    def shared_groups(self) -> frozenset[Group]:
        """The trunk, and what is shared of neck and head."""
        return body_groups(self.share_neck, self.share_head)

    def take_step(self, client: Client, loss: Tensor) -> None:
        """Step, with mu (w - w^t), the gradient of the proximal term (Algorithm 2, line 5)."""
        client.step(loss, partial(self._pull, client))

    def _pull(self, client: Client) -> None:
        flat = client.model.flat
        change = flat.shared_change(client.received.vector)
        client.optimizer.add_to_gradients(change.mul_(self.mu))

    def weights(self, reports: Mapping[str, Report]) -> Weights:
        """Return the share of each client in the average."""
        return weigh(self.weighting, reports)
