"""Decentralised Learning from Independent Multi-Domain Labels for Person Re-Identification (FedReID).

G. Wu, S. Gong. AAAI 2021. arXiv:2006.04150.

| hook            | Section "Methodology"                                                                     |
|-----------------|-------------------------------------------------------------------------------------------|
| download        | Eq. (7): the embedding network is the server's, the mapping network the client's own      |
|                 | Eq. (15), noise on what is received: ``model.privacy``                                     |
| train           | Eq. (10): the expert begins as the local client model ended when it last took part        |
| train           | Eqs. (3), (9), (11)-(13): L^C + L^E + L^R on two views of each batch                      |
| upload          | the embedding network, omega^f; kept for the next expert                                  |
| (selection)     | N_S: ceil(S N) of the clients, ``model.selection: RandomFraction``                        |
| upload          | N_S as the text has it, ``aggregated``: sampled after all clients have trained            |
| weights         | Eq. (8), last line: theta_{k+1} <- (1 / ceil(S N)) sum over m in N_S of omega_m           |
|                 | Eq. (14), noise on the mean: ``model.privacy``                                             |

The embedding network is the backbone, the mapping network neck and head. ``share_neck`` and ``share_head`` average
these, too: Eqs. (5) and (6), the paper's CIFAR-10. ``expert: false`` (Figure 4 d) is FedAvg with uniform weights.

:class:`FedReIDFineTune` is "FedReID (sup. w/ local data & dis.)" of Table 6: a client trains from the global model,
which is also its expert. ``model.backbone.weights`` names that model, as ``fedsim export`` writes it. Nothing is
shared, so a new client can adapt in the same way.

Deviations and silences:

- The expert of round k+1 starts from the end of the local client model in round k; the last expert is thrown away. So a
  client keeps a backbone between rounds, also over rounds that it skips. In its first round both models start from the
  server's.
- The teacher Q gets no gradient from L^R (the authors' code), which is the mean over the batch. So each model has its
  own optimizer; with SGD a joint one would do the same. ``grad_clip`` bounds each on its own. Label smoothing and
  triplet, which the paper does not have, enter L^C and L^E.
- t_max is 1 "local step" in the paper and an epoch in its code: ``local_epochs``. ``local_steps`` counts steps.
- Eq. (8), first line, sums gradients: this is the last line's mean for plain SGD only. With momentum it is the mean.
- In the text all clients train and some are aggregated (``aggregated``); the code samples before training, which saves
  work. With equal S the server's models differ only by the age of heads and experts. With ``aggregated``,
  ``bn_stats: first`` may take the statistics of a client that is not aggregated.
- The mapping network has a ReLU in the text, a LeakyReLU in the code: ``model.neck.activation``.
- The code is another algorithm. Its client model starts from half of the received model and half of its own last one
  (``start_mix: 0.5``), its expert from the received one (``expert_from: global``); both see the same images
  (``views: same``). It also sends all mapping networks to all clients, though each uses only its own: here they stay
  with their clients.
- Table 6 only prints "local data for training and a global model as the expert". The exported model has no mapping
  network, and those of the clients fit their own backbones. So before its first round every client trains one on the
  frozen backbone, in evaluation mode, for ``mapping_epochs`` (the paper gives no number). Model and expert start from
  the two together; then the expert is frozen, in evaluation mode, and the loss is L^C + L^R.
  At small scale plain :class:`Local` from the same weights is ahead of it (docs/results.md).
- Loss and accuracy in the log are those of the local client model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from fedsim.core.checks import at_least, positive, within
from fedsim.core.seeding import numpy_generator
from fedsim.functional.losses import soft_label_divergence
from fedsim.functional.weighting import uniform_weights
from fedsim.methods.base import KeptModels, Method, Need, PartSharing, Replicas, Signal, Weights, weigh
from fedsim.models.groups import Group, body_groups
from fedsim.settings.facts import Facts
from fedsim.training.client import Batch, Client
from fedsim.training.flat_model import FlatModel
from fedsim.training.messages import Report, Upload

_EXPERT = "expert"
_EXPERT_NEEDED = Facts(needs="expert")


@dataclass(frozen=True, kw_only=True)
class FedReID(PartSharing, Method):
    """Averaging of backbones, each of which is trained with a local expert, towards its soft labels."""

    expert: bool = True
    """whether clients have an expert (Figure 4 d), which costs a second local training"""
    temperature: Annotated[float, _EXPERT_NEEDED] = 3.0
    """$T$ in Eqs. (12) and (13)"""
    expert_from: Annotated[Literal["previous", "global"], _EXPERT_NEEDED] = "previous"
    """start of the expert: Eq. (10), or the received model (the authors' code)"""
    start_mix: float = 1.0
    """share of the received model in the start of the client model; the rest is its own last one. 1 in Eq. (7), 0.5 in
    the authors' code"""
    views: Annotated[Literal["separate", "same"], _EXPERT_NEEDED] = "separate"
    """``separate``: each model sees its own augmentation of a batch; ``same``: both see one (the authors' code)"""
    aggregated: float = 1.0
    """$S$ in Eq. (5): share of the selected clients whose models are averaged, though all train"""
    share_neck: bool = False
    """average the embedding layers before the head, too"""

    def __post_init__(self) -> None:
        positive("model.method", temperature=self.temperature)
        within("model.method", "(0, 1]", start_mix=self.start_mix, aggregated=self.aggregated)
        body_groups(self.share_neck, self.share_head)

    @property
    def requires(self) -> frozenset[Need]:
        """Identities, for soft labels: the expert's clusters are not the client model's. Two models step in turn.

        Losses are of features and logits.
        """
        of_expert: frozenset[Need] = frozenset({"identities", "plain_steps"} if self.expert else ())
        return of_expert | {"built_in_model"}

    @property
    def replicas(self) -> Replicas:
        """The local expert."""
        return {_EXPERT: "trained"} if self.expert else {}

    @property
    def keeps(self) -> KeptModels:
        """The embedding network, if a model begins with it."""
        needs_it = self.start_mix < 1 or (self.expert and self.expert_from == "previous")
        return {"embedding": "shared"} if needs_it else {}

    @property
    def measures(self) -> Mapping[str, Signal]:
        """The client's random number, if the server samples clients after training."""
        return {"lot": "client"} if self.aggregated < 1 else {}

    def train(self, client: Client) -> None:
        """Train the local client model and the local expert."""
        main = client.model
        received = client.received.vector
        previous = client.kept.get("embedding", received)
        if self.start_mix < 1:
            main.shared.copy_(self.start_mix * received + (1 - self.start_mix) * previous)
        if not self.expert:
            super().train(client)
            return
        expert = client.trainable_replica(_EXPERT)
        expert.shared.copy_(previous if self.expert_from == "previous" else received)  # Eq. (10)
        expert.private.copy_(main.private)
        for epoch in range(client.local_epochs):
            for batch in client.batches(epoch, views=2 if self.views == "separate" else 1):
                soft_labels = self._step_expert(client, expert, batch)
                output = client.forward(batch.images)
                l_c = client.supervised_loss(output, batch)  # Eq. (9)
                l_r = soft_label_divergence(output.logits, soft_labels, self.temperature)  # Eqs. (12), (13)
                client.step(l_c + l_r)  # Eq. (3): L^E is the expert's alone

    def _step_expert(self, client: Client, expert: FlatModel, batch: Batch) -> Tensor:
        """Step the expert; return its logits [B, Z] from before, without gradient."""
        (images,) = batch.views or (batch.images,)
        output = expert.forward(images, client.session.precision)
        l_e = client.supervised_loss(output, batch, counts=False)  # Eq. (11)
        client.step(l_e, optimizer=expert.optimizer(client.training_settings))
        return output.logits.detach()

    def upload(self, client: Client) -> Upload:
        """Return the embedding network and a random number; keep the network for the next time if it is needed."""
        if self.keeps:
            client.keep("embedding", client.model.shared)
        if self.aggregated == 1:
            return Upload(client.model.shared)
        lot = numpy_generator(client.seed, client.round, client.client_name, "aggregated").random()
        return Upload(client.model.shared, signals={"lot": lot})  # the server aggregates the smallest

    def weights(self, reports: Mapping[str, Report]) -> Weights:
        """Return 1 / ceil(S N) for the clients that are aggregated (Eq. 8)."""
        if self.aggregated == 1:
            return weigh("uniform", reports)
        count = math.ceil(self.aggregated * len(reports) - 1e-9)  # 0.28 * 25 is 7.000000000000001
        chosen = uniform_weights(dict.fromkeys(sorted(reports, key=lambda k: reports[k].signals["lot"])[:count]))
        return Weights({client: chosen.get(client, 0.0) for client in reports})


@dataclass(frozen=True, kw_only=True)
class FedReIDFineTune(Method):
    """A client's own training from the global model, with that model as its expert (Table 6)."""

    requires = frozenset({"identities", "plain_steps", "built_in_model"})  # for soft labels; a loop of its own
    shared_groups = frozenset[Group]()
    replicas: ClassVar[Replicas] = {_EXPERT: "frozen"}
    keeps: ClassVar[KeptModels] = {_EXPERT: "model"}

    temperature: float = 3.0
    """$T$ in Eqs. (12) and (13)"""
    mapping_epochs: int = 5
    """passes over the images before the first round, which train the expert's neck and head; no number in the paper"""

    def __post_init__(self) -> None:
        positive("model.method", temperature=self.temperature)
        at_least("model.method", 1, mapping_epochs=self.mapping_epochs)

    def train(self, client: Client) -> None:
        """Train on labels and on the expert's soft labels."""
        if _EXPERT not in client.kept:
            self._train_mapping(client)
            client.keep(_EXPERT, client.model.whole)
        expert = client.model.frozen_replica(_EXPERT, client.kept[_EXPERT])
        for epoch in range(client.local_epochs):
            for batch in client.batches(epoch, views=2):
                with torch.no_grad():
                    soft_labels = expert.forward(batch.views[0], client.session.precision).logits
                output = client.forward(batch.images)
                l_c = client.supervised_loss(output, batch)  # Eq. (9)
                client.step(l_c + soft_label_divergence(output.logits, soft_labels, self.temperature))  # Eq. (13)

    def _train_mapping(self, client: Client) -> None:
        """Train neck and head on the backbone as it is."""
        backbone = client.model.network.backbone
        backbone.eval()  # its running statistics stay, too
        trainable = [parameter for parameter in backbone.parameters() if parameter.requires_grad]
        for parameter in trainable:
            parameter.requires_grad_(False)
        try:
            for _ in range(self.mapping_epochs):
                for batch in client.batches(0):
                    client.step(client.supervised_loss(client.forward(batch.images), batch, counts=False))
        finally:
            for parameter in trainable:
                parameter.requires_grad_(True)
        backbone.train()
        client.model.reset_counters()
        client.optimizer.reset(client.round)
