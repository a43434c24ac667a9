"""Think Locally, Act Globally: Federated Learning with Local and Global Representations (LG-FedAvg).

P. P. Liang, T. Liu, L. Ziyin, N. B. Allen, R. P. Auerbach, D. Brent, R. Salakhutdinov, L.-P. Morency. 2020.
arXiv:2001.01523.

| hook             | the algorithm                                                                             |
|------------------|-------------------------------------------------------------------------------------------|
| (shared tensors) | the last layers theta^g, a global model of what the layers below compute; these layers    |
|                  | theta_k^l stay with client k                                                              |
| train            | steps of theta_k^l and theta_k^g together, on f_k                                         |
| weights          | theta^g <- sum over k of (n_k / n) theta_k^g                                              |

Deviations and silences:

- The paper's clients have one label space, so its global model ends with the classifier: ``share_head: true``, for
  clients with common labels. In re-ID heads differ in size, and stay with their clients: the global model is the
  last layers before them.
- A layer is a module with tensors of its own, as in ``FedALA``: a convolution and its normalisation are two. The last
  stage of a ResNet-50 has 20, a ``bnneck`` is one. Running statistics go with their layer.
- Layers are in the order of the network. The authors' code lists those of its network for CIFAR as fc1, fc2, fc3,
  conv2, conv1, and shares the end of this list: there the convolutions are global. The text has them local.
- Their code takes the plain mean: ``weighting: uniform``. It begins with a model that FedAvg has trained for hundreds
  of rounds, and reports each client's best round. Here all begin with ``weights`` of the backbone, if there are any.
- The paper's losses on theta_k^l alone (self-supervised, adversarial) are not here.
- A client that the server has not seen gets the mean of all clients' outputs in the paper. Here the scores of their
  models are averaged; ``evaluation.ensemble`` puts their features side by side.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from fedsim.core.checks import at_least
from fedsim.methods.base import BodySharing, Method, WeightingChoice


@dataclass(frozen=True, kw_only=True)
class LGFedAvg(BodySharing, WeightingChoice, Method):
    """Averaging of the last layers; the layers below, which see the images, stay with their clients."""

    layers: int = 3
    """number of the last layers that are shared, the identity head among them if it is shared"""

    def __post_init__(self) -> None:
        at_least("model.method", 1, layers=self.layers)

    def shared_tensors(self, names: Sequence[str]) -> Collection[str]:
        """Return the tensors of the last layers."""
        layer_of = {name: name.rpartition(".")[0] for name in names}
        last = list(dict.fromkeys(layer_of.values()))[-self.layers :]
        return [name for name in names if layer_of[name] in last]
