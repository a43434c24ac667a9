"""SCAFFOLD: Stochastic Controlled Averaging for Federated Learning.

S. P. Karimireddy, S. Kale, M. Mohri, S. J. Reddi, S. U. Stich, A. T. Suresh. ICML 2020. arXiv:1910.06378.

| hook         | Algorithm 1                                                                                 |
|--------------|---------------------------------------------------------------------------------------------|
| download     | line 5: the client gets x and c                                                             |
| before_epoch | only a check                                                                                |
| before_step  | line 10: y_i <- y_i - eta_l (g_i(y_i) - c_i + c)                                            |
| upload       | line 12, option II: c_i^+ <- c_i - c + (x - y_i) / (K eta_l); line 13: y_i - x, c_i^+ - c_i |
| step_size    | lines 16-17: x <- x + eta_g (1 / S) sum over i of (y_i - x)                                 |
| server_step  | lines 16-17: c <- c + (S / N) (1 / S) sum over i of (c_i^+ - c_i)                           |

Deviations and silences:

- Controls belong to shared parameters: running statistics get the plain mean, private groups train without.
- Option II takes (x - y_i) / (K eta_l) for the mean gradient, which is right for plain SGD only. With momentum m it
  is up to 1 / (1 - m) times too long, and the correction with it: train with ``momentum: 0``. Weight decay counts as
  a part of the gradient. With ``long_round.schedule`` eta_l is that of the last local epoch. Where the trunk's rate
  differs from that of neck and head, each has its own eta_l.
- Means are plain, as in Algorithm 1, which assumes clients that count alike.
- With several architectures, c, S and N are those of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import SGD

from fedsim.core.errors import ConfigError
from fedsim.core.messages import Report, Upload
from fedsim.methods.base import Method, weigh
from fedsim.models.groups import Group, body_groups
from fedsim.training.client import Client
from fedsim.training.server import Server

__all__ = ["Scaffold"]


@dataclass(frozen=True, kw_only=True)
class Scaffold(Method):
    """Averaging of clients whose steps are corrected by control variates."""

    global_lr: float = 1.0
    """$\\eta_g$, step size of the server"""
    share_head: bool = False
    """whether the identity head is averaged, too; for clients with a common label space"""

    def __post_init__(self) -> None:
        """Check the range."""
        if self.global_lr <= 0:
            raise ConfigError(f"model.method.global_lr: {self.global_lr} is not positive")

    @property
    def shared_groups(self) -> frozenset[Group]:
        """Backbone, neck, and the head if it is shared."""
        return body_groups(True, self.share_head)

    def extras_down(self, server: Server, arch: str) -> Mapping[str, tuple[int, ...]]:
        """Return what c is."""
        return {"control": (server.residents[arch].flat.num_shared_parameters,)}

    def extras_up(self, server: Server, arch: str) -> Mapping[str, tuple[int, ...]]:
        """Return what c_i^+ - c_i is."""
        return {"control": (server.residents[arch].flat.num_shared_parameters,)}

    def before_epoch(self, client: Client, server: Server, epoch: int) -> None:
        """Check that the way is made of gradients."""
        if type(client.optimizer.configured) is not SGD:
            raise ConfigError("model.client.optimizer: Scaffold knows torch.optim.SGD; choose that, with momentum: 0")

    def before_step(self, client: Client, server: Server) -> None:
        """Add c - c_i to the gradient (Algorithm 1, line 10)."""
        client.optimizer.add_to_gradients(_control(server, client.resident.arch) - _own_control(client))

    def upload(self, client: Client, server: Server) -> Upload:
        """Renew c_i, and return the model and how c_i has changed (lines 12-14)."""
        x = server.model(client.resident.arch)[: client.resident.flat.num_shared_parameters]
        old, c = _own_control(client), _control(server, client.resident.arch)
        new = old - c + client.optimizer.mean_gradient(x)
        client.keep("control", new)
        return Upload(client.resident.flat.shared, {"control": new - old})

    def weights(self, reports: Mapping[str, Report]) -> dict[str, float]:
        """Return 1 / S."""
        return weigh("uniform", reports)

    def step_size(self, reports: Mapping[str, Report]) -> float:
        """Return eta_g (lines 16-17)."""
        return self.global_lr

    def server_step(self, server: Server) -> None:
        """Renew c (lines 16-17)."""
        for arch, received in server.received.items():
            share = len(received.reports) / server.num_clients[arch]
            server.keep(arch, "control", _control(server, arch) + share * received.extras["control"])


def _control(server: Server, arch: str) -> Tensor:
    """Return c [num_shared_parameters], which begins at 0."""
    resident = server.residents[arch]
    zeros = torch.zeros(resident.flat.num_shared_parameters, device=resident.device)
    return server.kept[arch].get("control", zeros)


def _own_control(client: Client) -> Tensor:
    """Return c_i [num_shared_parameters], which begins at 0."""
    resident = client.resident
    zeros = torch.zeros(resident.flat.num_shared_parameters, device=resident.device)
    return client.kept.get("control", zeros)
