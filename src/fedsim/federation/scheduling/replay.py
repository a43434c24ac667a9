"""The timetables of a run, which are known before it: how long it takes, who answers, and how busy the ranks are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from fedsim.core.placement import Placement
from fedsim.federation.scheduling.plan import Task, make_plan
from fedsim.training.timetable import Timetable


@dataclass(frozen=True)
class Forecast:
    """Numbers of a run."""

    seconds: float
    """simulated"""
    count: Mapping[str, int]
    """client -> number of its answers that count"""
    late: int
    """calls whose answers would come after the end of the round"""
    too_old: int
    """answers that did not count"""
    staleness: Sequence[int]
    """of each answer"""
    old_models: int
    """largest number of earlier rounds whose models are kept at the same time"""
    idle: float
    """share of the time of all ranks in which they wait for others"""

    @property
    def answers(self) -> int:
        """Number of answers that count."""
        return sum(self.count.values())

    @property
    def fewest(self) -> str:
        """The client with the fewest answers."""
        return min(self.count, key=self.count.__getitem__)

    @property
    def most(self) -> str:
        """The client with the most answers."""
        return max(self.count, key=self.count.__getitem__)

    @property
    def mean_staleness(self) -> float:
        """Mean over all answers."""
        return fmean(self.staleness) if self.staleness else 0.0

    @property
    def largest_staleness(self) -> int:
        """Largest of all answers."""
        return max(self.staleness, default=0)


def replay(
    tables: Sequence[Timetable], costs: Mapping[str, float], micro_batches: Mapping[str, int], placement: Placement
) -> Forecast:
    """Count what happens in the rounds of a run.

    Args:
        tables: of its rounds.
        costs: client -> images of a session, for all clients.
        micro_batches: client -> micro-batches of a batch.
        placement: of clients on ranks.
    """
    count = Counter(dict.fromkeys(costs, 0))
    staleness = []
    for round_, table in enumerate(tables):
        count.update(table.answering)
        staleness += [round_ - table.versions.get(name, round_) for name in table.answering]
    return Forecast(
        seconds=sum(table.seconds or 0.0 for table in tables),
        count=count,
        late=sum(table.late for table in tables),
        too_old=sum(len(table.too_old) for table in tables),
        staleness=staleness,
        old_models=_most_kept(tables),
        idle=_idle(tables, costs, micro_batches, placement),
    )


def _most_kept(tables: Sequence[Timetable]) -> int:
    """Return how many old models are kept at most: from the round that they began to their last answer."""
    last_use: dict[int, int] = {}
    for round_, table in enumerate(tables):
        last_use |= dict.fromkeys(table.versions.values(), round_)
    changes: Counter[int] = Counter()
    for began, last in last_use.items():
        if began != last:
            changes[began] += 1
            changes[last + 1] -= 1
    kept = most = 0
    for round_ in sorted(changes):
        kept += changes[round_]
        most = max(most, kept)
    return most


def _idle(
    tables: Sequence[Timetable], costs: Mapping[str, float], micro_batches: Mapping[str, int], placement: Placement
) -> float:
    machine_of = {name: number for number, ranks in enumerate(placement.groups) for name in placement.shared_by(ranks)}
    busy = total = 0.0
    for table in tables:
        tasks: list[list[Task]] = [[] for _ in placement.groups]
        for name, work in table.work.items():
            tasks[machine_of[name]].append(Task(name, work * costs[name], micro_batches[name]))
        plans = [make_plan(of_machine, len(ranks)) for of_machine, ranks in zip(tasks, placement.groups, strict=True)]
        busy += sum(work * costs[name] for name, work in table.work.items())
        total += max(plan.seconds for plan in plans) * len(placement.loads)
    return 1 - busy / total if total else 0.0
