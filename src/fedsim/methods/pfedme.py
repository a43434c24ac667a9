"""Personalized Federated Learning with Moreau Envelopes (pFedMe).

C. T. Dinh, N. H. Tran, T. D. Nguyen. NeurIPS 2020. arXiv:2006.08848.

| hook        | Algorithm 1                                                                                  |
|-------------|----------------------------------------------------------------------------------------------|
| train       | theta_i, about the minimum of f_i(theta; batch) + (lambda / 2) norm^2 of theta - w_i;        |
|             | w_i <- w_i - eta lambda (w_i - theta_i); both R times                                        |
| upload      | w_i                                                                                          |
| weights     | w^{t+1} <- (1 - beta) w^t + beta (1 / S) sum over i of w_i                                   |
| personalise | the model of client i is theta_i                                                             |

Deviations and silences:

- R is the number of the client's batches in its local epochs. theta_i takes K steps of the client's optimizer on one
  batch, as in the authors' code; it starts from w^t and goes on from batch to batch.
- Only shared parameters have a w_i. A private head trains with theta_i, K steps on each batch, without a pull. Running
  statistics are those of theta_i, and are averaged plainly (beta does not touch them).
- theta_i is kept between rounds to be scored: a client that has not taken part yet is scored with the global model.
- ``model.client.accumulate`` must be 1: each batch has a problem of its own.
- The authors' code averages w_i by their numbers of samples (the line with 1 / S is commented out), and its optimizer
  has a weight decay of 0.001. Here it is 1 / S, as in the paper, and the client's own optimizer.
- ``lam``, ``inner_steps``, ``local_lr`` and ``beta`` are those of the authors' scripts for MNIST.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from fedsim.core.checks import at_least, positive
from fedsim.core.errors import ConfigError
from fedsim.functional.weighting import uniform_weights
from fedsim.methods.base import BodySharing, KeepsPersonal, Method, Weights
from fedsim.training.batch import Batch
from fedsim.training.client import Client
from fedsim.training.messages import Report
from fedsim.training.settings import LocalTraining


@dataclass(frozen=True, kw_only=True)
class PFedMe(BodySharing, KeepsPersonal, Method):
    """Averaging of the centres around which clients have their personal models."""

    requires = frozenset({"whole_batches", "plain_steps"})  # each batch has a problem of its own
    session_copies = 1  # w_i

    lam: float = 15.0
    """$\\lambda$, weight of the pull of personal models towards their centre"""
    inner_steps: int = 5
    """$K$, optimizer steps on each batch"""
    local_lr: float = 0.005
    """$\\eta$, of the steps of w_i"""
    beta: float = 1.0
    """$\\beta$, step size of the server"""

    def __post_init__(self) -> None:
        positive("model.method", lam=self.lam, local_lr=self.local_lr, beta=self.beta)
        at_least("model.method", 1, inner_steps=self.inner_steps)

    def check(self, training: LocalTraining, client: str) -> None:
        """Refuse steps over several batches."""
        if training.accumulate != 1:
            raise ConfigError("model.client.accumulate: PFedMe solves a problem for each batch; set it to 1")

    def train(self, client: Client) -> None:
        """Train theta_i and w_i; then keep theta_i, and leave w_i in the model for the upload."""
        steps = _InnerSteps(self, _theta(client).clone())
        client.fit(steps, repeats=self.inner_steps)
        client.keep("personal", client.model.whole)
        _theta(client).copy_(steps.w)

    def weights(self, reports: Mapping[str, Report]) -> Weights:
        """Return 1 / S, and beta."""
        return Weights(uniform_weights(reports), step_size=self.beta)


@dataclass
class _InnerSteps:
    """Steps of theta_i; after every K-th one, a step of w_i."""

    method: PFedMe
    w: Tensor
    """w_i"""
    done: int = 0
    """steps of theta_i"""

    def loss(self, client: Client, batch: Batch) -> Tensor:
        """Return f_i(theta_i; batch)."""
        return self.method.loss(client, batch)

    def take_step(self, client: Client, loss: Tensor) -> None:
        """Step, with lambda (theta_i - w_i) added to the gradient."""
        method = self.method
        client.step(loss, partial(client.optimizer.pull, self.w, method.lam))
        self.done += 1
        if self.done % method.inner_steps == 0:
            self.w.sub_((self.w - _theta(client)).mul_(method.local_lr * method.lam))


def _theta(client: Client) -> Tensor:
    """Return theta_i, the shared parameters of the model: a view."""
    return client.model.shared[: client.model.flat.num_shared_parameters]
