"""The simulated time of a run: calls and answers of clients, and their times.

The durations of sessions follow from ``model.hardware``, never from a measurement. So the answers of a round and their
times are known before it trains, and are the same on every machine. A round is one step of the server.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from fedsim.core.errors import ConfigError, DataError
from fedsim.federation.components.hardware import Hardware
from fedsim.federation.components.ledger import Ledger
from fedsim.federation.components.listener import RoundListener, RoundRecord
from fedsim.federation.components.privacy import Privacy
from fedsim.federation.components.robust import Aggregation
from fedsim.federation.components.selection import Availability, Selection
from fedsim.federation.components.window import ClockState, Job, Outcome, Rules, next_window
from fedsim.methods.base import Method, Weights
from fedsim.training.old_models import OldModels
from fedsim.training.server import Server
from fedsim.training.statistics import BatchNormStatistics
from fedsim.training.timetable import Timetable

FIELD = "model.timing"
NANO = 10**9
"""nanoseconds of a second"""


@dataclass(frozen=True, kw_only=True)
class ClockInputs:
    """The parts of a federation that a clock works with."""

    names: Sequence[str]
    """all clients"""
    costs: Mapping[str, float]
    """client -> images of a session, over all local epochs"""
    method: Method
    """the federated method"""
    selection: Selection
    """chooses clients"""
    availability: Availability
    """drop-outs and stragglers"""
    hardware: Hardware | None
    """links and devices of the clients"""
    ledger: Ledger
    """knows the bytes of messages"""
    server: Server
    """the current global models"""
    old_models: OldModels
    """earlier ones"""
    statistics: Mapping[str, BatchNormStatistics]
    """architecture -> the treatment of its running statistics"""
    aggregation: Aggregation | None
    """a robust rule"""
    privacy: Privacy | None
    """noise"""
    has_ladder: bool
    """whether clients change their backbones"""
    seed: int
    """of the run"""

    def select(self, round_: int) -> list[str]:
        """Return the clients that the selection picks for a round."""
        return self.selection.select(round_, self.names, self.seed)

    def nanoseconds(self, client: str, round_: int, work: float = 1.0) -> int:
        """Return the time from a client's call in round ``round_`` to its answer, with a share of its local work.

        Messages count with the bytes of whole models: what a client prunes is not known before it has trained.
        """
        assert self.hardware is not None
        traffic = self.ledger.expected(round_, [client])[client]
        return round(NANO * self.hardware.seconds(client, traffic.received, work * self.costs[client], traffic.sent))


class Clock(RoundListener, ABC):
    """The simulated time of a run; every rank computes the same, without a message."""

    key = "timing"

    def __init__(self, inputs: ClockInputs) -> None:
        self.inputs = inputs
        self.moment = ClockState()
        """the time between the last round and the next"""
        self._next = self.moment
        self.table = Timetable((), {})
        """of the current round, or of the last one"""

    def plan(self, round_: int) -> Timetable:
        """Return the timetable of round ``round_``, from 0, which follows the last observed one."""
        self.table, self._next = self.timetable(round_, self.moment)
        return self.table

    @abstractmethod
    def timetable(self, round_: int, moment: ClockState) -> tuple[Timetable, ClockState]:
        """Return the timetable of a round that begins at ``moment``, and the moment of its end."""

    def timetables(self, rounds: int) -> Iterator[Timetable]:
        """Yield the timetables of a whole run, before it."""
        moment = ClockState()
        for round_ in range(rounds):
            table, moment = self.timetable(round_, moment)
            yield table

    def discounted_weights(self, weights: Mapping[str, Weights], table: Timetable) -> dict[str, Weights]:  # noqa: ARG002 - for subclasses
        """Return the weights, by architecture, with less for answers that began with older models."""
        return dict(weights)

    def rebased_means(
        self,
        means: Mapping[str, Tensor],
        weights: Mapping[str, Weights],  # noqa: ARG002 - for subclasses
        table: Timetable,  # noqa: ARG002 - for subclasses
    ) -> Mapping[str, Tensor]:
        """Return the means, by architecture, as if answers to older models had been trained on the current one."""
        return means

    def observe(self, record: RoundRecord) -> None:  # noqa: ARG002 - a hook's
        """Go on to the end of the round."""
        self.moment = self._next

    def metrics(self, round_: int, clients: Sequence[str]) -> dict[str, float]:  # noqa: ARG002 - a hook's
        """Return the simulated time since the run began, and how many clients the round did not wait for."""
        return {"time/clock": self.moment.clock / NANO, "timing/late": float(self.table.late)}

    def state_dict(self) -> dict[str, Any]:
        """Return the time, and the clients under way."""
        jobs = self.moment.under_way
        return {
            "clock": self.moment.clock,
            "calls": self.moment.calls,
            "due": {job.client: job.due for job in jobs},
            "number": {job.client: job.number for job in jobs},
            "version": {job.client: job.version for job in jobs},
            "settings": dict(self.settings) if jobs else {},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint; one of an earlier version has no clock, and begins a new one, or no settings.

        Raises:
            ConfigError: if clients are under way there, and the clock has other settings.
            DataError: if the state contradicts itself.
        """
        state = state or {"clock": 0, "calls": 0, "due": {}, "number": {}, "version": {}}
        due, number, version = state["due"], state["number"], state["version"]
        if not due.keys() == number.keys() == version.keys() <= set(self.inputs.names):
            raise DataError(
                "ckpt_path: its clients under way contradict each other or this run; copy the checkpoint again"
            )
        jobs = sorted(Job(int(due[name]), int(number[name]), name, int(version[name])) for name in due)
        if jobs:
            self._check_jobs(jobs, state.get("settings", {}))
        self.moment = ClockState(int(state["clock"]), int(state["calls"]), tuple(jobs))

    def old_rounds(self, round_: int) -> set[int]:  # noqa: ARG002 - for subclasses
        """Return the earlier rounds on whose models clients will train from round ``round_`` on."""
        return set()

    @property
    def settings(self) -> Mapping[str, float]:
        """The settings, by their names, with which clients under way must go on; a missing one is null."""
        return {}

    def _check_jobs(self, jobs: Sequence[Job], settings: Mapping[str, float]) -> None:  # noqa: ARG002 - for subclasses
        """Refuse clients that are under way in a checkpoint; ``settings`` are those with which they were called."""
        raise ConfigError(
            f"ckpt_path: {len(jobs)} clients are under way in the checkpoint, as with {FIELD}: Buffered; use the "
            "timing of the run that wrote it"
        )


