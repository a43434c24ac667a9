"""The timetables of a run, which are known before it: how long it takes, who answers, and how busy the ranks are."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch

from fedsim.core.placement import Placement
from fedsim.core.store import MemoryStore
from fedsim.federation.components.clock import ClockInputs, SynchronousClock
from fedsim.federation.scheduling.plan import Task, make_plan
from fedsim.training.old_models import OldModels
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
    """largest number of rounds whose models are kept after a round"""
    slots: int
    """number of models for which a machine has memory: a slot that becomes free rests for a round"""
    idle: float
    """share of the time of all ranks in which they wait for others"""

    @property
    def answers(self) -> int:
        """Number of answers that count."""
        return sum(self.count.values())

    @property
    def rate(self) -> float:
        """Answers that count per simulated second; infinite if the run takes no time."""
        return self.answers / self.seconds if self.seconds else math.inf

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
    old_models, slots = _old_models(tables)
    return Forecast(
        seconds=sum(table.seconds or 0.0 for table in tables),
        count=count,
        late=sum(table.late for table in tables),
        too_old=sum(len(table.too_old) for table in tables),
        staleness=staleness,
        old_models=old_models,
        slots=slots,
        idle=_idle(tables, costs, micro_batches, placement),
    )


def synchronous_rate(inputs: ClockInputs, rounds: int) -> float:
    """Return the answers per simulated second of synchronous rounds, with the run's selection and drop-outs.

    It is infinite if rounds take no time.
    """
    ledger, answers, seconds = inputs.ledger, 0, 0.0
    for round_, table in enumerate(SynchronousClock(inputs).timetables(rounds)):
        whole, work = ledger.expected(round_, table.called), table.work
        traffic = {name: t if name in work else t._replace(up=0, extra_up=0) for name, t in whole.items()}
        images = {name: share * inputs.costs[name] for name, share in work.items()}
        answers += len(work)
        seconds += ledger.simulated_seconds(traffic, images) or 0.0
    return answers / seconds if seconds else math.inf


def _old_models(tables: Sequence[Timetable]) -> tuple[int, int]:
    """Return how many old models are kept at most after a round, and the slots in which they and resting ones lie."""
    models, most = OldModels(MemoryStore(torch.device("cpu")), writes=False), 0
    for round_, table in enumerate(tables):
        if round_ in table.kept:
            models.keep(round_, {})
        models.keep_only(table.kept)
        most = max(most, len(table.kept))
    return most, models.num_slots


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
