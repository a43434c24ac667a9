"""Who trains whom in a round: large clients have several ranks, the others go to the rank that asks first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from fedsim.federation.components.listener import RoundListener, RoundRecord
from fedsim.federation.scheduling.plan import Task, make_plan
from fedsim.strategy.machine import Machine
from fedsim.strategy.rank_group import RankGroup


@dataclass(frozen=True)
class Orders:
    """What this rank has to do in a round."""

    rank_groups: Sequence[tuple[str, RankGroup]] = ()
    """clients that it trains together with other ranks, first of all and in this order"""
    others: Sequence[str] = ()
    """clients that ranks of the machine take one by one, the most expensive first"""
    all: list[str] = field(default_factory=list)
    """these, and the clients that groups of other ranks train"""


class RoundScheduler(RoundListener):
    """Deals the clients of a round to ranks, by their expected seconds; these come from the rounds before.

    Ranks share a client that would let the others wait, if its batches are cut into micro-batches; see
    :func:`~fedsim.federation.scheduling.plan.make_plan`. The rest is list scheduling, the longest first (Graham 1969).
    Neither changes a bit of the results, because sums are exact.

    Args:
        costs: client -> images times local epochs.
        micro_batches: client -> micro-batches.
        clients: those that this rank may train.
        machine: the ranks that share them; None: this rank has them for itself, and keeps their order.
    """

    def __init__(
        self,
        costs: Mapping[str, float],
        micro_batches: Mapping[str, int],
        clients: Sequence[str],
        machine: Machine | None,
    ) -> None:
        self._costs, self._micro_batches, self._clients, self._machine = (
            costs,
            micro_batches,
            frozenset(clients),
            machine,
        )
        self._seconds: dict[str, float] = {}
        """client -> seconds for a training image on one rank, measured in its last session"""
        self._sizes: dict[str, int] = {}
        """client -> number of ranks in this round, if there are several"""

    def orders(self, called: Sequence[str], work: Mapping[str, float]) -> Orders:
        """Return this rank's orders for a round, of the clients ``called``; all ranks of a machine make the same plan.

        ``work``: client -> share of its work that gets done.
        """
        here = [name for name in called if name in self._clients]
        if self._machine is None:
            return Orders(others=here, all=here)
        usual = fmean(self._seconds.values()) if self._seconds else 1.0
        expected = {name: work[name] * self._costs[name] * self._seconds.get(name, usual) for name in here}
        tasks = [Task(name, expected[name], self._micro_batches[name]) for name in here]
        machine, plan = self._machine, make_plan(tasks, len(self._machine.ranks))
        self._sizes = {name: len(ranks) for name, ranks in plan.rank_groups}
        rank_groups = [(name, machine.rank_group(ranks)) for name, ranks in plan.rank_groups if machine.place in ranks]
        return Orders(rank_groups, plan.rest, sorted(here, key=lambda name: -expected[name]))

    def turns(self, orders: Orders) -> Iterator[tuple[str, RankGroup | None]]:
        """Yield the clients that this rank trains, and the rank group of those that it trains with others."""
        yield from orders.rank_groups
        alone = orders.others if self._machine is None else self._machine.queue(orders.others)
        for name in alone:
            yield name, None

    def observe(self, record: RoundRecord) -> None:
        """Learn how long sessions take."""
        if self._machine is None:
            return
        for name, report in record.reports.items():
            if report.images:
                task = Task(name, 1.0, self._micro_batches[name])
                self._seconds[name] = report.seconds / report.images / task.on(self._sizes.get(name, 1))
