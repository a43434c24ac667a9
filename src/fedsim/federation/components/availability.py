"""Clients that fail or are slow: a component, usable with every method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedsim.core.checks import within
from fedsim.core.errors import ConfigError
from fedsim.core.seeding import numpy_generator


@dataclass(frozen=True, kw_only=True)
class Availability:
    """Clients that fail or are slow, drawn anew for each client and round."""

    drop: float = 0.0
    """probability that a selected client never answers: it neither trains nor counts"""
    straggle: float = 0.0
    """probability that a client is slow and sends what it has"""
    straggler_work: float = 0.5
    """share of its batches that a slow client gets done (at least one)"""

    def __post_init__(self) -> None:
        """Check the ranges."""
        where, straggler_work = "model.availability", self.straggler_work
        within(where, "[0, 1]", drop=self.drop, straggle=self.straggle, straggler_work=straggler_work)
        if self.straggler_work == 0:
            raise ConfigError("model.availability.straggler_work: 0 would be a drop-out; set drop instead")

    def of(self, clients: Sequence[str], round_: int, seed: int) -> dict[str, float]:
        """Return client -> the share of its local work that it gets done: 0 (dropped), ``straggler_work`` or 1."""
        work = dict.fromkeys(clients, 1.0)
        for client in clients if self.drop or self.straggle else ():
            dropped, slow = numpy_generator(seed, round_, client, "availability").random(2)
            if dropped < self.drop:
                work[client] = 0.0
            elif slow < self.straggle:
                work[client] = self.straggler_work
        return work
