"""Model-Contrastive Federated Learning (MOON).

Q. Li, B. He, D. Song. CVPR 2021. arXiv:2103.16257.

| hook         | Algorithm 1                                                                        |
|--------------|------------------------------------------------------------------------------------|
| train        | the received model w^t and the client's last one, w_i^{t-1}, are the references    |
| loss         | l_sup + mu l_con, with the features z, z_glob, z_prev of the three models          |
| upload       | return w_i^t, and keep it                                                          |
| weights      | w^{t+1} <- sum over i of (n_i / n) w_i^t                                           |

l_con = -log(e^{cos(z, z_glob) / tau} / (e^{cos(z, z_glob) / tau} + e^{cos(z, z_prev) / tau})).

Deviations and silences:

- The paper's z is the output of all layers before the last: of a projection head (two layers, 256 outputs) between
  backbone and classifier. In re-ID the neck stands there, and ``layer: neck`` is this form. The default is the
  backbone's pooled feature, on which earlier versions had it; it moves the backbone less.
- The references run in evaluation mode and without gradients, as in the authors' code.
- In a client's first round there is no previous model, and the term is 0. Later the previous model is that of the
  client's last round. In the code a client that joins after round 0 has its untrained model as the previous one.
- With a module of the user, z is what its `embed` returns, in a pass of its own, which running statistics see, too.
- The paper tunes mu in {0.1, 1, 5, 10} and takes tau = 0.5. Paper 000, which compares with "MOON+D", gives neither.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from fedsim.core.checks import not_negative, positive
from fedsim.functional.losses import model_contrastive
from fedsim.methods.base import KeptModels, Method, PartSharing, Replicas, WeightingChoice
from fedsim.settings.facts import Facts
from fedsim.training.client import Batch, Client
from fedsim.training.messages import Upload

_CONTRAST = Facts(needs="mu")


@dataclass(frozen=True, kw_only=True)
class MOON(PartSharing, WeightingChoice, Method):
    """Averaging of clients whose features stay near the global model's, and move away from their previous ones."""

    keeps: ClassVar[KeptModels] = {"previous": "model"}
    requires = frozenset({"losses"})

    mu: float = 1.0
    """$\\mu$, weight of the contrastive term"""
    tau: Annotated[float, _CONTRAST] = 0.5
    """$\\tau$, temperature"""
    layer: Annotated[Literal["pool", "neck"], _CONTRAST] = "pool"
    """features that are contrasted: the backbone's pooled ones, or the neck's output, which is the paper's place"""

    def __post_init__(self) -> None:
        not_negative("model.method", mu=self.mu)
        positive("model.method", tau=self.tau)

    @property
    def replicas(self) -> Replicas:
        """Both references."""
        return {"global": "frozen", "previous": "frozen"}

    def train(self, client: Client) -> None:
        """Load both references, and train."""
        if "previous" in client.kept:
            for role, weights in (("global", client.model.whole), ("previous", client.kept["previous"])):
                client.model.frozen_replica(role, weights)
        super().train(client)

    def loss(self, client: Client, batch: Batch) -> Tensor:
        """Return the supervised loss plus mu times the contrastive one."""
        output = client.forward(batch.images)
        loss = client.supervised_loss(output, batch)
        if "previous" not in client.kept:
            return loss
        with torch.no_grad():
            references = [client.model.replica(role) for role in ("global", "previous")]
            z_glob, z_prev = (
                replica.forward(batch.images, client.session.precision).features.layer(self.layer)
                for replica in references
            )
        return loss + self.mu * model_contrastive(output.features.layer(self.layer), z_glob, z_prev, self.tau)

    def upload(self, client: Client) -> Upload:
        """Return the model, and keep it for the next time."""
        client.keep("previous", client.model.whole)
        return super().upload(client)
