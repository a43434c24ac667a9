"""FedProto: Federated Prototype Learning across Heterogeneous Clients.

Y. Tan, G. Long, L. Liu, T. Zhou, Q. Lu, J. Jiang, C. Zhang. AAAI 2022. arXiv:2105.00243.

| hook        | Algorithm 1; equations from memory, the authors' code was read                                  |
|-------------|-------------------------------------------------------------------------------------------------|
| loss        | L_S + lambda sum over j of d(C_i^j, C^j): the distance of a batch's prototypes, the mean        |
|             | features of its classes j, from the global ones                                                 |
| upload      | C_i^j <- the mean feature of the client's images of class j (Eq. 3)                             |
| server_step | C^j <- sum over i of (n_ij / n_j) C_i^j, over the clients that have class j (Eq. 6)             |

Models stay with their clients, as in local training; only prototypes are sent. So clients may have different
backbones, with features of one length.

Deviations and silences:

- The classes must be common (``data.labels: common``, by which equal identities are one class), and some must be of
  two clients or more. Otherwise the method would be local training, and is refused.
- Features are those before the classifier, of the neck. d is the Euclidean distance.
- ``compares: images`` is the authors' code: the mean squared difference of each image's feature from the prototype of
  its class, in which images of unknown classes count as 0.
- Eq. (6) also divides by the number of these clients, which would shrink prototypes. The code does not, and takes the
  plain mean: ``weighting: uniform``.
- C_i^j is that of the trained model in evaluation mode. The code takes the mean over the batches of the last epoch,
  as they were in training.
- The paper's clients all take part. Here a class without a client in a round keeps its prototype. The first round has
  none, and the term is 0.
- An optimizer goes on from round to round, as in local training. The code makes a new one: ``optimizer_state: reset``.
- All Z prototypes and a number each are sent, also those of classes that a client lacks, and bytes count them.
- The paper classifies by the nearest prototype. Here ``evaluation`` decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedsim.core.checks import not_negative
from fedsim.core.errors import ConfigError
from fedsim.core.transfer import send
from fedsim.functional.prototypes import class_means, image_distance, prototype_distance
from fedsim.methods.base import InitialState, Method, Need, Payload, WeightingChoice
from fedsim.models.groups import Group
from fedsim.training.client import Batch, Client
from fedsim.training.flat_model import FlatModel
from fedsim.training.messages import Upload
from fedsim.training.server import Server

_PROTOTYPES = "prototypes"
"""[Z, D + 1]: the prototypes, and 1 for those that are known; in uploads times the client's weight for the class"""
_UNIT = 2.0**-10
"""Of the weights of classes in uploads, so that sums of many images stay in range; it cancels."""


@dataclass(frozen=True, kw_only=True)
class FedProto(WeightingChoice, Method):
    """Local training near the mean features of classes that clients share."""

    shared_groups = frozenset[Group]()
    server_every = 1  # the prototypes are renewed

    lam: float = 1.0
    """$\\lambda$, weight of the distance from the global prototypes"""
    compares: Literal["prototypes", "images"] = "prototypes"
    """what is near the global prototypes: the mean features of a batch's classes, or each image's features"""

    def __post_init__(self) -> None:
        not_negative("model.method", lam=self.lam)

    @property
    def requires(self) -> frozenset[Need]:
        """Classes of several clients, features; and all of a batch, for its mean features."""
        whole = frozenset[Need]({"whole_batches"} if self.compares == "prototypes" else ())
        return whole | {"identities", "common_classes", "built_in_model"}

    def initial_state(self, model: FlatModel) -> InitialState:
        """Return prototypes of which none is known."""
        return InitialState(server={_PROTOTYPES: torch.zeros(_shape(model))})

    def payload(self, server: Server, arch: str, round_: int) -> Payload:
        """Return the prototypes, for the clients and for the server."""
        widths = {name: model.network.num_features for name, model in sorted(server.models.items())}
        if len({*widths.values()}) > 1:
            listed = ", ".join(f"{name} {width}" for name, width in widths.items())
            raise ConfigError(
                f"model.neck: FedProto compares features, whose lengths differ ({listed}); set kind to linear and dim"
            )
        return Payload(down=(_PROTOTYPES,), up={_PROTOTYPES: _shape(server.models[arch])})

    def loss(self, client: Client, batch: Batch) -> Tensor:
        """Return L_S plus lambda times the distance from the global prototypes."""
        output = client.forward(batch.images)
        features, received = output.features.neck, client.received.extras[_PROTOTYPES]
        prototypes, is_known = received[:, :-1], received[:, -1] > 0
        if self.compares == "images":
            distance = image_distance(features, prototypes[batch.labels], is_known[batch.labels])
        else:
            means, counts = class_means(features, batch.labels, len(prototypes))
            distance = prototype_distance(means, prototypes, is_known & (counts > 0))
        return client.supervised_loss(output, batch) + self.lam * distance

    def upload(self, client: Client) -> Upload:
        """Return C_i^j and 1, both times the client's weight for class j (Eqs. 3 and 6)."""
        labels = send(client.images.labels, client.device)
        means, counts = class_means(client.plain_features(), labels, len(client.received.extras[_PROTOTYPES]))
        weights = _UNIT * (counts if self.weighting == "size" else (counts > 0).float())
        rows = torch.cat([means, torch.ones_like(means[:, :1])], dim=1)
        return Upload(client.model.shared, {_PROTOTYPES: weights[:, None] * rows})

    def server_step(self, server: Server) -> None:
        """Renew the prototypes of the classes that clients have sent (Eq. 6)."""
        if not server.answers:
            return
        sums = torch.stack([len(a.reports) * a.extras[_PROTOTYPES].double() for a in server.answers.values()]).sum(0)
        weights = sums[:, -1:]
        for arch, kept in server.kept.items():
            new = torch.where(weights > 0, sums / weights.where(weights > 0, 1), kept[_PROTOTYPES].double())
            server.keep(arch, _PROTOTYPES, new.float())


def _shape(model: FlatModel) -> tuple[int, int]:
    """Return [Z, D + 1]; Z is the same for all clients."""
    return model.num_classes, model.network.num_features + 1
