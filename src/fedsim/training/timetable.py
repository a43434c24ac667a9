"""The course of a round, computed before it trains."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Timetable:
    """Clients that are called in a round, those that answer, and their models: the same on every rank."""

    called: Sequence[str]
    """clients to which the server sends its model"""
    work: Mapping[str, float]
    """client -> share of its local work that it completes, of the clients that answer in this round"""
    versions: Mapping[str, int] = field(default_factory=dict)
    """client -> the round with whose first model it trains; a missing one trains with that of this round"""
    too_old: Sequence[str] = ()
    """clients whose answers arrive, but do not count; they are not trained"""
    late: int = 0
    """clients that were called, but would answer after the end of the round, which does not wait for them"""
    kept: Collection[int] = ()
    """rounds, up to this one, on whose first models clients may train after it; so these are kept"""
    seconds: float | None = None
    """simulated duration of the round; None: it ends with its slowest client"""

    @property
    def answering(self) -> list[str]:
        """The clients that train and answer."""
        return list(self.work)
