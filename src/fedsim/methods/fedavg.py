"""Communication-Efficient Learning of Deep Networks from Decentralized Data.

H. B. McMahan, E. Moore, D. Ramage, S. Hampson, B. Aguera y Arcas. AISTATS 2017. arXiv:1602.05629.

| hook            | Algorithm 1 (FederatedAveraging)                                  |
|-----------------|-------------------------------------------------------------------|
| (selection)     | S_t: random set of max(C K, 1) clients                            |
| download        | w <- w_t                                                          |
| train           | ClientUpdate: E epochs of mini-batches of size B                  |
| upload, weights | w_{t+1} <- sum_k (n_k / m_t) w_k, m_t = sum of n_k over S_t       |

Every hook but the weights is the default of :class:`~fedsim.methods.base.Method`: this file only declares the groups
that are shared.

In re-identification label spaces differ. The papers' "FedAVG" either shares the whole network with a head of the
largest label space (paper 001, Table 2: ``share_head: true``), where row z then means another person for each client,
or keeps heads private: "FedAvg+D", the "Baseline" of paper 000, where all that follows the backbone is private
(``share_neck: false``) and weights are uniform.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedsim.methods.base import Method, PartSharing, Weighting, WeightingChoice


@dataclass(frozen=True, kw_only=True)
class FedAvg(PartSharing, WeightingChoice, Method):
    """Federated averaging of the whole network."""

    share_head: bool = True
    """average the identity head, too; for clients with a common label space"""
    weighting: Weighting = "size"
    """$n_k / m_t$ in Algorithm 1; ``uniform`` is $1 / |S_t|$ (papers 000 and 001)"""
