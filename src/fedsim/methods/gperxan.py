"""Efficiently Assemble Normalization Layers and Regularization for Federated Domain Generalization (gPerXAN).

K. Le, L. Ho, C. Do, D. Le-Phuoc, K.-S. Wong. CVPR 2024. arXiv:2403.15605.

| hook            | abstract and authors' code (lhkhiem28/gPerXAN)                                           |
|-----------------|------------------------------------------------------------------------------------------|
| (shared groups) | all but batch normalisation: instance normalisation and its weight are averaged          |
| loss            | L(h(f(x)), y) + lambda L(h_global(f(x)), y): the received head guides the features       |
| upload          | the client's batch normalisation, for the server's model alone                           |
| server_tensors  | their mean, with which the server scores unseen domains                                  |
| weights         | n_k / n                                                                                  |

The layers are ``norm: xan`` of the backbone (:class:`~fedsim.models.AssembledNorm2d`). In a backbone without them the
method is FedBN whose server has a model, with the guide.

Deviations and silences:

- The text was not at hand. Its abstract and the code agree that instance normalisation is aggregated and batch
  normalisation is personal; on the rest the code decides.
- In the code a client sends all tensors, the server averages all, and the client loads those whose names lack
  "batchnorm". So the server's model, which is tested on the unseen domain, has the mean of the clients' batch
  normalisations. ``unseen: average`` is this. With ``unseen: own`` they never leave their clients; unseen domains are
  then scored by the clients' own models, and scores averaged.
- The names without "batchnorm" also lack the score of the batch normalisation, one of the two numbers whose softmax
  weighs the parts. Here both are averaged: they are not part of the batch normalisation.
- The guide needs a head of all clients' classes. The paper's clients have one label space. In re-ID heads are private,
  as clients have other people, and there is no global head: ``guide`` above 0 is refused unless the head is shared
  (``share_head``) and labels are common (``data.labels: common``). The code has lambda = 0.5.
- The received head is fixed, and its gradient moves the features: those of the neck, which the head classifies. The
  guide is plain cross-entropy, also beside other terms of the objective.
- A neck's normalisation is private, as that of the backbone, and its other layers are averaged.
- The code starts from a file of this network that is not public, and anneals the rate of SGD over all rounds. Its
  clients keep one optimizer, so momentum lasts from round to round: ``optimizer_state: keep``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from fedsim.core.checks import not_negative
from fedsim.core.errors import ConfigError
from fedsim.core.flat import Entry
from fedsim.methods.base import Method, Need, PartSharing, Payload, WeightingChoice
from fedsim.models.groups import Group, body_groups
from fedsim.training.client import Batch, Client
from fedsim.training.flat_model import FlatModel
from fedsim.training.messages import Upload
from fedsim.training.server import Server

_PERSONAL = frozenset({Group.NORM, Group.STAT, Group.NECKNORM, Group.NECKSTAT})
"""batch normalisation: affine parameters and running statistics"""
_NORMS = "norms"
_UNIT = 2.0**-16
"""of the numbers of images by which uploads are multiplied, so that sums stay in range; it cancels"""


@dataclass(frozen=True, kw_only=True)
class GPerXAN(PartSharing, WeightingChoice, Method):
    """Averaging of everything but batch normalisation, of which the server has the mean for unseen domains."""

    guide: float = 0.0
    """$\\lambda$, weight of the loss of the received head; needs a shared head and common labels"""
    unseen: Literal["average", "own"] = "average"
    """model for unseen domains: the server's, with the mean of the clients' batch normalisations, which they send; or
    the clients' own, which then send none"""

    def __post_init__(self) -> None:
        not_negative("model.method", guide=self.guide)
        if self.guide > 0 and not self.share_head:
            raise ConfigError(
                "model.method.guide: it is the loss of a head that all clients share; set share_head to true, with "
                "data.labels: common, or guide to 0"
            )

    @property
    def shared_groups(self) -> frozenset[Group]:
        """The backbone without batch normalisation; and neck and head if they are shared."""
        return super().shared_groups - _PERSONAL

    @property
    def requires(self) -> frozenset[Need]:
        """Batch normalisation that is found by its class; classes that have the same place in all heads."""
        guided: frozenset[Need] = frozenset({"identities", "common_classes"} if self.guide > 0 else ())
        return guided | {"built_in_model"}

    @property
    def server_every(self) -> int:
        """Rounds between two means of batch normalisation on the server; 0: none."""
        return 1 if self.unseen == "average" else 0

    @property
    def reads_on_ranks(self) -> frozenset[str]:
        """The mean batch normalisation, with which each rank can score unseen data."""
        return frozenset({_NORMS} if self.unseen == "average" else ())

    def payload(self, server: Server, arch: str, round_: int) -> Payload:
        """Return the place of the clients' batch normalisation in their uploads."""
        if self.unseen == "own":
            return Payload()
        return Payload(up={_NORMS: (sum(entry.numel for entry in self._personal(server.models[arch])),)})

    def loss(self, client: Client, batch: Batch) -> Tensor:
        """Return the supervised loss, plus ``guide`` times that of the received head."""
        if self.guide == 0:
            return client.training_step(batch)
        output = client.forward(batch.images)
        logits = linear(output.features.neck, *_received_head(client))
        targets = batch.labels if batch.targets is None else batch.targets
        guided = cross_entropy(logits, targets)
        return client.supervised_loss(output, batch) + self.guide * guided

    def upload(self, client: Client) -> Upload:
        """Return the shared tensors, and for the server's model the batch normalisation."""
        if self.unseen == "own":
            return Upload(client.model.shared)
        model = client.model
        norms = [model.flat.buffer[entry.span] for entry in self._personal(model)]
        joined = torch.cat(norms) if norms else model.shared[:0]
        return Upload(model.shared, {_NORMS: self._weight(client.data.num_images) * joined})

    def server_step(self, server: Server) -> None:
        """Keep the mean batch normalisation."""
        for arch, answers in server.answers.items():
            weights = [self._weight(report.num_images) for report in answers.reports.values()]
            server.keep(arch, _NORMS, answers.extras[_NORMS] / (sum(weights) / len(weights)))

    def server_tensors(self, server: Server, arch: str) -> Mapping[str, Tensor]:
        """Return the mean batch normalisation once there is one."""
        if _NORMS not in server.kept[arch]:
            return {}
        entries = self._personal(server.models[arch])
        parts = server.kept[arch][_NORMS].split([entry.numel for entry in entries])
        return {entry.name: part.view(entry.shape) for entry, part in zip(entries, parts, strict=True)}

    def _weight(self, num_images: int) -> float:
        """Return a client's weight for batch normalisation: extras are summed with equal ones."""
        return _UNIT * num_images if self.weighting == "size" else 1.0

    def _personal(self, model: FlatModel) -> list[Entry]:
        """Return the entries of batch normalisation in the parts whose other layers are averaged."""
        groups = body_groups(self.share_neck, share_head=False) & _PERSONAL
        return [entry for entry in model.flat.entries if model.groups[entry.name] in groups]


def _received_head(client: Client) -> tuple[Tensor, Tensor]:
    """Return weight [Z, D] and bias [Z] of the head that the client has received: views."""
    entries = {entry.name: entry for entry in client.model.flat.shared_entries}
    vector = client.received.vector
    weight, bias = (vector[entries[name].span].view(entries[name].shape) for name in ("head.weight", "head.bias"))
    return weight, bias
