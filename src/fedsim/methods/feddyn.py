"""Federated Learning Based on Dynamic Regularization (FedDyn).

D. A. E. Acar, Y. Zhao, R. Matas Navarro, M. Mattina, P. N. Whatmough, V. Saligrama. ICLR 2021. arXiv:2111.04263.

| hook         | Algorithm 1                                                                                |
|--------------|--------------------------------------------------------------------------------------------|
| take_step    | theta_k^t: steps on L_k(theta) - <g_k^{t-1}, theta> + (alpha / 2) squared norm of          |
|              | theta - theta^{t-1}                                                                        |
| upload       | g_k^t <- g_k^{t-1} - alpha (theta_k^t - theta^{t-1}), the gradient of L_k at theta_k^t     |
| weights      | 1 / P, P the number of clients in P_t                                                      |
| server_step  | h^t <- h^{t-1} - alpha (1 / m) sum over P_t of (theta_k^t - theta^{t-1})                   |
| server_step  | theta^t <- (1 / P) sum over P_t of theta_k^t - h^t / alpha                                 |

Kept are -g_k / alpha and -h / alpha, sums of moves without alpha, as in the authors' code: a client's is the sum of all
its theta_k^t - theta^{t-1}, the server's the mean of these over all m clients. Both begin at 0. A round sends no more
than FedAvg.

Deviations and silences:

- The regulariser acts on shared parameters. Running statistics get the plain mean, private groups train without it.
- alpha = 0 is FedAvg with plain means: g_k and h stay 0. For small alpha the algorithm does not come near to that,
  because h / alpha does not depend on alpha.
- theta_k^t is what the client's optimizer reaches in its local epochs, no minimum. Weight decay counts as part of L_k.
- Means are plain, as in Algorithm 1, whose objective counts all clients equally. ``weighting: size`` divides a client's
  alpha by its size relative to the mean size, as the code does. g_k / alpha_k sum to 0 where theta rests, so the
  objective is that of FedAvg, by images, though means stay plain.
- The code clips gradients to a norm of 10 (``model.client.grad_clip``), without the term alpha theta, which it has as
  weight decay.
- The code also scores the mean over P_t and the mean of all clients' last models; theta^t is its "cloud model".
- With several architectures, P, m and h are those of each. With ``model.server_optimizer`` the point that its step
  reaches takes the place of the mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from fedsim.core.checks import not_negative
from fedsim.functional.weighting import uniform_weights
from fedsim.methods.base import BodySharing, InitialState, KeptModels, Method, SizeOrUniform, Weights, kept_vector
from fedsim.settings.facts import Facts
from fedsim.training.client import Client
from fedsim.training.flat_model import FlatModel
from fedsim.training.messages import Report, Upload
from fedsim.training.server import Server


@dataclass(frozen=True, kw_only=True)
class FedDyn(BodySharing, Method):
    """Averaging of clients whose losses are changed so that their minima agree in the end."""

    keeps: ClassVar[KeptModels] = {"moves": "shared"}

    alpha: float = 0.01
    """$\\alpha$, weight of the regulariser"""
    weighting: Annotated[SizeOrUniform, Facts(needs="alpha")] = "uniform"
    """weights of clients in the objective; ``size``, by images, divides alpha by a client's relative size (the authors'
    code)"""

    def __post_init__(self) -> None:
        not_negative("model.method", alpha=self.alpha)

    @property
    def server_every(self) -> int:
        """In each round h is renewed, if there is one."""
        return 1 if self.alpha > 0 else 0

    def initial_state(self, model: FlatModel) -> InitialState:
        """Return -h / alpha, which begins at 0."""
        zeros = torch.zeros(model.flat.num_shared_parameters)
        return InitialState(server={"moves": zeros} if self.alpha > 0 else {})

    def take_step(self, client: Client, loss: Tensor) -> None:
        """Step, with alpha (theta - theta^{t-1}) - g_k^{t-1} added to the gradient."""
        if self.alpha == 0:
            client.step(loss)
            return
        moves, alpha = kept_vector(client, "moves"), self.alpha
        if self.weighting == "size":
            alpha *= client.data.mean_images / client.data.num_images
        centre = client.received.vector[: len(moves)] - moves
        client.step(loss, lambda: client.optimizer.pull(centre, alpha))

    def upload(self, client: Client) -> Upload:
        """Renew g_k, and return the model."""
        moves = kept_vector(client, "moves")
        client.keep("moves", moves + client.model.shared[: len(moves)] - client.received.vector[: len(moves)])
        return super().upload(client)

    def weights(self, reports: Mapping[str, Report]) -> Weights:
        """Return 1 / P."""
        return Weights(uniform_weights(reports))

    def server_step(self, server: Server) -> None:
        """Renew h, and add -h / alpha to the mean."""
        for arch, answers in server.answers.items():
            moves, share = server.kept[arch]["moves"], len(answers.reports) / server.num_clients[arch]
            theta = server.vector(arch)[: len(moves)]  # the mean over P_t
            moves = moves + share * (theta - server.before[arch][: len(moves)])
            server.keep(arch, "moves", moves)
            theta += moves
