"""FedSAM: federated averaging of clients that minimise by sharpness-aware steps.

Z. Qu, X. Li, R. Duan, Y. Liu, B. Tang, Z. Lu. "Generalized Federated Learning via Sharpness Aware Minimization". ICML
2022. arXiv:2206.02618. D. Caldarola, B. Caputo, M. Ciccone. "Improving Generalization in Federated Learning by Seeking
Flat Minima". ECCV 2022. arXiv:2203.11834. The step: P. Foret, A. Kleiner, H. Mobahi, B. Neyshabur. ICLR 2021.

| hook      | local step                                                                            |
|-----------|---------------------------------------------------------------------------------------|
| train     | delta <- rho g / norm of g, with g = gradient of F_k(w) on the batch;                 |
|           | w <- w - eta (gradient of F_k(w + delta) on the same batch)                           |
| weights   | w^{t+1} <- sum over k of (n_k / n) w_k (Caldarola et al.)                             |

Deviations and silences:

- delta moves all parameters that train, also private ones, and its norm is that of all of them together.
- The step is the client's optimizer: momentum and weight decay act at w, as in Caldarola et al.'s code.
- Running statistics are those of the pass at w. In that code, whose networks have none, both passes would move them.
- Restored weights are w, bit for bit; that code subtracts delta. So rho = 0 is FedAvg, unless there is dropout: each of
  the two passes has its own.
- Qu et al. take the plain mean: ``weighting: uniform``. Their momentum over rounds (MoFedSAM), and the adaptive
  perturbation and averages of rounds of Caldarola et al. (ASAM, SWA), are not here.
- With ``accumulate`` each batch has a delta of its own. The log has the loss at w.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fedsim.core.checks import not_negative
from fedsim.methods.base import Method, PartSharing, WeightingChoice
from fedsim.training.client import Batch, Client

_TINY = 1e-16
"""added to the norm, as in the authors' code: a gradient of 0 gives a delta of 0"""


@dataclass(frozen=True)
class _SharpnessAwareSteps:
    """The steps of a session, with what the pass at w + delta must not change."""

    rho: float
    before: list[tuple[list[Tensor], list[Tensor]]] = field(default_factory=list)
    """of the current batch: tensors, and their values at w"""

    def loss(self, client: Client, batch: Batch) -> Tensor:
        """Move the model to w + delta, and return F_k there."""
        parameters = client.optimizer.parameters
        loss = client.training_step(batch)
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        used = [(p.detach(), g) for p, g in zip(parameters, gradients, strict=True) if g is not None]
        weights, delta = [weight for weight, _ in used], [gradient for _, gradient in used]
        tensors = [*weights, *client.model.running]
        self.before[:] = [(tensors, [tensor.clone() for tensor in tensors])]
        torch._foreach_mul_(delta, self.rho / (nn.utils.get_total_norm(delta) + _TINY))
        torch._foreach_add_(weights, delta)
        return client.supervised_loss(client.forward(batch.images), batch, counts=False)

    def take_step(self, client: Client, loss: Tensor) -> None:
        """Step from w."""
        if not client.step(loss, self._restore):
            self._restore()

    def _restore(self) -> None:
        """Return to w."""
        for tensors, values in self.before:
            torch._foreach_copy_(tensors, values)


@dataclass(frozen=True, kw_only=True)
class FedSAM(PartSharing, WeightingChoice, Method):
    """Averaging of clients that step by the gradient at the worst point nearby."""

    session_copies = 1  # w, while gradients are those of w + delta
    # proxies of clusters would move twice; norms are of a batch
    requires = frozenset({"identities", "whole_batches", "losses"})

    rho: float = 0.1
    """$\\rho$, length of the perturbation; Caldarola et al.'s script for CIFAR-10 has 0.1"""

    def __post_init__(self) -> None:
        not_negative("model.method", rho=self.rho)

    def train(self, client: Client) -> None:
        """Train by sharpness-aware steps."""
        client.fit(_SharpnessAwareSteps(self.rho))