class SynchronousClock(Clock):
    """Waits for every client; the ledger computes the seconds, from the images that clients have trained on.

    It does not wait for clients that drop out, after their download.
    """

    def timetable(self, round_: int, moment: ClockState) -> tuple[Timetable, ClockState]:
        """Return the selected clients, without those that do not answer."""
        selected = self.inputs.select(round_)
        work = self.inputs.availability.of(selected, round_, self.inputs.seed)
        return Timetable(list(work), {name: share for name, share in work.items() if share > 0}), moment

    def observe(self, record: RoundRecord) -> None:  # noqa: ARG002 - a hook's
        """Add the round's seconds, if there is hardware: the run may go on with another timing."""
        seconds = self.inputs.ledger.seconds  # of this round: the ledger observes before the clock
        self.moment = replace(self.moment, clock=self.moment.clock + round(NANO * (seconds or 0.0)))

    def metrics(self, round_: int, clients: Sequence[str]) -> dict[str, float]:  # noqa: ARG002 - a hook's
        """Return nothing: no client is late."""
        return {}


class DeadlineClock(Clock):
    """Waits until a time, or for the first answers; see :class:`~fedsim.federation.components.timing.Deadline`."""

    def __init__(self, inputs: ClockInputs, end: int | None, first: int | None, partial: bool) -> None:
        super().__init__(inputs)
        self._end, self._first, self._partial = end, first, partial

    def timetable(self, round_: int, moment: ClockState) -> tuple[Timetable, ClockState]:
        """Return the selected clients; those that answer in time have work."""
        inputs = self.inputs
        selected = inputs.select(round_)
        shares = inputs.availability.of(selected, round_, inputs.seed)
        sessions = {name: self._session(name, round_, shares[name] or 1.0) for name in selected}

        def duration(client: str, called: int) -> int:  # noqa: ARG001 - a rule's
            return sessions[client][1]

        def outcome(job: Job, due: int) -> Outcome:  # noqa: ARG001 - a rule's
            return "answers" if shares[job.client] else "fails"

        def choose(busy: Set[str], number: int, called: int, among: int) -> list[str]:  # noqa: ARG001 - a rule's
            return selected

        rules = Rules(
            places=len(selected), goal=self._first or len(selected), duration=duration, choose=choose,
            outcome=outcome, refills=False, deadline=self._end,
        )  # fmt: skip
        window = next_window(round_, moment, rules)
        answered = {job.client for job in window.answers}
        work = {name: sessions[name][0] for name in selected if name in answered}
        late = sum(shares[job.client] > 0 for job in window.after.under_way)
        # late clients throw their work away: none is under way when the next round begins
        after = ClockState(window.after.clock, window.after.calls)
        return Timetable(selected, work, late=late, seconds=(after.clock - moment.clock) / NANO), after

    def _session(self, client: str, round_: int, work: float) -> tuple[float, int]:
        """Return the share of its work that a client completes, and its nanoseconds."""
        whole, end = self.inputs.nanoseconds(client, round_, work), self._end
        if not self._partial or end is None or whole <= end:
            return work, whole
        messages = self.inputs.nanoseconds(client, round_, 0.0)
        if messages >= end:
            return work, whole
        return work * (end - messages) / (whole - messages), end
