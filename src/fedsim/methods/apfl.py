"""Adaptive Personalized Federated Learning (APFL).

Y. Deng, M. M. Kamani, M. Mahdavi. 2020. arXiv:2003.13461.

| hook        | Algorithm 1, local descent                                                                   |
|-------------|----------------------------------------------------------------------------------------------|
| train       | w_i <- w_i - eta (gradient of f_i at w_i)                                                    |
| train       | v_i <- v_i - eta alpha_i g, with g the gradient of f_i at vbar_i = alpha_i v_i +             |
|             | (1 - alpha_i) w_i, all on one batch and from the same v_i and w_i                            |
| train       | alpha_i <- alpha_i - eta (inner product of v_i - w_i and g), in the first step of a round    |
| weights     | w <- (1 / K) sum over i of w_i                                                               |
| personalise | the model of client i is alpha_i v_i + (1 - alpha_i) w                                       |

alpha_i g is the gradient of f_i(vbar_i) with respect to v_i.

Deviations and silences:

- v_i and vbar_i are whole models: private heads are mixed like all parameters. v_i begins as the first model that the
  client receives. vbar_i has running statistics of its own, those of its passes.
- v_i steps by the client's optimizer, with a state of its own. In the step of alpha_i, eta is the backbone's rate.
- alpha_i stays in [0, 1], as in the authors' code (FedTorch).
- That code mixes the two models' outputs, not their parameters, and steps w_i before it computes the gradient of v_i.
  Its step of alpha_i has the gradients of both models, mixed: for a linear model that is alpha_i^2 + (1 - alpha_i)^2
  times the inner product, with the models after their steps. It adds 0.02 alpha_i.
- Loss and accuracy in the log are those of w_i, whose training is FedAvg's. A client that has not taken part yet is
  scored with the global model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedsim.core.checks import within
from fedsim.methods.base import BodySharing, KeptModels, Method, Replicas, Weighting, WeightingChoice
from fedsim.training.client import Batch, Client
from fedsim.training.flat_model import FlatModel
from fedsim.training.statistics import steady_statistics

_PERSONAL = "personal"


@dataclass(frozen=True, kw_only=True)
class APFL(BodySharing, WeightingChoice, Method):
    """Averaging, and a model of each client that is mixed with the global one in a share that it learns."""

    delivers = "personalised"
    # clusters are of one model; two models step in turn, and a user's module has a Trainer of its own for each
    requires = frozenset({"identities", "plain_steps", "built_in_model"})
    replicas: ClassVar[Replicas] = {_PERSONAL: "trained"}
    keeps: ClassVar[KeptModels] = {_PERSONAL: "model"}
    session_copies = 1  # v_i, while its model has vbar_i

    alpha: float = 0.5
    """$\\alpha_i$, share of the client's own model in the mixture, at first"""
    adaptive: bool = True
    """whether clients learn their shares"""
    weighting: Weighting = "uniform"
    """$1 / K$; ``size`` is $n_k / n$"""

    def __post_init__(self) -> None:
        within("model.method", "[0, 1]", alpha=self.alpha)

    def train(self, client: Client) -> None:
        """Train v_i and w_i on the same batches."""
        personal = client.trainable_replica(_PERSONAL)
        personal.whole.copy_(client.kept.get(_PERSONAL, client.model.whole))
        alpha = client.kept.get("alpha", torch.tensor(self.alpha, device=client.device))
        adapts = self.adaptive
        for epoch in range(client.local_epochs):
            for batch in client.batches(epoch):
                stepped = _step_personal(client, personal, batch, alpha, adapts)
                adapts = adapts and not stepped
                client.step(client.training_step(batch))
        client.keep(_PERSONAL, personal.whole)
        client.keep("alpha", alpha)

    def personalise(self, client: Client) -> None:
        """Load vbar_i of v_i and the global model."""
        super().personalise(client)
        if _PERSONAL in client.kept:
            v = client.kept[_PERSONAL]
            mixture = torch.lerp(client.model.whole, v, client.kept["alpha"])
            client.model.whole.copy_(v)  # its statistics
            _write_parameters(client.model, mixture)


def _step_personal(client: Client, personal: FlatModel, batch: Batch, alpha: Tensor, adapts: bool) -> bool:
    """Step v_i, in ``personal``, and, if the client ``adapts``, alpha_i; return whether there was a step.

    Between two steps (``accumulate``, micro-batches) gradients add up.
    """
    optimizer, v = personal.optimizer(client.training_settings), personal.whole.clone()
    _write_parameters(personal, torch.lerp(client.model.whole, v, alpha))  # vbar_i
    output = personal.forward(batch.images, client.session.precision)

    def correct() -> None:
        _write_parameters(personal, v)
        pairs = [(p, q) for p, q in zip(optimizer.parameters, client.optimizer.parameters, strict=True)]
        gradients = [p.grad for p, _ in pairs if p.grad is not None]
        slope = sum((p.detach() - q.detach()).mul(p.grad).sum() for p, q in pairs if p.grad is not None)
        torch._foreach_mul_(gradients, alpha.clone())
        if adapts:
            alpha.sub_(client.optimizer.rates[0] * slope).clamp_(0, 1)

    stepped = client.step(client.supervised_loss(output, batch, counts=False), correct, optimizer)
    if not stepped:
        _write_parameters(personal, v)
    return stepped


def _write_parameters(model: FlatModel, values: Tensor) -> None:
    """Write ``values`` [length of model.whole], but leave running statistics as they are."""
    with steady_statistics(model):
        model.whole.copy_(values)
