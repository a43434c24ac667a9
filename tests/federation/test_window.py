"""The simulated time of a round, a pure function, against a plain event loop over a whole run."""

import heapq
import random
from collections import Counter

import pytest

from fedsim.federation.components.window import Moment, Rules, next_window


def events(steps, names, places, goal, duration, choose, fate):
    """A server without rounds: an event loop with one heap, from the first call to the last step."""
    heap, log, number, version, clock = [], [], 0, 0, 0
    buffer, resting, called = [], set(), 0

    def step():
        nonlocal version, buffer, resting, called
        version, buffer, resting, called = version + 1, [], set(), 0
        log.append(("step", clock))

    while version < steps:
        while heap and heap[0][0] == clock and version < steps:
            _, _, client, began = heapq.heappop(heap)
            resting.add(client)
            what = fate(client, began, version)
            if what != "fails":
                log.append((what, clock, client, began))
            if what == "answers":
                buffer.append(client)
            if len(buffer) == goal:
                step()
        if version == steps:
            break
        under_way = {client for _, _, client, _ in heap}
        idle = [name for name in names if name not in under_way | resting]
        for client in choose(idle, min(places - len(heap), len(idle)), version, called):
            heapq.heappush(heap, (clock + duration(client, version), number, client, version))
            log.append(("call", clock, client))
            number, called = number + 1, called + 1
        if heap:
            clock = heap[0][0]
        else:
            step()  # nobody is left to wait for
    return log


def drawn(case):
    """A federation: clients, places, goal, durations, choices and fates, all functions of the case."""
    draw = random.Random(case)
    names = [f"c{i}" for i in range(draw.randint(1, 12))]
    places = draw.randint(1, len(names))
    scale = draw.choice([1, 3, 10, 1000])  # few values: many answers at once
    least = 0 if draw.random() < 0.2 else 1
    base = {name: draw.randint(least, scale) for name in names}
    extra, drop, limit = draw.choice([0, 0, 3]), draw.choice([0, 0, 0.3]), draw.choice([None, None, 0, 2])

    def duration(client, version):
        return base[client] + random.Random(f"{case} {client} {version}").randint(0, extra)

    def choose(idle, number, version, called):
        order = random.Random(f"{case} {version} {called}").sample(idle, max(number, 0))
        return sorted(order)

    def fate(client, began, version):
        if random.Random(f"{case} {client} {began} fails").random() < drop:
            return "fails"
        return "too old" if limit is not None and version - began > limit else "answers"

    return names, places, draw.randint(1, places), duration, choose, fate


def windows(steps, names, places, goal, duration, choose, fate):
    """The same by windows."""

    def among(busy, number, version, called):
        idle = [name for name in names if name not in busy]
        return choose(idle, min(number, len(idle)), version, called)

    rules = Rules(
        places=places, goal=goal, duration=duration, choose=among,
        fate=lambda job, round_: fate(job.client, job.version, round_),
    )  # fmt: skip
    moment, log, calls = Moment(), [], []
    for round_ in range(steps):
        window = next_window(round_, moment, rules)
        arrived = sorted((*window.answers, *window.too_old))
        called = [("call", job.client) for job in window.called]
        log.append(([(job.due, job.client, job.version) for job in arrived], called, window.after.clock))
        assert len(window.after.under_way) <= places
        calls += [(job.client, job.version) for job in window.called]
        moment = window.after
    assert not [pair for pair, times in Counter(calls).items() if times > 1], "a client began twice with one model"
    return log


def by_step(log):
    """The log of the event loop, cut at its steps."""
    result, arrived, called = [], [], []
    for what, clock, *rest in log:
        if what == "step":
            result.append((sorted(arrived), called, clock))
            arrived, called = [], []
        elif what == "call":
            called.append(("call", *rest))
        else:
            arrived.append((clock, *rest))
    return result


@pytest.mark.parametrize("hundred", range(20))
def test_windows_are_the_event_loop(hundred):
    for case in range(100 * hundred, 100 * hundred + 100):
        federation = drawn(case)
        expected, found = by_step(events(12, *federation)), windows(12, *federation)
        assert len(expected) == len(found) == 12
        for (arrived, called, clock), (own_arrived, own_called, own_clock) in zip(expected, found, strict=True):
            assert (arrived, called, clock) == (sorted(own_arrived), own_called, own_clock), case


def rules_of(durations, goal, **options):
    """Rules for clients with constant durations, which are called in their order."""

    def choose(busy, number, version, called):
        return [name for name in durations if name not in busy][: max(number, 0)]

    return Rules(
        places=len(durations), goal=goal, duration=lambda client, version: durations[client], choose=choose,
        fate=options.pop("fate", lambda job, round_: "answers"), **options,
    )  # fmt: skip


def test_a_slow_client_s_answer_is_old():
    """By hand: a and b take 1, c takes 3; the server steps with two answers."""
    rules, moment, seen = rules_of({"a": 1, "b": 1, "c": 3}, goal=2), Moment(), []
    for round_ in range(4):
        window = next_window(round_, moment, rules)
        moment = window.after
        seen.append((moment.clock, [(job.client, round_ - job.version) for job in window.answers]))
    # at 3, c's answer comes first, as it was called first; with a's it makes a step, and a is called again at once
    # b's, of the same instant, is the first of the next window
    assert seen[:3] == [(1, [("a", 0), ("b", 0)]), (2, [("a", 0), ("b", 0)]), (3, [("c", 2), ("a", 0)])]
    assert seen[3] == (4, [("b", 1), ("a", 0)])


def test_a_deadline_ends_a_window_in_which_nobody_answers():
    window = next_window(0, Moment(), rules_of({"a": 5, "b": 7}, goal=2, deadline=4, refills=False))
    assert (window.answers, window.after.clock) == ((), 4)
    window = next_window(0, Moment(), rules_of({"a": 5, "b": 7}, goal=2, deadline=5, refills=False))
    assert [job.client for job in window.answers] == ["a"]  # at the last instant
    assert window.after.clock == 5


def test_a_window_without_anybody_takes_no_time():
    window = next_window(3, Moment(clock=9), rules_of({}, goal=0, refills=False))
    assert (window.called, window.answers, window.after) == ((), (), Moment(clock=9))


def test_clients_that_fail_keep_their_places_until_they_should_have_answered():
    fails = lambda job, round_: "fails" if job.client == "a" else "answers"  # noqa: E731 - a rule
    window = next_window(0, Moment(), rules_of({"a": 2, "b": 3}, goal=2, fate=fails))
    assert [job.client for job in window.answers] == ["b"]
    assert window.after.clock == 3  # nobody is left
