"""Assign several ranks to large clients, so that the round ends sooner: pure functions of predicted times."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fedsim.core.names import printable

GAIN = 0.95
"""A plan with rank groups is used if its predicted time is at most this share of the time without: sums among ranks
cost time, too."""

AGAIN = 20
"""sessions of a client after which a number of ranks that it does not use is tried again"""


class Measured(NamedTuple):
    """A session of a client on some number of ranks."""

    seconds: float
    """per training image"""
    session: int
    """which of the client's sessions it was, counted from 1"""


def current(measured: Mapping[int, Measured], sessions: int) -> dict[int, float]:
    """Return the seconds on each number of ranks that still count, after so many sessions of the client.

    A single measurement is noisy, and nothing corrects that of a number of ranks that is not used. So it is forgotten
    after :data:`AGAIN` sessions, and as many times later as it was slower than the newest one: a new trial then takes
    at most a twentieth of the time.

    >>> [current({4: Measured(1.0, 3), 1: Measured(2.0, last)}, last) for last in (22, 44)]
    [{4: 1.0, 1: 2.0}, {1: 2.0}]
    """
    if not measured:
        return {}
    newest = max(measured.values(), key=lambda measurement: measurement.session)
    return {
        ranks: measurement.seconds
        for ranks, measurement in measured.items()
        if sessions - measurement.session <= AGAIN * max(1.0, measurement.seconds / newest.seconds)
    }


def verdict(task: Task, ranks: int) -> str:
    """Return the seconds that were measured, and the number of ranks that a plan chose by them.

    >>> verdict(Task("town0", 10, 8, {4: 9.8, 1: 10.0}), 1)
    'town0: 10.0 s on 1 rank, 9.8 s on 4: one rank'
    """
    seconds = [f"{taken:.1f} s on {number}{' rank' * (number == 1)}" for number, taken in sorted(task.measured.items())]
    return f"{printable(task.client)}: {', '.join(seconds)}: {f'{ranks} ranks' if ranks > 1 else 'one rank'}"


@dataclass(frozen=True)
class Task:
    """A client's work in a round."""

    client: str
    seconds: float
    """on one rank, in any unit"""
    micro_batches: int = 1
    """of a batch: at most so many ranks can share the client"""
    measured: Mapping[int, float] = field(default_factory=dict)
    """number of ranks -> seconds of an earlier round on so many"""

    def on(self, ranks: int) -> float:
        """Return the seconds on several ranks: measured ones, else those of :meth:`shared_by` and of the sums.

        The sums among ranks are assumed to take as long as on the measured number of ranks that is nearest.
        """
        if ranks in self.measured:
            return self.measured[ranks]
        group_sizes = [number for number in self.measured if number > 1]
        if ranks == 1 or not group_sizes:
            return self.shared_by(ranks)
        nearest = min(group_sizes, key=lambda number: (abs(number - ranks), number))
        return self.shared_by(ranks) + max(0.0, self.measured[nearest] - self.shared_by(nearest))

    def shared_by(self, ranks: int) -> float:
        """Return the seconds on several ranks without any sums: the busiest has the most micro-batches of a batch."""
        return self.seconds * math.ceil(self.micro_batches / ranks) / self.micro_batches


@dataclass(frozen=True)
class RoundPlan:
    """The work of a machine's ranks in a round: first the rank groups, in this order, then the other clients."""

    rank_groups: Sequence[tuple[str, range]]
    """client, and the ranks that train it together, counted from 0"""
    rest: Sequence[str]
    """the other clients, in the order in which ranks take them; each trains on one rank"""
    seconds: float
    """predicted, of the whole round"""


def blocks(num_ranks: int, size: int) -> list[range]:
    """Return the groups of ``size`` ranks that may share a client: adjacent ranks, so that there are few groups.

    >>> blocks(5, 2)
    [range(0, 2), range(2, 4)]
    """
    return [range(first, first + size) for first in range(0, num_ranks - size + 1, size)]


def make_plan(tasks: Sequence[Task], num_ranks: int) -> RoundPlan:
    """Plan a round: return the fastest of several plans, each with its limit on the time of a client.

    The limits are the times of large clients on 1, 2, ... ranks (moldable tasks; Turek, Wolf and Yu 1992). A client
    gets the fewest ranks that keep it below the limit, if there are enough. Every rank computes the same plan.

    >>> make_plan([Task("large", 8, micro_batches=4), Task("a", 1), Task("b", 1)], num_ranks=2)
    RoundPlan(rank_groups=[('large', range(0, 2))], rest=['a', 'b'], seconds=5.0)
    """
    ordered = sorted(tasks, key=lambda task: -task.seconds)
    whole = _simulated(ordered, {}, num_ranks)
    share = sum(task.seconds for task in tasks) / num_ranks
    large = [task for task in ordered if task.micro_batches > 1 and task.seconds > share / 2]
    times = {
        task.client: {ranks: task.on(ranks) for ranks in range(1, min(num_ranks, task.micro_batches) + 1)}
        for task in large
    }
    plans = []
    for limit in sorted({seconds for of_client in times.values() for seconds in of_client.values()}):
        sizes = {}
        for client, of_client in times.items():
            enough = [ranks for ranks, seconds in of_client.items() if seconds <= limit]
            sizes[client] = min(enough) if enough else min(of_client, key=lambda ranks: (of_client[ranks], ranks))
        plans.append(_simulated(ordered, sizes, num_ranks))
    best = min(plans, key=lambda plan: plan.seconds, default=whole)
    return best if best.seconds <= GAIN * whole.seconds else whole


def _simulated(ordered: Sequence[Task], sizes: dict[str, int], num_ranks: int) -> RoundPlan:
    """Return the plan in which clients get ``sizes`` ranks, one by default; ``ordered``: the most expensive first."""
    free = [0.0] * num_ranks
    rank_groups: list[tuple[str, range]] = []
    shared = [task for task in ordered if sizes.get(task.client, 1) > 1]
    for task in sorted(shared, key=lambda task: -sizes[task.client]):
        size = sizes[task.client]
        # the block that is free first
        block = min(blocks(num_ranks, size), key=lambda ranks: max(free[rank] for rank in ranks))
        end = max(free[rank] for rank in block) + task.on(size)
        for rank in block:
            free[rank] = end
        rank_groups.append((task.client, block))
    single = [task for task in ordered if sizes.get(task.client, 1) == 1]
    heapq.heapify(free)
    for task in single:
        heapq.heapreplace(free, free[0] + task.on(1))
    return RoundPlan(rank_groups, [task.client for task in single], max(free))
