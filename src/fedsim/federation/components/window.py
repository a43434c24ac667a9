"""Simulated time of one round: its calls and answers, with their times and models. A pure function.

Time is in whole nanoseconds, so that sums and ties are exact. Order within an instant: answers, in the order of their
calls; the round ends as soon as its answers are complete; then free places are filled. A client that has answered, or
should have, rests until the next round.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Literal

Outcome = Literal["answers", "fails", "too old"]


@dataclass(frozen=True, order=True)
class Job:
    """A client under way: from its call to its answer."""

    due: int
    """time of its answer"""
    number: int
    """of the call, over the whole run"""
    client: str
    version: int
    """round in which it was called: it trains on the model with which that round began"""


@dataclass(frozen=True)
class ClockState:
    """The simulated time between two rounds."""

    clock: int = 0
    """nanoseconds since the run began"""
    calls: int = 0
    """number of calls so far"""
    under_way: tuple[Job, ...] = ()
    """sorted by their answers"""


@dataclass(frozen=True)
class Window:
    """The simulated time of one round."""

    answers: tuple[Job, ...]
    """that the round's step uses, in the order of their arrival"""
    too_old: tuple[Job, ...]
    """answers that arrive, but do not count"""
    called: tuple[Job, ...]
    """clients that begin, in this order"""
    after: ClockState
    """its end"""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The rules of all windows of a run; its functions give the same results whenever they are called."""

    places: int
    """largest number of clients under way"""
    goal: int
    """number of answers with which a round ends"""
    duration: Callable[[str, int], int]
    """client, round of its call -> nanoseconds"""
    choose: Callable[[Set[str], int, int, int], list[str]]
    """busy clients, number, round, number of those that the round has called -> so many other clients, or all others
    if there are fewer"""
    outcome: Callable[[Job, int], Outcome]
    """job, round in which it is due -> whether it answers, fails without an answer, or is too old to count"""
    refills: bool = True
    """whether a place that becomes free within a round is filled at once"""
    deadline: int | None = None
    """nanoseconds after which a round ends; None: it waits for its answers"""


def next_window(round_: int, before: ClockState, rules: Rules) -> Window:
    """Return the window of round ``round_``, which begins at ``before``.

    It ends with ``rules.goal`` answers, at the deadline, or when no client is under way any more.
    """
    clock, calls, under_way = before.clock, before.calls, list(before.under_way)
    answers: list[Job] = []
    too_old: list[Job] = []
    called: list[Job] = []
    busy = {job.client for job in under_way}  # or resting
    heapq.heapify(under_way)
    end = None if rules.deadline is None else clock + rules.deadline
    fills = True
    while True:
        while under_way and under_way[0].due <= clock and len(answers) < rules.goal:
            job = heapq.heappop(under_way)
            outcome = rules.outcome(job, round_)
            if outcome != "fails":
                (answers if outcome == "answers" else too_old).append(job)
        if len(answers) == rules.goal > 0:
            break
        if fills:
            for client in rules.choose(busy, rules.places - len(under_way), round_, len(called)):
                job = Job(clock + rules.duration(client, round_), calls, client, round_)
                heapq.heappush(under_way, job)
                called.append(job)
                busy.add(client)
                calls += 1
            fills = rules.refills
        if not under_way:
            break
        if end is not None and under_way[0].due > end:
            clock = end
            break
        clock = max(clock, under_way[0].due)
    return Window(tuple(answers), tuple(too_old), tuple(called), ClockState(clock, calls, tuple(sorted(under_way))))
