"""Communication-Efficient Learning of Deep Networks from Decentralized Data.

H. B. McMahan, E. Moore, D. Ramage, S. Hampson, B. Aguera y Arcas. AISTATS 2017. arXiv:1602.05629.

| hook            | Algorithm 1 (FederatedAveraging)                                  |
|-----------------|-------------------------------------------------------------------|
| (selection)     | S_t: random set of max(C K, 1) clients                            |
| download        | w <- w_t                                                          |
| train           | ClientUpdate: E epochs of mini-batches of size B                  |
| upload, weights | w_{t+1} <- sum_k (n_k / m_t) w_k, m_t = sum of n_k over S_t       |

Every hook but the weights is the default of :class:`~fedsim.methods.base.Method`: this file only says what is shared.

In re-identification label spaces differ. The papers' "FedAVG" either shares the whole network with a head of the
largest label space (paper 001, Table 2: ``share_head: true``), where row z then means another person for each client,
or keeps heads private: "FedAvg+D", the "Baseline" of paper 000, where all that follows the trunk is private
(``share_neck: false``) and weights are uniform.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fedsim.methods.base import Method, Weighting, Weights, weigh
from fedsim.models.groups import Group, body_groups
from fedsim.training.messages import Report

__all__ = ["FedAvg"]


@dataclass(frozen=True, kw_only=True)
class FedAvg(Method):
    """Federated averaging of the whole network."""

    share_head: bool = True
    """whether the identity head is averaged, too; for clients with a common label space"""
    share_neck: bool = True
    """whether the embedding layers before the head are averaged"""
    weighting: Weighting = "size"
    """$n_k / m_t$ in Algorithm 1; ``uniform`` is $1 / |S_t|$ (papers 000 and 001)"""

    @property
    def shared_groups(self) -> frozenset[Group]:
        """The trunk, and what is shared of neck and head."""
        return body_groups(self.share_neck, self.share_head)

    def weights(self, reports: Mapping[str, Report]) -> Weights:
        """Return the share of each client in the average."""
        return weigh(self.weighting, reports)
