"""The price of rounds that do not wait: a count of each client's answers, and of the work in them."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from fedsim.federation.components.clock import Clock
from fedsim.federation.components.listener import RoundListener, RoundRecord

log = logging.getLogger(__name__)


class AnswerCount(RoundListener):
    """Counts the answers of clients that have answered at all, so that its size is theirs, not that of all clients.

    ``clock`` has the shares of the work of a round; ``names`` are all clients.
    """

    key = "answers"

    def __init__(self, clock: Clock, names: Sequence[str]) -> None:
        self._clock, self._names = clock, names
        self.counts: dict[str, int] = {}
        """client -> rounds in which its update counted"""
        self.work: dict[str, float] = {}
        """client -> the sum of the shares of its work with which it answered"""
        self.since = 0
        """the first round that is counted, from 1; 0: none is"""

    def observe(self, record: RoundRecord) -> None:
        """Count the clients whose updates count."""
        self.since = self.since or record.round_ + 1
        for name in record.reports:
            self.counts[name] = self.counts.get(name, 0) + 1
            self.work[name] = self.work.get(name, 0.0) + self._clock.table.work[name]

    def summary(self) -> dict[str, Any]:
        """Return ``answers``: those of the client that has done the least work, and of the client in the middle.

        Where all answers are whole, the least work is the fewest answers. ``work`` is the mean share of an answer.
        """
        if not self.since:
            return {}
        least, counts = self._least(), self.counts.values()
        count, silent = self.counts.get(least, 0), len(self._names) - len(counts)
        work = round(self.work[least] / count, 6) if count else 0.0
        answers = {
            "least": {"client": least, "answers": count, "work": work},
            # where most of many clients are silent, their zeros need no list
            "median": 0.0 if silent > len(counts) else float(statistics.median([*[0] * silent, *counts])),
            "most": max(counts, default=0),
            "total": sum(counts),
            "since": self.since,
        }
        return {self.key: answers}

    def _least(self) -> str:
        if len(self.counts) < len(self._names):
            return next(name for name in self._names if name not in self.counts)
        return min(self._names, key=lambda name: (self.work[name], self.counts[name]))

    def state_dict(self) -> dict[str, Any]:
        """Return the counts in texts, which take a fraction of the time and memory of dictionaries."""
        return {
            "clients": "\n".join(self.counts),
            "counts": " ".join(map(str, self.counts.values())),
            "work": " ".join(map(repr, self.work.values())),
            "since": self.since,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint; one without counts begins at 0."""
        self.counts, self.work, self.since = {}, {}, 0
        if not state:
            log.warning("the checkpoint has no answers of clients: their count begins here")
            return
        names = state["clients"].split("\n") if state["clients"] else []
        self.counts = dict(zip(names, map(int, state["counts"].split()), strict=True))
        self.work = dict(zip(names, map(float, state["work"].split()), strict=True))
        self.since = int(state["since"])
