"""LotteryFL: Empower Edge Intelligence with Personalized and Communication-Efficient Federated Learning.

A. Li, J. Sun, B. Wang, L. Duan, S. Li, Y. Chen, H. Li. SEC 2021. arXiv:2008.03371.

| hook                | Algorithm 1, and the authors' code                                                     |
|---------------------|----------------------------------------------------------------------------------------|
| initial_state       | theta_0, to which tickets are rewound; M_k                                             |
| download            | theta_k <- theta_g * M_k                                                               |
| train               | if acc(theta_k) > acc_threshold and r_k > r_target: prune p of what is left,           |
|                     | theta_k <- theta_0 * M_k; then local training                                          |
| take_step           | theta_k <- theta_k * M_k                                                               |
| upload, weights     | theta_g <- per element, the plain mean over the clients that have it; others stay      |
| personalise         | theta_g * M_k                                                                          |

Hooks that are not here come from :class:`~fedsim.methods.pruned.OwnMask`.
In each layer the share p of the remaining weights with the smallest magnitudes is pruned, before the client trains.

Deviations and silences:

- The accuracy is that of the client's own head on its own training images; the authors' code takes its test images.
  Clients without identities have rank-1 among their training images, with clusters as identities
  (:func:`~fedsim.methods.pruned.own_accuracy`).
- Prunable are shared convolutions and linear layers; the code takes all that is called "weight", gains of norms
  included. Norms, biases and the client's head are never pruned.
- A rewound client goes back to theta_0 in all shared parameters, but keeps running statistics and head. With pretrained
  weights a rewind throws away all that the federation has learnt, on this client.
- The last step prunes just enough to reach the target. At least one weight of each layer stays.
- Masks hold after each step; the code sets gradients of weights below 1e-6 to zero, which momentum and weight decay
  of other optimizers undo.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.core.checks import within
from fedsim.functional.pruning import layerwise_magnitude_mask, remaining, share_pruned
from fedsim.methods.base import BodySharing, InitialState, Method, Payload
from fedsim.methods.pruned import OwnMask, check_pruning, exceeds, full_mask, prunable_layers, zero_pruned
from fedsim.training.client import Client
from fedsim.training.flat_model import FlatModel
from fedsim.training.server import Server


@dataclass(frozen=True, kw_only=True)
class LotteryFL(OwnMask, BodySharing, Method):
    """Averaging of lottery tickets: each client prunes its model, and trains the rest from its first weights again."""

    target: float = 0.7
    """$1 - r_{target}$, share of the prunable weights that is pruned in the end"""
    step: float = 0.1
    """$p$, share of each layer's remaining weights that is pruned at once"""
    start_accuracy: float = 0.2
    """$acc_{threshold}$, accuracy on the client's training images above which it prunes"""
    accuracy_images: int | None = None
    """number of random images to measure accuracy on; null: all"""

    def __post_init__(self) -> None:
        check_pruning(self.target, self.step, self.accuracy_images)
        within("model.method", "[0, 1]", start_accuracy=self.start_accuracy)

    def payload(self, server: Server, arch: str, round_: int) -> Payload:
        """Clients keep theta_0, the first model that they received."""
        return Payload(known=("initial",))

    def initial_state(self, model: FlatModel) -> InitialState:
        """Return M_k, ones, and theta_0."""
        return InitialState({"mask": full_mask(model)}, {"initial": model.shared[: model.flat.num_shared_parameters]})

    def train(self, client: Client) -> None:
        """Prune, if the accuracy allows it, and train."""
        mask, before = self._next_mask(client), client.kept["mask"]
        if mask is not before:
            weights = client.model.shared[: len(mask)]
            weights.copy_(torch.where((mask != before).any(), client.received.extras["initial"], weights))
            client.keep("mask", mask)
            zero_pruned(client)  # theta_0 * M_k; with an unchanged mask the model is masked already
        super().train(client)

    def _next_mask(self, client: Client) -> Tensor:
        """Return M_k, pruned further if the accuracy allows it: the device decides, and the host does not wait."""
        layers, mask = prunable_layers(client.model), client.kept["mask"]
        left = remaining(mask, layers)
        pruned = share_pruned(left, layers)
        if pruned >= self.target:
            return mask
        share = min(self.step, 1 - (1 - self.target) / (1 - pruned))
        deeper = layerwise_magnitude_mask(client.model.shared[: len(mask)], mask, layers, share, left)
        return torch.where(exceeds(client, self.accuracy_images, self.start_accuracy), deeper, mask)
