"""Backbones that follow the clients' rewards: the adaptive model selection of paper 002."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from fedsim.core.arguments import Section
from fedsim.core.checks import at_least, known, within
from fedsim.core.errors import ConfigError
from fedsim.core.names import metric_name
from fedsim.core.seeding import torch_generator
from fedsim.federation.components.listener import RoundListener
from fedsim.federation.components.selection import Selection
from fedsim.federation.parts import Parts, layout_of
from fedsim.methods.base import Method
from fedsim.models.backbones import Backbone
from fedsim.training.client import Client
from fedsim.training.flat_model import FlatModel
from fedsim.training.server import Server

log = logging.getLogger(__name__)

_FIELD = "model.adaptive_backbones"
OTHER_LADDER = "ckpt_path: model.adaptive_backbones differs from that of the run that wrote the checkpoint"


@dataclass(frozen=True, kw_only=True)
class AdaptiveBackbones(Section, option="model.adaptive_backbones"):
    """Backbones that follow the clients' rewards (paper 002, "Adaptive model selection strategy", Fig. 11).

    The paper only says: "based on the hardware constraints and then based on the reward accumulation". The rest is our
    choice: every few rounds, clients are ranked by their mean reward of ``selection: UCB``. The top third steps in one
    direction, the bottom third in the other; a step up needs hardware that allows it. A client that switches gets the
    current global model of the new architecture and a new embedding. It keeps its classifier, whose input has the same
    width.
    """

    ladder: list[Backbone | nn.Module]
    """backbones from the smallest to the largest; the clients' first ones, ``model.backbone`` and
    ``model.clients.NAME.backbone``, must be among them"""
    every: int = 5
    """rounds between two rankings"""
    share: float = 1 / 3
    """share of the clients that may step up, and share that steps down"""
    rewarded: Literal["up", "down"] = "up"
    """direction in which clients with many rewards step. ``up``: to a larger backbone. ``down``: to a smaller one, as
    in Fig. 11, where two clients with much data leave the largest backbone; clients with few rewards then step up"""
    caps: dict[str, int] = field(default_factory=dict)
    """client -> highest rung that its hardware allows, from 1; other clients have no limit"""

    def __post_init__(self) -> None:
        """Check the ranges."""
        if len(self.ladder) < 2:
            raise ConfigError(f"{_FIELD}.ladder: {len(self.ladder)} backbones leave no choice; give at least 2")
        if len({layout_of(backbone) for backbone in self.ladder}) < len(self.ladder):
            raise ConfigError(f"{_FIELD}.ladder: two backbones are the same; leave one out")
        at_least(_FIELD, 1, every=self.every)
        within(_FIELD, "(0, 0.5]", share=self.share)
        for client, rung in self.caps.items():
            if not 1 <= rung <= len(self.ladder):
                raise ConfigError(f"{_FIELD}.caps.{client}: {rung} is not a rung; choose from 1 to {len(self.ladder)}")


def next_rungs(
    rewards: Mapping[str, float],
    rungs: Mapping[str, int],
    caps: Mapping[str, int],
    share: float,
    rewarded: Literal["up", "down"] = "up",
) -> dict[str, int]:
    """Return the clients' new rungs.

    A client whose reward equals that of the last client of the top or bottom share belongs to the share, unless the two
    shares would overlap: if all rewards are equal, no client moves.

    Args:
        rewards: client -> mean reward, for clients that have been selected; the others stay.
        rungs: client -> 1 (smallest), 2, ...
        caps: client -> its highest rung, for all clients.
        share: of the clients that may step in each direction.
        rewarded: direction in which clients with large rewards step.

    >>> next_rungs({"a": 0.0, "b": 0.5, "c": 1.0}, {"a": 2, "b": 2, "c": 2}, {"a": 3, "b": 3, "c": 3}, share=1 / 3)
    {'a': 1, 'b': 2, 'c': 3}
    """
    count = math.floor(share * len(rewards) + 1e-9)
    if count == 0:
        return dict(rungs)
    rewards = rewards if rewarded == "up" else {client: -reward for client, reward in rewards.items()}
    ranked = sorted(rewards.values())
    low, high = ranked[count - 1], ranked[-count]
    result = dict(rungs)
    for client, reward in rewards.items():
        if low < reward and reward >= high:
            result[client] = max(rungs[client], min(rungs[client] + 1, caps[client]))
        elif reward <= low and reward < high:
            result[client] = max(rungs[client] - 1, 1)
    return result


class BackboneLadder(RoundListener):
    """The rung of each client, equal on all ranks; it changes the architectures in ``parts`` in place.

    Raises:
        ConfigError: if settings contradict each other.
    """

    key = "backbones"

    def __init__(self, settings: AdaptiveBackbones, parts: Parts, selection: Selection) -> None:
        self._settings, self._parts, self._selection = settings, parts, selection
        arch_of = {layout_of(model.network.backbone): arch for arch, model in parts.models.items()}
        self._archs = [arch_of[layout_of(backbone)] for backbone in settings.ladder]
        """names of the ladder's architectures, from the smallest"""
        self._caps = dict.fromkeys(parts.archs, len(self._archs)) | settings.caps
        if not selection.has_rewards:
            raise ConfigError(f"{_FIELD}: needs rewards, which {type(selection).__name__} does not have; use UCB")
        for client, arch in parts.archs.items():
            if arch not in self._archs:
                raise ConfigError(f"{_FIELD}.ladder: lacks the backbone that client {client} begins with; add it")
        known(f"{_FIELD}.caps", settings.caps, list(parts.archs))
        for client, rung in self.rungs.items():
            if rung > self._caps[client]:
                raise ConfigError(f"{_FIELD}.caps.{client}: it begins on rung {rung}; raise its cap, or begin lower")
        models = [parts.models[arch] for arch in self._archs]
        if any(parts.method.payload(parts.server, arch, 0).tables for arch in self._archs):
            name = type(parts.method).__name__
            raise ConfigError(f"{_FIELD}: {name} keeps what a client has sent with its backbone; choose another method")
        if len({model.network.num_features for model in models}) > 1 or not models[0].has_own_heads:
            raise ConfigError(
                f"{_FIELD}: clients must keep their classifiers, on embeddings of equal width; "
                "use a method that does not share the head, and model.neck.kind: linear"
            )

    @property
    def rungs(self) -> dict[str, int]:
        """Client -> its rung, from 1."""
        return {client: self._archs.index(arch) + 1 for client, arch in self._parts.archs.items()}

    def begin(self, round_: int) -> None:
        """Let clients switch in every round that is due."""
        if round_ == 0 or round_ % self._settings.every:
            return
        parts, settings, rewards = self._parts, self._settings, self._selection.mean_rewards()
        moved = False
        for name, rung in next_rungs(rewards, self.rungs, self._caps, settings.share, settings.rewarded).items():
            old, new = parts.archs[name], self._archs[rung - 1]
            if new != old:
                log.info("round %d: client %s changes from %s to %s", round_ + 1, name, old, new)
                client = parts.clients.get(name)  # before its architecture changes: its head has the old place
                parts.archs[name] = new
                moved = True
                if client is not None and name in parts.rank_share.owned_clients:
                    _move(client, parts.models[new], parts.method, parts.server)
                elif client is not None:
                    client.model = parts.models[new]
        if moved and parts.rank_share.machine is not None:
            parts.rank_share.machine.meet()  # else another rank could train a client before its owner has moved it

    def metrics(self, round_: int, clients: Sequence[str]) -> dict[str, float]:  # noqa: ARG002 - a hook's
        """Return the rungs of ``clients``."""
        return {
            metric_name("backbone", client): float(rung) for client, rung in self.rungs.items() if client in clients
        }

    def state_dict(self) -> dict[str, Any]:
        """Return client -> architecture."""
        return dict(self._parts.archs)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`, before the clients' private states, which have the layout of their architecture.

        Raises:
            ConfigError: if the checkpoint's run had no ladder.
        """
        if not state:
            raise ConfigError(OTHER_LADDER)
        for name, arch in state.items():
            self._parts.archs[name] = arch
            if name in self._parts.clients:
                self._parts.clients[name].model = self._parts.models[arch]


def _move(client: Client, model: FlatModel, method: Method, server: Server) -> None:
    """Give a client another architecture, with a new private state; only the classifier is kept."""
    generator = torch_generator(client.seed, client.client_name, "head")
    state, head = model.initial_state(client.num_classes, generator), client.head
    assert head is not None, "heads belong to clients"
    for new, old in zip(model.head_of(state, client.num_classes), head, strict=True):
        new.copy_(old)
    client.model = model
    model.shared.copy_(server.vector(model.arch))  # it still holds the last client's values
    model.flat.private.copy_(model.initial_private)
    client.store_private(state, method.initial_state(model).client)
