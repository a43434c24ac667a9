"""Assignment of clients to ranks in a round: large clients get several ranks, the others the first free rank."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from fedsim.federation.components.listener import RoundListener, RoundRecord
from fedsim.federation.scheduling.plan import Measured, RoundPlan, Task, current, make_plan, verdict
from fedsim.strategy.machine import Machine
from fedsim.strategy.rank_group import RankGroup

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Orders:
    """The work of this rank in a round."""

    rank_groups: Sequence[tuple[str, RankGroup]] = ()
    """clients that it trains together with other ranks, before all others and in this order"""
    others: Sequence[str] = ()
    """clients that ranks of the machine take one by one, the most expensive first"""
    all: list[str] = field(default_factory=list)
    """all clients of the round that ranks of the machine train"""


class RoundScheduler(RoundListener):
    """Assigns the clients of a round to ranks by their expected seconds, which are measured in earlier rounds.

    The gain of several ranks is assumed until it is measured, for each number of ranks by itself. So a client that
    several ranks have trained has its next session on one rank, once: from then on it gets several only if they are
    faster. A number of ranks that is not used is tried again after some sessions, see
    :func:`~fedsim.federation.scheduling.plan.current`. Sessions with the costs of a beginning measure no gain: the
    first round compiles networks and chooses kernels, and the first session of a rank group connects its ranks.

    Ranks share a client for which the others would wait, if its batches are split into micro-batches; see
    :func:`~fedsim.federation.scheduling.plan.make_plan`. The other clients follow list scheduling, the longest first
    (Graham 1969). Neither changes a bit of the results, because sums are exact.

    Args:
        costs: client -> images times local epochs.
        micro_batches: client -> micro-batches of a batch.
        clients: for each machine of the run, the clients that its ranks may train.
        machine: the ranks that share this rank's clients; None: ``clients`` has one list, and only this rank trains
            them, in their order.
    """

    def __init__(
        self,
        costs: Mapping[str, float],
        micro_batches: Mapping[str, int],
        clients: Sequence[Sequence[str]],
        machine: Machine | None,
    ) -> None:
        self._costs, self._micro_batches, self._machine = costs, micro_batches, machine
        self._clients = [frozenset(names) for names in clients]
        self._measured: dict[str, dict[int, Measured]] = {}
        """client -> number of ranks -> its last session on so many"""
        self._sessions: Counter[str] = Counter()
        """client -> number of its sessions so far"""
        self._tried: set[str] = set()
        """clients of which one rank and several have been compared anew, for a line of the log"""
        self._guessed: dict[str, float] = {}
        """client -> seconds per training image on one rank, from a session with the costs of a beginning"""
        self._sizes: dict[str, int] = {}
        """client -> number of its ranks in this round, if there are several"""
        self._begins: frozenset[str] = frozenset()
        """clients whose sessions in this round have the costs of a beginning"""
        self._connected: set[tuple[int, range]] | None = None
        """machine and ranks of the rank groups that have trained a client; None: no round has begun"""

    def orders(self, called: Sequence[str], work: Mapping[str, float]) -> Orders:
        """Return this rank's orders for a round with the clients ``called``; all ranks of the run call it together.

        Every rank plans for all machines: all ranks open a rank group together. ``work``: client -> share of its local
        work that it completes.
        """
        if self._machine is None:
            local = [name for name in called if name in self._clients[0]]
            return Orders(others=local, all=local)
        tasks = self._tasks(called, work)
        plans = [
            make_plan([tasks[name] for name in called if name in clients], len(self._machine.ranks))
            for clients in self._clients
        ]
        machine, plan = self._machine, plans[self._machine.number]
        machine.open_rank_groups([[ranks for _, ranks in of_machine.rank_groups] for of_machine in plans])
        self._note_beginnings(called, plans)
        self._sizes = {name: len(ranks) for of_machine in plans for name, ranks in of_machine.rank_groups}
        for name in [name for name in called if name in self._tried]:
            log.info(verdict(tasks[name], self._sizes.get(name, 1)))
            self._tried.remove(name)
        rank_groups = [(name, machine.rank_group(ranks)) for name, ranks in plan.rank_groups if machine.place in ranks]
        local = [name for name in called if name in self._clients[machine.number]]
        return Orders(rank_groups, plan.rest, sorted(local, key=lambda name: -tasks[name].on(1)))

    def _note_beginnings(self, called: Sequence[str], plans: Sequence[RoundPlan]) -> None:
        """Note which sessions of a round cost more than later ones; ``plans``: of each machine."""
        connected = self._connected or set()
        groups = {name: (i, ranks) for i, of_machine in enumerate(plans) for name, ranks in of_machine.rank_groups}
        new = {name for name, group in groups.items() if group not in connected}
        self._begins = frozenset(called if self._connected is None else new)
        self._connected = connected | set(groups.values())

    def _tasks(self, called: Sequence[str], work: Mapping[str, float]) -> dict[str, Task]:
        """Return the work of a round's clients, with the seconds that earlier rounds have taken."""
        rates = self._guessed | {name: self._rate(name) for name in self._measured}  # seconds per image on one rank
        usual = fmean(rates.values()) if rates else 1.0
        tasks = {}
        for name in called:
            images, measured = work[name] * self._costs[name], self._current(name)
            is_trial = bool(measured) and 1 not in measured  # on one rank, which is not known yet
            tasks[name] = Task(
                name,
                images * rates.get(name, usual),
                1 if is_trial else self._micro_batches[name],
                {} if is_trial else {ranks: images * seconds for ranks, seconds in measured.items()},
            )
        return tasks

    def _rate(self, name: str) -> float:
        """Return a measured client's seconds per image on one rank; before its trial, as if sums took no time."""
        measured = self._measured[name]
        if 1 in measured:
            return measured[1].seconds
        ranks = min(measured)
        return measured[ranks].seconds / Task(name, 1.0, self._micro_batches[name]).shared_by(ranks)

    def _current(self, name: str) -> dict[int, float]:
        """Return the seconds per image that still count, on each number of ranks."""
        return current(self._measured.get(name, {}), self._sessions[name])

    def turns(self, orders: Orders) -> Iterator[tuple[str, RankGroup | None]]:
        """Yield the clients that this rank trains, each with its rank group, or None."""
        for name, rank_group in orders.rank_groups:
            rank_group.meet()  # a rank may still train another client, for hours
            yield name, rank_group
        single = orders.others if self._machine is None else self._machine.queue(orders.others)
        for name in single:
            yield name, None

    def observe(self, record: RoundRecord) -> None:
        """Update the seconds per image from the durations of the sessions."""
        if self._machine is None:
            return
        for name, report in record.reports.items():
            if not report.images:
                continue
            self._sessions[name] += 1
            size, seconds = self._sizes.get(name, 1), report.seconds / report.images
            if name in self._begins:
                self._guessed[name] = seconds / Task(name, 1.0, self._micro_batches[name]).shared_by(size)
            else:
                is_new = size not in self._current(name)
                self._measured.setdefault(name, {})[size] = Measured(seconds, self._sessions[name])
                compared = self._current(name)
                if is_new and 1 in compared and len(compared) > 1:
                    self._tried.add(name)
