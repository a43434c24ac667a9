"""Listeners: choices that any method can be combined with, each a file here and an argument of the federation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from fedsim.training.messages import Report


@dataclass(frozen=True)
class RoundRecord:
    """A round that has been trained: listeners learn from it."""

    round_: int
    """from 0"""
    seed: int
    """of the run"""
    selected: Sequence[str]
    """clients that the server sent the model to"""
    reports: Mapping[str, Report]
    """client -> its report, of the clients whose updates count"""
    weights: Mapping[str, float] = field(default_factory=dict)
    """client -> aggregation weight among all reports, as if all clients had one architecture; for a selection that
    learns, else empty"""
    archs: Mapping[str, str] = field(default_factory=dict)
    """client -> its architecture"""


class RoundListener:
    """What happens around the rounds; every rank does it with the same numbers, and all come to the same."""

    key: ClassVar[str] = ""
    """the name of its state in checkpoints; empty: it has none"""

    def begin(self, round_: int) -> None:
        """Act before round ``round_``, from 0."""

    def observe(self, record: RoundRecord) -> None:
        """Learn from a round."""

    def metrics(self, round_: int, clients: Sequence[str]) -> dict[str, float]:  # noqa: ARG002 - a hook's
        """Return the numbers that are logged after round ``round_``, from 0; of single clients only ``clients``."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state for checkpoints, in plain types."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`; it is empty if the checkpoint has none."""
