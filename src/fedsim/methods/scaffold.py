"""SCAFFOLD: Stochastic Controlled Averaging for Federated Learning.

S. P. Karimireddy, S. Kale, M. Mohri, S. J. Reddi, S. U. Stich, A. T. Suresh. ICML 2020. arXiv:1910.06378.

| hook         | Algorithm 1                                                                                 |
|--------------|---------------------------------------------------------------------------------------------|
| download     | line 5: the client gets x and c                                                             |
| take_step    | line 10: y_i <- y_i - eta_l (g_i(y_i) - c_i + c)                                            |
| upload       | line 12, option II: c_i^+ <- c_i - c + (x - y_i) / (K eta_l); line 13: y_i - x, c_i^+ - c_i |
| weights      | lines 16-17: x <- x + eta_g (1 / S) sum over i of (y_i - x)                                 |
| server_step  | lines 16-17: c <- c + (S / N) (1 / S) sum over i of (c_i^+ - c_i)                           |

Deviations and silences:

- Controls belong to shared parameters: running statistics get the plain mean, private groups train without.
- Option II takes (x - y_i) / (K eta_l) for the mean gradient, which is right for plain SGD. With momentum m, K steps
  count gradients up to K / (1 - m) times, and controls of that size diverge. K is replaced by the sum of these counts,
  norm of a_i in FedNova (Wang et al., NeurIPS 2020): K for plain SGD. The mean then weighs early gradients more.
- Weight decay counts as a part of the gradient. With ``long_round.schedule`` eta_l is that of the last local epoch.
  Where the backbone's rate differs from that of neck and head, each has its own eta_l.
- Means are plain, as in Algorithm 1: its objective counts all clients equally, that of FedAvg their images.
  ``weighting: size`` weighs both means by images: changes of c_i are sent times n_i. S / N stays the share of clients.
- With several architectures, c, S and N are those of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedsim.core.checks import positive
from fedsim.methods.base import (
    BodySharing,
    InitialState,
    KeptModels,
    Method,
    Payload,
    SizeOrUniform,
    Weights,
    kept_vector,
    weigh,
)
from fedsim.training.client import Client
from fedsim.training.flat_model import FlatModel
from fedsim.training.messages import Report, Upload
from fedsim.training.server import Server
from fedsim.training.settings import LocalTraining


@dataclass(frozen=True, kw_only=True)
class Scaffold(BodySharing, Method):
    """Averaging of clients whose steps are corrected by control variates."""

    server_every = 1  # c is renewed
    keeps: ClassVar[KeptModels] = {"control": "shared"}
    session_copies = 1  # c - c_i

    global_lr: float = 1.0
    """$\\eta_g$, step size of the server"""
    weighting: SizeOrUniform = "uniform"  # of one client, too, in the last bits of the control variate
    """$1 / S$; ``size`` is $n_k / n$, the objective of FedAvg"""

    def __post_init__(self) -> None:
        positive("model.method", global_lr=self.global_lr)

    def payload(self, server: Server, arch: str, round_: int) -> Payload:
        """Return c for the clients, and c_i^+ - c_i for the server."""
        return Payload(down=("control",), up={"control": (server.models[arch].flat.num_shared_parameters,)})

    def initial_state(self, model: FlatModel) -> InitialState:
        """Return c, which begins at 0."""
        return InitialState(server={"control": torch.zeros(model.flat.num_shared_parameters)})

    def check(self, training: LocalTraining, client: str) -> None:
        """Refuse optimizers whose steps are no sums of gradients."""
        training.check_counts("Scaffold")

    def take_step(self, client: Client, loss: Tensor) -> None:
        """Step, with c - c_i added to the gradient (Algorithm 1, line 10)."""
        correction = client.received.extras["control"] - kept_vector(client, "control")
        client.step(loss, lambda: client.optimizer.add_to_gradients(correction))

    def upload(self, client: Client) -> Upload:
        """Renew c_i, and return the model and the change of c_i (lines 12-14)."""
        x = client.received.vector[: client.model.flat.num_shared_parameters]
        old, c = kept_vector(client, "control"), client.received.extras["control"]
        new = old - c + client.optimizer.mean_gradient(x)
        client.keep("control", new)
        scale = client.data.num_images if self.weighting == "size" else 1
        return Upload(client.model.shared, {"control": scale * (new - old)})

    def weights(self, reports: Mapping[str, Report]) -> Weights:
        """Return 1 / S and eta_g (lines 16-17)."""
        return Weights(weigh(self.weighting, reports).clients, step_size=self.global_lr)

    def server_step(self, server: Server) -> None:
        """Renew c (lines 16-17)."""
        for arch, answers in server.answers.items():
            share, change = len(answers.reports) / server.num_clients[arch], answers.extras["control"]
            if self.weighting == "size":
                change = change * len(answers.reports) / sum(report.num_images for report in answers.reports.values())
            server.keep(arch, "control", server.kept[arch]["control"] + share * change)
