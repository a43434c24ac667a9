"""FedDIP: Federated Learning with Extreme Dynamic Pruning and Incremental Regularization.

Q. Long, C. Anagnostopoulos, S. P. Parambath, D. Bi. ICDM 2023. arXiv:2309.06805.

| hook           | Algorithm 1, and the authors' code                                                          |
|----------------|---------------------------------------------------------------------------------------------|
| train          | omega'_n <- omega_G * m, omega_n <- omega'_n                                                |
| loss           | f(omega'_n) + lambda_t sum over layers z of the norm of omega'^(z)                          |
| take_step      | omega_n <- omega_n - eta (gradient at omega'_n): the dense weights take the step,           |
|                | then omega'_n <- omega_n * m                                                                |
| upload         | omega_n, dense                                                                              |
| weights        | omega_G <- sum over n of (rho_n) omega_n, rho_n = n_k / n                                   |
| server_step    | omega_G <- omega_G * m; every R rounds then: m <- mask of the largest weights of all        |
|                | layers together, s_t of them pruned, s_t = s_T + (s_0 - s_T) (1 - t / T)^3,                 |
|                | omega_G <- omega_G * m                                                                      |

lambda_t rises from 0 in ``lam_steps`` steps over T rounds.

Paper and code (EricLoong/feddip) differ in two places. The defaults are the code's:

- *Do pruned weights come back?* In the code (``fl_server.py``) the server applies the old mask to the average, and then
  takes the new one from what is left: a pruned weight never returns, although its gradient is applied between two
  masks. The paper calls this "dynamic model pruning with error feedback", after Lin et al. (ICLR 2020,
  arXiv:2006.07253), where pruned weights may return. ``regrow: true`` is this reading: the new mask is taken from the
  average.
- *The weight of the penalty.* In the code (``client.py``, ``lambda_shrink_cur``) it is 0 in the first of 20 steps, 5e-4
  in the second, then rises by (lam - 5e-4) / 19 a step: 0, 5e-4, 5.26e-4, ..., 9.74e-4. ``lam_first: null`` is the
  paper's: 0, lam / Q, 2 lam / Q, ..., (Q - 1) lam / Q.

Deviations and silences:

- t counts rounds from 0, and round t ends with the mask of s_t: with s_0 = 0 the first mask prunes nothing, the last
  one s_{T-1}. A round from which no client returns keeps the mask for R more rounds. This matches the bytes and the
  69.99 % in Table IV of paper 004. Its Table III prints 70.52 %, which this schedule does not give.
- As in the code, the server does not apply the clients' initial mask in round 0, and with fewer rounds than
  ``lam_steps`` all have the last weight. A ``lam`` below ``lam_first`` is the weight from the second step on.
- Pruned weights begin each round at 0 and train densely.
- Prunable are shared convolutions and linear layers. With s_0 > 0 the first mask prunes the smallest initial weights of
  all layers together; the authors sample it, with a share for each layer (ERK).
- The penalty acts on prunable weights of the masked model, at which the gradient is taken.
- A client's own head, norms and biases train as always.
- The paper's clients take SGD with rate 0.1, factor 0.998 per round, and weight decay 5e-4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from fedsim.core.checks import at_least, not_negative, within
from fedsim.functional.pruning import cubic_sparsity, global_magnitude_mask, stepped_weight, zero_pruned_
from fedsim.methods.base import BodySharing, InitialState, Method, Need, Payload, Replicas, WeightingChoice
from fedsim.methods.pruned import full_mask, prunable_entries, prunable_layers
from fedsim.settings.facts import Facts
from fedsim.training.client import Batch, Client
from fedsim.training.flat_model import FlatModel
from fedsim.training.messages import Upload
from fedsim.training.server import Server

_DENSE = "dense"
_PENALTY = Facts(needs="lam")


@dataclass(frozen=True, kw_only=True)
class FedDIP(BodySharing, WeightingChoice, Method):
    """Averaging of dense models that are trained at the server's mask; the server prunes more and more."""

    server_every = 1
    replicas: ClassVar[Replicas] = {_DENSE: "frozen"}

    rounds: int = 20
    """$T$, length of both schedules; set it to ``trainer.max_epochs``"""
    initial: float = 0.0
    """$s_0$, share of the prunable weights that is pruned at the start; 0.5 in the authors' code"""
    target: float = 0.7
    """$s_T$, share that is pruned at the end"""
    reconfig_interval: int = 5
    """$R$, rounds between two masks"""
    lam: float = 1e-3
    """$\\lambda_{max}$, largest weight of the penalty"""
    lam_steps: Annotated[int, _PENALTY] = 20
    """$Q$, number of steps in which the penalty's weight rises"""
    lam_first: Annotated[float | None, _PENALTY] = 5e-4
    """weight after the first step, as in the authors' code; null: ``lam / lam_steps``, as in the paper"""
    regrow: bool = False
    """whether pruned weights can come back with a new mask, as the paper's text has it; in the authors' code never"""

    def __post_init__(self) -> None:
        at_least(
            "model.method", 1, rounds=self.rounds, reconfig_interval=self.reconfig_interval, lam_steps=self.lam_steps
        )
        within("model.method", "[0, 1)", initial=self.initial, target=self.target)
        not_negative("model.method", lam=self.lam, lam_first=self.lam_first)

    @property
    def requires(self) -> frozenset[Need]:
        """A penalty is added to the loss."""
        return frozenset({"losses"} if self.lam else ())

    def payload(self, server: Server, arch: str, round_: int) -> Payload:
        """Downloads are reduced to m."""
        return Payload(mask="mask")

    def initial_state(self, model: FlatModel) -> InitialState:
        """Return the first m."""
        return InitialState(server={"mask": self._make_mask(model, model.shared, self.initial)})

    def train(self, client: Client) -> None:
        """Begin with omega_G * m, and copy it into the second model of dense weights."""
        _dense(client).copy_(self._mask(client))
        super().train(client)

    def loss(self, client: Client, batch: Batch) -> Tensor:
        """Return the task's loss plus the penalty."""
        loss = super().loss(client, batch)
        lam = stepped_weight(client.round, self.rounds, self.lam, self.lam_steps, self.lam_first)
        if lam == 0:
            return loss
        parameters = dict(client.model.network.named_parameters())
        names = [entry.name for entry in prunable_entries(client.model)]
        return loss + lam * torch.stack([torch.linalg.vector_norm(parameters[name]) for name in names]).sum()

    def take_step(self, client: Client, loss: Tensor) -> None:
        """Step from omega_n, keep the result as omega_n, and continue with omega_n * m."""

        def start() -> None:
            _trained(client).copy_(_dense(client))

        if client.step(loss, start):
            _dense(client).copy_(_trained(client))
            self._mask(client)

    def _mask(self, client: Client) -> Tensor:
        return zero_pruned_(_trained(client), client.received.extras["mask"])

    def upload(self, client: Client) -> Upload:
        """Return omega_n; the client's own model is omega_n * m."""
        statistics = client.model.shared[client.model.flat.num_shared_parameters :]
        return Upload(torch.cat([_dense(client), statistics]))

    def server_step(self, server: Server) -> None:
        """Prune omega_G; renew m every R rounds, and prune again."""
        for arch, model in server.models.items():
            theta = server.vector(arch)[: model.flat.num_shared_parameters]
            renews = server.round % self.reconfig_interval == 0
            if not renews or (server.round > 0 and not self.regrow):
                zero_pruned_(theta, server.kept[arch]["mask"])
            if renews:
                s = cubic_sparsity(server.round, self.rounds, self.initial, self.target)
                server.keep(arch, "mask", self._make_mask(model, theta, s))
                zero_pruned_(theta, server.kept[arch]["mask"])

    def _make_mask(self, model: FlatModel, theta: Tensor, sparsity: float) -> Tensor:
        weights, ones = theta[: model.flat.num_shared_parameters], full_mask(model)
        return global_magnitude_mask(weights, ones, prunable_layers(model), sparsity)


def _trained(client: Client) -> Tensor:
    """Return omega'_n, the shared parameters of the model that is run: a view."""
    return client.model.shared[: client.model.flat.num_shared_parameters]


def _dense(client: Client) -> Tensor:
    """Return omega_n, of the same length: a view of a second model."""
    return client.model.replica(_DENSE).shared[: client.model.flat.num_shared_parameters]
