"""Communication-Efficient Learning of Deep Networks from Decentralized Data.

H. B. McMahan, E. Moore, D. Ramage, S. Hampson, B. Aguera y Arcas. AISTATS 2017. arXiv:1602.05629.

| hook            | Algorithm 1 (FederatedAveraging)                                  |
|-----------------|-------------------------------------------------------------------|
| (selection)     | S_t: random set of max(C K, 1) clients                            |
| download        | w <- w_t                                                          |
| train           | ClientUpdate: E epochs of mini-batches of size B                  |
| upload, weights | w_{t+1} <- sum_k (n_k / m_t) w_k, m_t = sum of n_k over S_t       |

Every hook is the default of :class:`~fedsim.method.Method`: this file only says what is shared.

In re-identification label spaces differ. The papers' "FedAVG" either shares the whole network with a head of the
largest label space (paper 001, Table 2: ``share_head: true``), where row z then means another person for each client,
or keeps the head private ("FedAvg+D", paper 000).
"""

from __future__ import annotations

from dataclasses import dataclass

from fedsim.method import Method
from fedsim.models.groups import BODY, Group

__all__ = ["FedAvg"]


@dataclass(frozen=True, kw_only=True)
class FedAvg(Method):
    """Federated averaging of the whole network."""

    share_head: bool = True
    """whether the identity head is averaged, too; for clients with a common label space"""

    @property
    def shared_groups(self) -> frozenset[Group]:
        """Backbone, neck, and the head if it is shared."""
        return BODY | {Group.HEAD} if self.share_head else BODY
