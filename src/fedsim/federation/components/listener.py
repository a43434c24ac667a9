"""Round listeners: components for any method; each is a file here and an argument of the federation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedsim.training.messages import Report


@dataclass(frozen=True)
class RoundRecord:
    """The outcome of a round, for listeners."""

    round_: int
    """from 0"""
    seed: int
    """of the run"""
    selected: Sequence[str]
    """clients to which the server sent the model in this round"""
    reports: Mapping[str, Report]
    """client -> its report, of the clients whose updates count"""
    weights: Mapping[str, float] = field(default_factory=dict)
    """client -> aggregation weight among all reports, as if all clients had one architecture; empty if the selection
    does not learn"""
    archs: Mapping[str, str] = field(default_factory=dict)
    """client -> its architecture"""
    too_old: Sequence[str] = ()
    """clients whose answers arrived, but did not count"""
    seconds: float | None = None
    """simulated duration; None: that of the slowest client"""


class RoundListener:
    """Acts before and after rounds; every rank calls it with the same numbers, and all get the same result."""

    key = ""  # without a type, as in methods: the parser would not see those of a dataclass's settings
    """name of its state in checkpoints; empty: it has no state"""

    def begin(self, round_: int) -> None:
        """Act before round ``round_``, from 0."""

    def observe(self, record: RoundRecord) -> None:
        """Update the state with the outcome of a round."""

    def metrics(self, round_: int, clients: Sequence[str]) -> dict[str, float]:  # noqa: ARG002 - a hook's
        """Return the numbers that are logged after round ``round_``, from 0; of clients, only of ``clients``."""
        return {}

    def summary(self) -> dict[str, Any]:
        """Return entries of ``summary.json`` about the rounds so far, by name."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state for checkpoints, in plain types."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`; ``state`` is empty if the checkpoint has none."""
