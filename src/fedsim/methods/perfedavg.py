"""Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning Approach (Per-FedAvg).

A. Fallah, A. Mokhtari, A. Ozdaglar. NeurIPS 2020. arXiv:2002.07948.

| hook        | Algorithm 1; D, D' and D'' are different batches                                              |
|-------------|-----------------------------------------------------------------------------------------------|
| train       | w~ <- w - alpha (gradient of f_i at w, on D); then, with g = gradient of f_i at w~, on D':    |
|             | first-order: w <- w - beta g;                                                                 |
|             | Hessian-free: w <- w - beta (g - alpha d), d = (gradient at w + delta g - gradient at         |
|             | w - delta g) / (2 delta), both on D''                                                         |
| weights     | w_{k+1} <- (1 / rn) sum over i of w_{k+1}^i, rn the number of selected clients                |
| personalise | the model of client i is w_k after ``adapt_steps`` inner steps on its batches                 |

The method with the exact Hessian, of which d is an approximation, is not here.

Deviations and silences:

- beta is the rate of the client's optimizer, whose momentum and weight decay act at w. Inner steps are plain.
- D, D' and D'' are batches of the data that follow each other, so a step takes two of them, or Hessian-free three,
  and ``local_steps`` counts these. An epoch's last step takes the first batches again where some are missing.
- A private head is a part of w that is not averaged: all steps move it, and g and d have its part.
- Running statistics of w are those of the pass at w. Those of a personal model go on from w_k with its inner steps.
- The paper adapts the global model before each evaluation. Here a client does it at the end of its local training,
  from the model that it received: the personal model is one average older than the global one.
- A client that has not taken part yet is scored with the global model. The log has the loss at w.
- d is a difference of nearly equal gradients, of which bfloat16 leaves little: train ``hessian_free`` with ``32-true``.
- The paper's clients share a head. Their means are plain; ``weighting: size`` is $n_k / n$.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, islice
from typing import Annotated, Literal

import torch
from torch import Tensor

from fedsim.core.checks import at_least, not_negative, positive
from fedsim.core.errors import ConfigError
from fedsim.methods.base import BodySharing, KeepsPersonal, Method, Weighting, WeightingChoice
from fedsim.settings.facts import Facts
from fedsim.training.client import Batch, Client
from fedsim.training.settings import LocalTraining


@dataclass(frozen=True, kw_only=True)
class PerFedAvg(BodySharing, WeightingChoice, KeepsPersonal, Method):
    """Averaging of models that are good after one more step on a client's images."""

    # proxies of clusters would move in each pass; a step has several batches and passes
    requires = frozenset({"identities", "whole_batches", "plain_steps", "built_in_model"})
    session_copies = 4  # w_k and w, and both gradients of d

    variant: Literal["first_order", "hessian_free"] = "first_order"
    """``first_order`` leaves the Hessian out, ``hessian_free`` takes d for its product with g"""
    alpha: float = 0.01
    """$\\alpha$, rate of the inner steps; $\\beta$ is that of the client's optimizer"""
    delta: Annotated[float, Facts(needs="variant == 'hessian_free'")] = 0.001
    """$\\delta$, half the distance between the two gradients, in lengths of g"""
    adapt_steps: int = 1
    """inner steps from the received model to the personal one"""
    weighting: Weighting = "uniform"
    """$1 / rn$; ``size`` is $n_k / n$"""

    def __post_init__(self) -> None:
        not_negative("model.method", alpha=self.alpha)
        positive("model.method", delta=self.delta)
        at_least("model.method", 1, adapt_steps=self.adapt_steps)

    def check(self, training: LocalTraining, client: str) -> None:
        """Refuse steps over several batches of the outer gradient."""
        if training.accumulate != 1:
            raise ConfigError("model.client.accumulate: a step of PerFedAvg has two or three batches; set it to 1")

    def train(self, client: Client) -> None:
        """Train w; then adapt the received model, and leave w in the model for the upload."""
        received = client.model.whole.clone()
        for epoch in range(client.local_epochs):
            for batches in _in_groups(client.batches(epoch), 3 if self.variant == "hessian_free" else 2):
                self._step(client, *batches)
        w = client.model.whole.clone()
        client.model.whole.copy_(received)
        client.model.reset_counters()
        with client.personal_training():
            self._adapt(client)
        client.keep("personal", client.model.whole)
        client.model.whole.copy_(w)

    def _step(self, client: Client, inner: Batch, outer: Batch, third: Batch | None = None) -> None:
        """Take one step of w, with D, D' and, Hessian-free, D''."""
        loss = client.training_step(inner)
        tensors = [*(p.detach() for p in client.optimizer.parameters), *client.model.running]
        w = [tensor.clone() for tensor in tensors]
        _descend(client, loss, self.alpha)

        def correct() -> None:
            torch._foreach_copy_(tensors, w)
            if third is not None:
                self._subtract_curvature(client, third)
                torch._foreach_copy_(tensors, w)

        client.step(_loss(client, outer), correct)

    def _subtract_curvature(self, client: Client, batch: Batch) -> None:
        """Make g - alpha d of the gradient g; the parameters are w before, and anything after."""
        parameters = [p for p in client.optimizer.parameters if p.grad is not None]
        weights, g = [p.detach() for p in parameters], [p.grad for p in parameters if p.grad is not None]
        torch._foreach_add_(weights, g, alpha=self.delta)
        above = torch.autograd.grad(_loss(client, batch), parameters, materialize_grads=True)
        torch._foreach_add_(weights, g, alpha=-2 * self.delta)
        below = torch.autograd.grad(_loss(client, batch), parameters, materialize_grads=True)
        torch._foreach_add_(above, below, alpha=-1)
        torch._foreach_add_(g, above, alpha=-self.alpha / (2 * self.delta))

    def _adapt(self, client: Client) -> None:
        """Take the inner steps of the personal model, each on a batch."""
        epochs = (client.batches(0) for _ in range(self.adapt_steps))  # as many as there may be of one batch
        for batch in islice(chain.from_iterable(epochs), self.adapt_steps):
            _descend(client, _loss(client, batch), self.alpha)


def _loss(client: Client, batch: Batch) -> Tensor:
    """Return f_i on a batch, which the log leaves out."""
    return client.supervised_loss(client.forward(batch.images), batch, counts=False)


def _descend(client: Client, loss: Tensor, alpha: float) -> None:
    """Take an inner step: w - alpha (gradient of the loss)."""
    gradients = torch.autograd.grad(loss, client.optimizer.parameters, materialize_grads=True)
    torch._foreach_add_([p.detach() for p in client.optimizer.parameters], gradients, alpha=-alpha)


def _in_groups(batches: Iterable[Batch], size: int) -> Iterator[Sequence[Batch]]:
    """Yield ``size`` batches at a time; the first ones fill the last group."""
    first: list[Batch] = []
    group: list[Batch] = []
    for batch in batches:
        if len(first) < size:
            first.append(batch)
        group.append(batch)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield [*group, *islice(cycle(first), size - len(group))]
