"""The simulated time of a round, a pure function, against a plain event loop over a whole run."""

import heapq
import random
from collections import Counter

import pytest

from fedsim.federation.components.window import ClockState, Rules, next_window


class Events:
    """A server without rounds: an event loop with one heap, from the first call to the last step.

    ``deadline``: nanoseconds from step to step, at most; ``forgets``: clients under way at a step never answer.
    """

    def __init__(self, steps, goal, outcome, deadline, forgets):
        self.steps, self.goal, self.outcome, self.deadline, self.forgets = steps, goal, outcome, deadline, forgets
        self.heap, self.log, self.version, self.clock = [], [], 0, 0
        self.buffer, self.resting, self.called, self.end = [], set(), 0, deadline

    @property
    def is_over(self):
        return self.version == self.steps

    def step(self):
        self.version, self.buffer, self.resting, self.called = self.version + 1, [], set(), 0
        self.end = None if self.deadline is None else self.clock + self.deadline
        self.log.append(("step", self.clock))
        if self.forgets:
            self.heap.clear()

    def receive(self):
        """All answers of this instant, and the steps that they complete."""
        while self.heap and self.heap[0][0] == self.clock and not self.is_over:
            _, _, client, began = heapq.heappop(self.heap)
            self.resting.add(client)
            what = self.outcome(client, began, self.version)
            if what != "fails":
                self.log.append((what, self.clock, client, began))
            if what == "answers":
                self.buffer.append(client)
            if len(self.buffer) == self.goal:
                self.step()

    def wait(self):
        """Go on to the next answer, or to the deadline."""
        if not self.heap:
            self.step()  # nobody is left to wait for
        elif self.end is None or self.heap[0][0] <= self.end:
            self.clock = self.heap[0][0]
        else:
            self.clock = self.end
            self.step()


def events(steps, names, places, goal, duration, choose, outcome, refills=True, deadline=None, forgets=False):
    """The log of the event loop; ``refills``: free places are filled after each answer, or only after a step."""
    server, number = Events(steps, goal, outcome, deadline, forgets), 0
    filled = None  # the last version of which places were filled
    while not server.is_over:
        server.receive()
        if server.is_over:
            break
        if refills or filled != server.version:
            idle = [name for name in names if name not in {c for *_, c, _ in server.heap} | server.resting]
            for client in choose(idle, min(places - len(server.heap), len(idle)), server.version, server.called):
                due = server.clock + duration(client, server.version)
                heapq.heappush(server.heap, (due, number, client, server.version))
                server.log.append(("call", server.clock, client))
                number, server.called = number + 1, server.called + 1
        filled = server.version
        server.wait()
    return server.log


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

    def outcome(client, began, version):
        if random.Random(f"{case} {client} {began} fails").random() < drop:
            return "fails"
        return "too old" if limit is not None and version - began > limit else "answers"

    return names, places, draw.randint(1, places), duration, choose, outcome


def drawn_end(case):
    """What else ends a round, and what becomes of those that are under way then."""
    draw = random.Random(f"{case} ends")
    refills = draw.random() < 0.3
    deadline = draw.choice([None, 1, 2, 5, 15, 700])
    return {"refills": refills, "deadline": deadline, "forgets": not refills and draw.random() < 0.7}


def windows(steps, names, places, goal, duration, choose, outcome, refills=True, deadline=None, forgets=False):
    """The same by windows."""

    def among(busy, number, version, called):
        idle = [name for name in names if name not in busy]
        return choose(idle, min(number, len(idle)), version, called)

    rules = Rules(
        places=places, goal=goal, duration=duration, choose=among,
        outcome=lambda job, round_: outcome(job.client, job.version, round_), refills=refills, deadline=deadline,
    )  # fmt: skip
    moment, log, calls = ClockState(), [], []
    for round_ in range(steps):
        window = next_window(round_, moment, rules)
        arrived = sorted((*window.answers, *window.too_old))
        called = [("call", job.client) for job in window.called]
        log.append(([(job.due, job.client, job.version) for job in arrived], called, window.after.clock))
        assert len(window.after.under_way) <= places
        calls += [(job.client, job.version) for job in window.called]
        moment = ClockState(window.after.clock, window.after.calls) if forgets else window.after
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
        compare(case)


@pytest.mark.parametrize("hundred", range(10))
def test_windows_with_deadlines_or_without_refills_are_the_event_loop(hundred):
    for case in range(100 * hundred, 100 * hundred + 100):
        compare(case, **drawn_end(case))


def compare(case, **end):
    """A drawn federation, step by step."""
    federation = drawn(case)
    expected, found = by_step(events(12, *federation, **end)), windows(12, *federation, **end)
    assert len(expected) == len(found) == 12
    for (arrived, called, clock), (own_arrived, own_called, own_clock) in zip(expected, found, strict=True):
        assert (arrived, called, clock) == (sorted(own_arrived), own_called, own_clock), case


def rules_of(durations, goal, **options):
    """Rules for clients with constant durations, which are called in their order."""

    def choose(busy, number, version, called):
        return [name for name in durations if name not in busy][: max(number, 0)]

    return Rules(
        places=len(durations), goal=goal, duration=lambda client, version: durations[client], choose=choose,
        outcome=options.pop("outcome", lambda job, round_: "answers"), **options,
    )  # fmt: skip


def test_a_slow_client_s_answer_is_old():
    """By hand: a and b take 1, c takes 3; the server steps with two answers."""
    rules, moment, seen = rules_of({"a": 1, "b": 1, "c": 3}, goal=2), ClockState(), []
    for round_ in range(4):
        window = next_window(round_, moment, rules)
        moment = window.after
        seen.append((moment.clock, [(job.client, round_ - job.version) for job in window.answers]))
    # at 3, c's answer comes first, as it was called first; with a's it makes a step, and a is called again at once
    # b's, of the same instant, is the first of the next window
    assert seen[:3] == [(1, [("a", 0), ("b", 0)]), (2, [("a", 0), ("b", 0)]), (3, [("c", 2), ("a", 0)])]
    assert seen[3] == (4, [("b", 1), ("a", 0)])


def test_a_deadline_ends_a_window_in_which_nobody_answers():
    window = next_window(0, ClockState(), rules_of({"a": 5, "b": 7}, goal=2, deadline=4, refills=False))
    assert (window.answers, window.after.clock) == ((), 4)
    window = next_window(0, ClockState(), rules_of({"a": 5, "b": 7}, goal=2, deadline=5, refills=False))
    assert [job.client for job in window.answers] == ["a"]  # at the last instant
    assert window.after.clock == 5


def test_a_window_without_anybody_takes_no_time():
    window = next_window(3, ClockState(clock=9), rules_of({}, goal=0, refills=False))
    assert (window.called, window.answers, window.after) == ((), (), ClockState(clock=9))


def test_clients_that_fail_keep_their_places_until_they_should_have_answered():
    fails = lambda job, round_: "fails" if job.client == "a" else "answers"  # noqa: E731 - a rule
    window = next_window(0, ClockState(), rules_of({"a": 2, "b": 3}, goal=2, outcome=fails))
    assert [job.client for job in window.answers] == ["b"]
    assert window.after.clock == 3  # nobody is left
