"""Backbones that follow the clients' rewards: the adaptive model selection of paper 002."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from fedsim.core.errors import ConfigError
from fedsim.core.seeding import torch_generator
from fedsim.federation.assembly import layout_of
from fedsim.federation.selection import Selection
from fedsim.methods.base import Method
from fedsim.models.backbones import Backbone
from fedsim.training.client import Client
from fedsim.training.flat_model import Resident
from fedsim.training.server import Server

__all__ = ["AdaptiveBackbones", "BackboneLadder", "next_rungs"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class AdaptiveBackbones:
    """Clients with many rewards step up to a larger backbone, clients with few step down (paper 002, Fig. 11).

    The paper has the rule in words alone: "based on the hardware constraints and then based on the reward
    accumulation". All else is ours: every few rounds clients are ranked by their mean reward of ``selection: UCB``, the
    top third steps up, as far as its hardware allows, the bottom third down. Whoever switches gets the current global
    model of the new architecture and a new embedding, and keeps its classifier, whose input has the same width.
    """

    ladder: list[Backbone | nn.Module]
    """backbones from the smallest to the largest; ``model.backbone`` and ``model.clients.NAME.backbone``, where clients
    begin, must be among them"""
    every: int = 5
    """rounds from one time to the next"""
    share: float = 1 / 3
    """of the clients that may step up, and of those that step down"""
    caps: dict[str, int] = field(default_factory=dict)
    """client -> the highest rung that its hardware allows, from 1; others may reach the top"""

    def __post_init__(self) -> None:
        """Check the ranges."""
        where = "model.adaptive_backbones"
        if len(self.ladder) < 2:
            raise ConfigError(f"{where}.ladder: {len(self.ladder)} backbones leave no choice; give at least 2")
        if len({layout_of(backbone) for backbone in self.ladder}) < len(self.ladder):
            raise ConfigError(f"{where}.ladder: two backbones are the same; leave one out")
        if self.every < 1:
            raise ConfigError(f"{where}.every: {self.every} is less than 1")
        if not 0 < self.share <= 0.5:
            raise ConfigError(f"{where}.share: {self.share} is not in (0, 0.5]")
        for client, rung in self.caps.items():
            if not 1 <= rung <= len(self.ladder):
                raise ConfigError(f"{where}.caps.{client}: {rung} is no rung; they are 1 to {len(self.ladder)}")


def next_rungs(
    rewards: Mapping[str, float], rungs: Mapping[str, int], caps: Mapping[str, int], share: float
) -> dict[str, int]:
    """Return where clients stand after their rewards have been compared.

    Who ties with the last of the top or bottom share belongs to it, unless the two meet: equal rewards move nobody.

    Args:
        rewards: client -> mean reward, of those that have been selected; the others stay.
        rungs: client -> 1 (smallest), 2, ...
        caps: client -> its highest rung; all clients.
        share: of the clients, for each direction.

    >>> next_rungs({"a": 0.0, "b": 0.5, "c": 1.0}, {"a": 2, "b": 2, "c": 2}, {"a": 3, "b": 3, "c": 3}, share=1 / 3)
    {'a': 1, 'b': 2, 'c': 3}
    """
    count = math.floor(share * len(rewards) + 1e-9)
    if count == 0:
        return dict(rungs)
    ranked = sorted(rewards.values())
    low, high = ranked[count - 1], ranked[-count]
    result = dict(rungs)
    for client, reward in rewards.items():
        if low < reward and reward >= high:
            result[client] = max(rungs[client], min(rungs[client] + 1, caps[client]))
        elif reward <= low and reward < high:
            result[client] = max(rungs[client] - 1, 1)
    return result


class BackboneLadder:
    """Which client stands on which rung, alike on all ranks.

    Args:
        settings: of the run; None: nobody ever moves.
        residents: architecture -> model, with those of the ladder.
        archs: client -> architecture; shared with whoever must know, and changed in place.
        selection: whose rewards count.

    Raises:
        ConfigError: if settings do not go together.
    """

    def __init__(
        self,
        settings: AdaptiveBackbones | None,
        residents: Mapping[str, Resident],
        archs: dict[str, str],
        selection: Selection,
    ) -> None:
        self._settings, self._residents, self._archs, self._selection = settings, residents, archs, selection
        self._ladder: list[str] = []
        if settings is not None:
            of_layout = {layout_of(resident.model.backbone): arch for arch, resident in residents.items()}
            self._ladder = [of_layout[layout_of(backbone)] for backbone in settings.ladder]
            self._caps = dict.fromkeys(archs, len(self._ladder)) | settings.caps
            self._check(settings)

    def _check(self, settings: AdaptiveBackbones) -> None:
        where = "model.adaptive_backbones"
        if not self._selection.learns:
            raise ConfigError(f"{where}: needs rewards, which {type(self._selection).__name__} has not; use UCB")
        for client, arch in self._archs.items():
            if arch not in self._ladder:
                raise ConfigError(f"{where}.ladder: lacks the backbone that client {client} begins with; add it")
        for client in settings.caps:
            if client not in self._archs:
                raise ConfigError(f"{where}.caps: there is no client {client}; choose from {', '.join(self._archs)}")
        for client, rung in self.rungs.items():
            if rung > self._caps[client]:
                raise ConfigError(f"{where}.caps.{client}: it begins on rung {rung}; raise its cap, or begin lower")
        resident = self._residents[self._ladder[0]]
        if len({self._residents[arch].model.num_features for arch in self._ladder}) > 1 or not resident.has_own_heads:
            raise ConfigError(
                f"{where}: classifiers must be the clients' own, on embeddings of equal width; "
                "use a method that does not share the head, and model.neck.kind: linear"
            )

    @property
    def rungs(self) -> dict[str, int]:
        """Client -> its rung, from 1; empty without a ladder."""
        return {c: self._ladder.index(arch) + 1 for c, arch in self._archs.items()} if self._ladder else {}

    def adapt(self, server: Server, method: Method, clients: Mapping[str, Client]) -> None:
        """Let clients switch before the round ``server.round``, if it is time.

        Args:
            server: whose counts of clients by architecture are kept.
            method: says what clients remember from the start; what they remember by now has the old layout.
            clients: hosted by this rank.
        """
        settings, round_ = self._settings, server.round
        if settings is None or round_ == 0 or round_ % settings.every:
            return
        before = self.rungs
        after = next_rungs(self._selection.mean_rewards(), before, self._caps, settings.share)
        for name in (name for name in before if after[name] != before[name]):
            old, new = self._archs[name], self._ladder[after[name] - 1]
            log.info("round %d: client %s changes from %s to %s", round_ + 1, name, old, new)
            self._archs[name] = new
            server.num_clients[old] -= 1
            server.num_clients[new] += 1
            if name in clients:
                _move(clients[name], self._residents[new], method, server)

    # -- what people see, and checkpoints ------------------------------------------------------------------------------

    def metrics(self, clients: Sequence[str]) -> dict[str, float]:
        """Return the rungs of ``clients``."""
        return {f"backbone/{client}": float(rung) for client, rung in self.rungs.items() if client in clients}

    def state_dict(self) -> dict[str, Any]:
        """Return client -> architecture, of a ladder."""
        return dict(self._archs) if self._ladder else {}

    def load_state_dict(self, state: Mapping[str, str], server: Server, clients: Mapping[str, Client]) -> None:
        """Restore :meth:`state_dict`, before the clients' private states, which have the layout of their architecture.

        Raises:
            ConfigError: if the checkpoint's clients have moved, and these cannot, or the other way round.
        """
        if bool(state) != bool(self._ladder):
            raise ConfigError("ckpt_path: model.adaptive_backbones is not that of the run that wrote the checkpoint")
        self._archs.update(state)
        for name, arch in state.items():
            if name in clients:
                clients[name].resident = self._residents[arch]
        if state:
            server.num_clients.clear()
            server.num_clients.update(self._archs.values())


def _move(client: Client, resident: Resident, method: Method, server: Server) -> None:
    """Give a client another architecture: its private state starts anew, but for the classifier."""
    generator = torch_generator(client.seed, client.client_name, "head")
    state, head = resident.initial_state(client.num_classes, generator), client.head
    assert head is not None, "heads belong to clients"
    for new, old in zip(resident.head_of(state, client.num_classes), head, strict=True):
        new.copy_(old)
    client.resident = resident
    resident.flat.shared.copy_(server.model(resident.arch))  # what it holds is of the last client that was seated
    resident.flat.private.copy_(resident.initial_private)
    kept = {f"kept.{name}": tensor for name, tensor in method.initial_kept(resident).items()}
    client.load_private_state({"state": state, **kept})
