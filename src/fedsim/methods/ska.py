"""Decentralised Person Re-Identification with Selective Knowledge Aggregation (SKA).

S. Sun, G. Wu, S. Gong. BMVC 2021.

| hook            | Algorithm 1                                                                              |
|-----------------|------------------------------------------------------------------------------------------|
| initial_state   | line 1: w_{0,ls} and w_{0,lg} are equal                                                  |
| download        | SelectUpdate, lines 26-30: lg takes all of w_t, ls all but normalisation layers          |
| loss            | LocalUpdate, lines 13-14: a step of lg and one of ls, each on its own cross-entropy      |
| upload          | SelectAgg, lines 18-22: normalisation layers of lg, the others of ls                     |
| weights         | line 6: w_{t+1} <- (1 / K) sum over k of w_l^k                                           |
| personalise     | line 8: w_ls^k, after line 7                                                             |
|                 | Table 6, ``unseen``: models for unseen domains where the server has no normalisation     |
| upload          | ``avg``: "average local specific normalisation layers at the end of model training"      |
| server_tensors  | ``avg``, ``imagenet``: the server's other layers with these, or with the initial ones    |

``dual: false`` leaves lg out ("LSN"): normalisation layers never leave their clients, and this is FedBN.

Deviations and silences:

- Where the paper is silent, the authors' code decides: github.com/SunTongtongtong/FedReid, branch
  Onehead_FedBN_AN_dual. It saves the last round, and drops the rates to a tenth in rounds 40 and 80.
- ls and lg are whole models of the same start; each has a neck and a head, which never leave the client. lg's head
  begins as a copy of ls's (the authors' code).
- The two train on the same batches, augmented once, and share nothing else. Each has its own dropout stream, and
  torch's global stream is restored after lg: ls has the same bits with and without lg; Table 4 prints equal numbers.
  Loss and accuracy in the log are those of ls.
- A normalisation layer is affine parameters and running statistics, found by the module's class, also in ResNet's
  shortcuts. The attention of attentive normalisation is part of the layer. SE's and CBAM's modules (Table 5) are
  averaged, as in the authors' code, which searches names for "bn"; ``attn_local: true`` treats them as normalisation
  layers.
- Algorithm 1 returns ls after SelectUpdate, with the server's newest convolutions, and the authors' code scores it
  there: ``personal: after``. With
  ``before_aggregation`` it is the trained model; the client then keeps a whole backbone.
- In the paper all clients take part in each round. Here a client that does not take part keeps its normalisation
  layers, at first the initial ones.
- ``avg`` is the plain mean over the clients of a round, every ``avg_every`` rounds; before the first mean, unseen
  domains are scored by the clients' own models. Server optimizer and ``bn_stats`` do not act on it.
- Necks are private, so the server has a model only for ``evaluation.layer: pool``, which the paper uses. On ``neck``
  features, unseen domains are scored by the clients' own models, or by all together (``concat``).
- Table 4's "Baseline" and "+AN" are FedAvg with private necks.

Measured in docs/results.md: Tables 4 and 6 at small scale (``benchmarks/ska.py``), and the cost of SKA against FedAvg
with private necks (``benchmarks/ska_cost.py``): a second local training and a second model in memory, no more bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from fedsim.core.checks import at_least
from fedsim.core.errors import ConfigError
from fedsim.methods.base import Delivered, InitialState, KeptModels, Method, Need, Payload, Replicas, Weights, weigh
from fedsim.methods.declared import has_server_step
from fedsim.models.groups import BACKBONE, Group
from fedsim.settings.facts import Facts
from fedsim.training.client import Batch, Client
from fedsim.training.flat_model import FlatModel
from fedsim.training.messages import Report, Upload
from fedsim.training.server import Server

_LG = "generalised"
_ATTENTION = (
    "model.backbone not in ('ResNet', 'MobileNetV2', 'SmallCNN') or model.backbone.norm in ('se', 'cbam') or "
    "model.backbone.fam not in (None, 'none') or model.backbone.style or model.clients or model.adaptive_backbones"
)


@dataclass(frozen=True, kw_only=True)
class SKA(Method):
    """Averaging of backbones; clients keep their normalisation layers, and train a second model for the server's."""

    dual: bool = True
    """train a generalised model lg, which gives the server normalisation layers; costs a second local training"""
    attn_local: Annotated[bool, Facts(needs=_ATTENTION)] = False
    """treat SE's and CBAM's modules as normalisation layers; false: as convolutions (the authors' code)"""
    personal: Literal["after", "before_aggregation"] = "after"
    """convolutions of a client's own model: the server's, or those that it has trained"""
    unseen: Literal["dual", "avg", "concat", "imagenet"] = "dual"
    """normalisation layers on unseen domains (Table 6): the server's, which needs ``dual``; without it the mean of the
    clients', the initial ones, or all clients' models with their features side by side (``concat``)"""
    avg_every: Annotated[int, Facts(needs="unseen == 'avg'")] = 1
    """rounds between two means of ``unseen: avg``; each costs an upload. The paper has one, at the end"""

    def __post_init__(self) -> None:
        """Check that a model can score unseen domains."""
        if not self.dual and self.unseen == "dual":
            raise ConfigError(
                "model.method.unseen: without dual the server has no normalisation layers; "
                "set it to avg, concat or imagenet"
            )
        if self.dual and self.unseen != "dual":
            raise ConfigError(f"model.method.unseen: {self.unseen} needs dual: false; leave it out")
        at_least("model.method", 1, avg_every=self.avg_every)

    @property
    def specific_groups(self) -> frozenset[Group]:
        """The normalisation layers."""
        return frozenset({Group.NORM, Group.STAT} | ({Group.ATTN} if self.attn_local else set()))

    @property
    def requires(self) -> frozenset[Need]:
        """Identities, since a memory of clusters is of one model's features. Lg's step restores a random stream.

        Attention and neck are parts of fedsim's own model.
        """
        of_two_models: frozenset[Need] = frozenset({"identities", "plain_steps"} if self.dual else ())
        return of_two_models | {"built_in_model"}

    @property
    def replicas(self) -> Replicas:
        """The generalised model."""
        return {_LG: "trained"} if self.dual else {}

    @property
    def keeps(self) -> KeptModels:
        """The generalised model's private part, and the trained backbone if it is a client's own."""
        backbone: KeptModels = {"backbone": "shared"} if self.personal == "before_aggregation" else {}
        return {**backbone, _LG: "private"} if self.dual else backbone

    @property
    def shared_groups(self) -> frozenset[Group]:
        """The backbone; without lg, the backbone without normalisation layers."""
        return BACKBONE if self.dual else BACKBONE - self.specific_groups

    @property
    def delivers(self) -> Delivered:
        """The clients' models ls; ``concat`` is FeatConcat of Table 6."""
        return "ensemble" if self.unseen == "concat" else "personalised"

    @property
    def server_every(self) -> int:
        """Rounds between two means of normalisation layers on the server; 0: none."""
        return self.avg_every if self.unseen == "avg" else 0

    @property
    def reads_on_ranks(self) -> frozenset[str]:
        """The mean normalisation layers, with which each rank can score unseen data."""
        return frozenset({"norms"})

    def payload(self, server: Server, arch: str, round_: int) -> Payload:
        """Normalisation layers, in rounds that average them."""
        if not has_server_step(self, round_):
            return Payload()
        model = server.models[arch]
        return Payload(up={"norms": (sum(part.numel() for part in self._norms(model, model.flat.buffer)),)})

    def initial_state(self, model: FlatModel) -> InitialState:
        """Return the normalisation layers of ls, if those from the server belong to lg."""
        return InitialState({"norms": _join(self._norms(model, model.flat.buffer))} if self.dual else {})

    def download(self, client: Client) -> None:
        """Load w_t into both models (SelectUpdate)."""
        self._load_specific(client)
        if self.dual:
            ls, lg = client.model, client.trainable_replica(_LG)
            lg.shared.copy_(client.received.vector)  # line 27
            lg.private.copy_(client.kept.get(_LG, ls.private))

    def _load_specific(self, client: Client) -> None:
        ls = client.model
        ls.shared.copy_(client.received.vector)  # line 30
        if self.dual:
            norms = self._norms(ls, ls.flat.buffer)
            for part, values in zip(norms, client.kept["norms"].split([part.numel() for part in norms]), strict=True):
                part.copy_(values)

    def loss(self, client: Client, batch: Batch) -> Tensor:
        """Return the loss of ls, after a step of lg."""
        if self.dual:
            lg = client.model.replica(_LG)
            with torch.random.fork_rng([lg.device] if lg.device.type == "cuda" else []):
                output = lg.forward(batch.images, client.session.precision)
            loss = client.supervised_loss(output, batch, counts=False)
            client.step(loss, optimizer=lg.optimizer(client.training_settings))  # line 14
        return client.training_step(batch)  # line 13

    def upload(self, client: Client) -> Upload:
        """Return w_l (SelectAgg), and keep the tensors that are not in it."""
        ls = client.model
        norms = _join(self._norms(ls, ls.flat.buffer))
        if self.personal == "before_aggregation":
            client.keep("backbone", ls.shared)
        if not self.dual:
            return Upload(ls.shared, {"norms": norms} if has_server_step(self, client.round) else {})
        lg = ls.replica(_LG)
        client.keep("norms", norms)
        client.keep(_LG, lg.private)
        vector = ls.shared.clone()  # line 22
        for part, norm in zip(self._norms(ls, vector), self._norms(lg, lg.shared), strict=True):
            part.copy_(norm)  # line 20
        return Upload(vector)

    def weights(self, reports: Mapping[str, Report]) -> Weights:
        """Return 1 / K (line 6)."""
        return weigh("uniform", reports)

    def server_step(self, server: Server) -> None:
        """Keep the mean normalisation layers."""
        for arch, answers in server.answers.items():
            server.keep(arch, "norms", answers.extras["norms"])

    def server_tensors(self, server: Server, arch: str) -> Mapping[str, Tensor]:
        """Return normalisation layers for unseen domains, once there are means; or the initial ones."""
        model = server.models[arch]
        entries = [e for e in model.flat.entries if not e.shared and model.groups[e.name] in self.specific_groups]
        if self.unseen == "imagenet":
            start = model.flat.num_shared
            spans = {e.name: slice(e.offset - start, e.offset - start + e.numel) for e in entries}
            return {e.name: model.initial_private[spans[e.name]].view(e.shape) for e in entries}
        if "norms" not in server.kept[arch]:
            return {}
        parts = server.kept[arch]["norms"].split([e.numel for e in entries])
        return {e.name: part.view(e.shape) for e, part in zip(entries, parts, strict=True)}

    def personalise(self, client: Client) -> None:
        """Load ls."""
        self._load_specific(client)
        if "backbone" in client.kept:
            client.model.shared.copy_(client.kept["backbone"])

    def _norms(self, model: FlatModel, vector: Tensor) -> list[Tensor]:
        """Return views of the normalisation layers in ``vector``, the flat buffer or its beginning."""
        entries = [entry for entry in model.flat.entries if model.groups[entry.name] in self.specific_groups]
        return [vector[entry.span] for entry in entries if entry.span.stop <= len(vector)]


def _join(parts: list[Tensor]) -> Tensor:
    """Return the values of tensors as one vector; a backbone without normalisation gives an empty one."""
    return torch.cat(parts) if parts else torch.empty(0)
