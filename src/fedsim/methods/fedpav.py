"""Performance Optimization for Federated Person Re-identification via Benchmark Analysis (FedReIDBench).

W. Zhuang, Y. Wen, X. Zhang, X. Gan, D. Yin, D. Zhou, S. Zhang, S. Yi. ACM Multimedia 2020. arXiv:2008.11560.

| hook            | Algorithm 1 (Federated Partial Averaging)                                    |
|-----------------|------------------------------------------------------------------------------|
| (selection)     | line 4: C_t, K of the N clients                                              |
| download        | line 13: the client joins w with its stored additional layers v, its head    |
| train           | lines 14-20: E epochs of mini-batches of size B                              |
| upload          | lines 21-22: store v, return w                                               |
| weights         | line 9: w^{t+1} <- sum over k in C_t of (n_k / n) w_k^{t+1}                   |

Deviations and silences:

- Paper: n is the "total size of datasets". If that covered all clients, the weights would not sum to 1 when K < N. Here
  n = sum of n_k over C_t, as in the authors' code.
- The authors' code never averages BatchNorm's running statistics: each round the server silently keeps those of one
  random client. ``bn_stats: first`` reproduces that; fedsim's default is ``mean``.
- The authors' code also sends ResNet-50's unused ImageNet classifier (8.2 MB per direction); here it does not exist.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fedsim.functional.weighting import size_weights, uniform_weights
from fedsim.method import Method, Report
from fedsim.models.groups import BODY, Group

__all__ = ["FedPav"]


@dataclass(frozen=True, kw_only=True)
class FedPav(Method):
    """Backbone and neck are averaged; every client keeps its identity head."""

    weighting: Literal["size", "uniform"] = "size"
    """$n_k / n$ in Algorithm 1, line 9; ``uniform`` is $1 / K$"""

    @property
    def shared_groups(self) -> frozenset[Group]:
        """Backbone and neck."""
        return BODY

    def weights(self, reports: Mapping[str, Report]) -> dict[str, float]:
        """Return the share of each client in the average (Algorithm 1, line 9)."""
        if self.weighting == "uniform":
            return uniform_weights(reports)
        return size_weights({client: report.num_images for client, report in reports.items()})
