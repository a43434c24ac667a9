"""FedBABU: Toward Enhanced Representation for Federated Image Classification.

J. Oh, S. Kim, S.-Y. Yun. ICLR 2022. arXiv:2106.06042.

| hook            | Algorithm 1 and the evaluation                                                        |
|-----------------|---------------------------------------------------------------------------------------|
| download        | the body is the server's; the head is random, and the same in all rounds              |
| train           | steps of the body, the head is fixed;                                                 |
|                 | fine-tuning of the received model, for ``fine_tune_epochs``                           |
| weights         | theta^{t+1} <- sum over k of (n_k / n) theta_k                                        |
| personalise     | the model of client k is the fine-tuned one                                           |

Deviations and silences:

- The paper's clients share a label space and one random head. In re-ID each client has a random head of its own.
  Weights and biases are uniform within 1 / sqrt(D) of 0, torch's default and so the authors' code. Heads of other
  methods start with a deviation of 0.001: if they were fixed, they would hardly give the body a gradient.
- The paper fine-tunes the global model before each evaluation. Here a client does it at the end of its local training,
  from the model that it received and its fixed head: the personal model is one average older than the global one. It
  has a fresh optimizer; loss and accuracy in the log are without it.
- ``fine_tune`` is the part that moves. The abstract fine-tunes the head, which retrieval does not see: then
  personalised features are the global ones. ``all`` moves the body, too.
- A client that has not taken part yet is scored with the global body and its fixed head.
- The authors' code takes the plain mean, of clients of one size: ``weighting: uniform``.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Annotated, Literal

import torch

from fedsim.core.checks import at_least
from fedsim.core.errors import ConfigError
from fedsim.core.seeding import torch_generator
from fedsim.methods.base import Delivered, KeptModels, Method, OtherSteps, WeightingChoice
from fedsim.models.groups import Group, body_groups
from fedsim.settings.facts import Facts
from fedsim.training.client import Client
from fedsim.training.settings import LocalTraining


@dataclass(frozen=True, kw_only=True)
class FedBABU(WeightingChoice, Method):
    """Averaging of bodies that are trained for fixed random heads."""

    requires = frozenset({"identities"})  # clusters have no head

    fine_tune_epochs: int = 5
    """epochs of fine-tuning in each round; 0: none, and the personalised model has the global body"""
    fine_tune: Annotated[Literal["head", "all"], Facts(needs="fine_tune_epochs")] = "all"
    """the part that fine-tuning moves: what is private, or the whole model"""
    share_neck: bool = True
    """whether the embedding layers before the classifier belong to the body; private ones are fixed with it"""

    def __post_init__(self) -> None:
        at_least("model.method", 0, fine_tune_epochs=self.fine_tune_epochs)

    @property
    def shared_groups(self) -> frozenset[Group]:
        """The body."""
        return body_groups(self.share_neck, share_head=False)

    @property
    def delivers(self) -> Delivered:
        """The personal models, if their bodies differ from the global one."""
        return "personalised" if self.fine_tune_epochs and self.fine_tune == "all" else "global"

    @property
    def keeps(self) -> KeptModels:
        """The part that fine-tuning moves."""
        if self.fine_tune_epochs == 0:
            return {}
        return {"personal": "model"} if self.fine_tune == "all" else {"tuned": "private"}

    def check(self, training: LocalTraining, client: str) -> None:
        """Refuse an optimizer whose state would go from one model to the other."""
        if training.optimizer_state == "keep" and self.fine_tune_epochs:
            raise ConfigError(
                "model.client.optimizer_state: FedBABU's fine-tuning has a fresh optimizer; set it to reset"
            )

    def download(self, client: Client) -> None:
        """Load the global body and the fixed head."""
        super().download(client)
        generator = torch_generator(client.seed, client.client_name, "fixed head")
        for head in client.model.head_layers:
            bound = 1 / math.sqrt(head.weight[0].numel())
            for tensor in (part for part in head if part.numel()):
                values = torch.empty(tensor.shape).uniform_(-bound, bound, generator=generator)
                tensor.copy_(values, non_blocking=True)

    def train(self, client: Client) -> None:
        """Train the body for the fixed head; then fine-tune what was received."""
        received = client.model.whole.clone()
        with client.model.training_only("shared"):
            super().train(client)
        if self.fine_tune_epochs == 0:
            return
        trained = client.model.whole.clone()
        client.model.whole.copy_(received)
        client.model.reset_counters()
        client.optimizer.reset(client.round)
        moved = client.model.training_only("private") if self.fine_tune == "head" else nullcontext()
        with moved, client.personal_training():
            client.fit(OtherSteps(), [0] * self.fine_tune_epochs)
        for name, part in self.keeps.items():
            client.keep(name, client.model.whole if part == "model" else client.model.private)
        client.model.whole.copy_(trained)

    def personalise(self, client: Client) -> None:
        """Load the fine-tuned part."""
        super().personalise(client)
        if "personal" in client.kept:
            client.model.whole.copy_(client.kept["personal"])
        elif "tuned" in client.kept:
            client.model.private.copy_(client.kept["tuned"])
