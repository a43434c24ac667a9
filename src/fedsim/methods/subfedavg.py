"""Personalized Federated Learning by Structured and Unstructured Pruning under Data Heterogeneity (Sub-FedAvg).

S. Vahidian, M. Morafah, B. Lin. ICDCS Workshops 2021. arXiv:2105.00562. The unstructured variant, Sub-FedAvg (Un).

| hook            | Algorithm 1 (Un), and the authors' code                                                    |
|-----------------|--------------------------------------------------------------------------------------------|
| download        | theta_k <- theta_g * m_k                                                                   |
| train           | m^fe: the mask that pruning would give at the end of the first epoch                       |
| train           | m^le: the same at the end of the last epoch; m_k <- m^le, theta_k <- theta_k * m_k if      |
|                 | the distance of m^fe and m^le > epsilon, r_k < r_target, and acc(theta_k * m^le) > acc_th  |
| take_step       | theta_k <- theta_k * m_k                                                                   |
| upload, weights | theta_g <- per element, the plain mean over the clients that have it; others stay          |
| personalise     | theta_g * m_k                                                                              |

Hooks that are not here come from :class:`~fedsim.methods.pruned.OwnMask`.
In each layer, both masks prune the share r of the remaining weights with the smallest magnitudes.

Deviations and silences:

- The accuracy is that of the client's own head on its own training images; the authors' code takes its test images.
  Clients without identities have rank-1 among their training images, with clusters as identities.
- Prunable are convolutions and linear layers that are shared; the code takes all that is called "weight", gains of
  norms included. Norms, biases and the client's head are never pruned.
- The distance is the share of prunable weights in which the masks differ.
- As in the code (``src/client/client_u.py`` of MMorafah/Sub-FedAvg): if less than ``r`` of all weights is missing from
  the target, a client prunes the missing share, but at most 5 % of the remaining weights; the distance still compares
  masks of the whole r. From nothing to 70 % that takes 14 steps. At least one weight of each layer stays.
- Masks hold after each step; the code masks gradients, which is the same only for SGD without momentum and decay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.core.checks import within
from fedsim.core.errors import ConfigError
from fedsim.functional.pruning import differ, layerwise_magnitude_mask, remaining, share_pruned, zero_pruned_
from fedsim.methods.base import BodySharing, Method
from fedsim.methods.pruned import OwnMask, check_pruning, exceeds, prunable_layers
from fedsim.training.client import Client
from fedsim.training.settings import LocalTraining

_LAST_STEP = 0.05
"""largest share of the remaining weights that is pruned near the target"""


@dataclass(frozen=True, kw_only=True)
class SubFedAvg(OwnMask, BodySharing, Method):
    """Averaging of clients that prune their models after training, as long as masks still move and accuracy allows."""

    target: float = 0.7
    """$r_{target}$, share of the prunable weights that is pruned in the end"""
    step: float = 0.1
    """$r$, share of each layer's remaining weights that is pruned at once"""
    min_distance: float = 1e-4
    """$\\epsilon$, masks of the first and the last epoch must differ in more than this share of the weights"""
    min_accuracy: float = 0.5
    """$acc_{th}$, accuracy on the client's training images that a pruned model must exceed"""
    accuracy_images: int | None = None
    """number of random images to measure accuracy on; null: all"""

    def __post_init__(self) -> None:
        check_pruning(self.target, self.step, self.accuracy_images)
        within("model.method", "[0, 1]", min_accuracy=self.min_accuracy)

    def check(self, training: LocalTraining, client: str) -> None:
        """Refuse a round of one epoch."""
        if training.fewest_epochs < 2:
            raise ConfigError(
                "model.client.local_epochs: SubFedAvg compares the masks of the first and the last epoch, but client "
                f"{client} has one; set at least 2"
            )

    def train(self, client: Client) -> None:
        """Train, then prune if masks still differ and the pruned model is good enough."""
        layers = prunable_layers(client.model)
        left = remaining(client.kept["mask"], layers)
        masks = [client.kept["mask"]]

        def after_epoch(epoch: int) -> None:
            if epoch == 0:
                masks.append(self._next_mask(client, left, self.step))  # m^fe

        client.fit(self, after_epoch=after_epoch)
        first = masks[-1]
        last = self._next_mask(client, left, self.step)
        missing = self.target - (pruned := share_pruned(left, layers))
        if missing <= 0:
            return
        moves = differ(first, last, layers, self.min_distance)
        if missing < self.step:
            last = self._next_mask(client, left, min(missing / (1 - pruned), _LAST_STEP))
        weights = client.model.shared[: len(last)]
        before = weights.clone()
        zero_pruned_(weights, last)
        prunes = moves & exceeds(client, self.accuracy_images, self.min_accuracy)  # the host need not wait for it
        weights.copy_(torch.where(prunes, weights, before))
        client.keep("mask", torch.where(prunes, last, client.kept["mask"]))

    def _next_mask(self, client: Client, left: Sequence[int], share: float) -> Tensor:
        """Return m_k, pruned further now by a share of the weights that it leaves, ``left`` in each layer."""
        mask, layers = client.kept["mask"], prunable_layers(client.model)
        return layerwise_magnitude_mask(client.model.shared[: len(mask)], mask, layers, share, left)
