"""FedBN: Federated Learning on Non-IID Features via Local Batch Normalization.

X. Li, M. Jiang, X. Zhang, M. Kamp, Q. Dou. ICLR 2021. arXiv:2102.07623.

| hook            | Algorithm 1                                                                      |
|-----------------|----------------------------------------------------------------------------------|
| (shared groups) | all layers but normalisation take the mean; those of the client stay as they are |
| weights         | (1 / K) sum over k                                                               |

Deviations and silences:

- Normalisation layers are found by the module's class. The authors' code searches names for "bn", which would miss
  ResNet's four ``downsample.1`` layers. It keeps both affine parameters and running statistics private, as here.
- The paper's clients share one label space, hence also the last layer. With ``share_head: false`` ("FedBN+D", the
  specific networks of paper 000) all that follows the backbone is private; with ``share_head: true`` heads have the
  size of the largest label space, and the neck is shared, too, without its normalisation.
- The server has no complete model: unseen domains are scored by the clients' own models, and scores averaged.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedsim.methods.base import Method, Weighting, WeightingChoice
from fedsim.models.groups import Group


@dataclass(frozen=True, kw_only=True)
class FedBN(WeightingChoice, Method):
    """Averaging of everything but normalisation layers."""

    share_head: bool = False
    """average head and neck, too, but not the neck's normalisation; for clients with a common label space"""
    weighting: Weighting = "uniform"
    """$1 / K$; ``size`` is $n_k / n$"""

    @property
    def shared_groups(self) -> frozenset[Group]:
        """Weights outside normalisation layers."""
        return frozenset({Group.CONV, Group.NECK, Group.HEAD} if self.share_head else {Group.CONV})
