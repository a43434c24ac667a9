"""Ranks of a machine take clients from each other: in order of cost, and with the same bits whoever is slow."""

import math
import os
import time
from collections import Counter
from contextlib import ExitStack
from functools import partial
from unittest import mock

import pytest
import torch

from failing import PATIENCE, Jitter, run_on_ranks
from fedsim.data import SyntheticReID
from fedsim.federation.callbacks import Preemption
from fedsim.federation.components.listener import RoundRecord
from fedsim.federation.events import RoundCallback
from fedsim.federation.scheduling import scheduler as scheduler_module
from fedsim.federation.scheduling.plan import AGAIN, Task, make_plan
from fedsim.federation.scheduling.scheduler import RoundScheduler
from fedsim.methods import Ditto, FedBN, FedPav
from fedsim.strategy.machine import Machine
from fedsim.training.messages import Report
from small import fit, make_data, make_model, state_of

NAMES = ["a", "b", "c", "d"]
COSTS = {"a": 10.0, "b": 40.0, "c": 20.0, "d": 40.0}
ALL = dict.fromkeys(NAMES, 1.0)


def schedule(clients=NAMES, shared=True, micro_batches=None):
    machine = object.__new__(Machine) if shared else None  # its order is asked for, nothing is dealt
    if machine is not None:
        machine.ranks, machine.strategy = range(2), mock.Mock(world_size=2, global_rank=0)
    return RoundScheduler(COSTS, dict.fromkeys(NAMES, 1) | (micro_batches or {}), [clients], machine)


def ordered(of, called, work):
    return list(of.orders(called, work).others)


def report(seconds, images):
    return Report(10, seconds=seconds, images=images)


def test_before_any_measurement_images_decide_and_ties_keep_their_order():
    assert ordered(schedule(), NAMES, ALL) == ["b", "d", "c", "a"]
    assert ordered(schedule(), ["d", "a", "b"], ALL) == ["d", "b", "a"]
    assert ordered(schedule(), NAMES, {**ALL, "b": 0.1}) == ["d", "c", "a", "b"]


def test_measured_seconds_decide_and_others_count_as_usual():
    timed = schedule()
    timed.orders(NAMES, ALL)
    timed.observe(RoundRecord(0, 0, NAMES, {"a": report(90.0, 10.0), "b": report(4.0, 40.0)}))
    # seconds per image: a 9, b 0.1, the others their mean 4.55
    expected = {"a": 10 * 9, "b": 40 * 0.1, "c": 20 * 4.55, "d": 40 * 4.55}
    assert ordered(timed, NAMES, ALL) == sorted(NAMES, key=lambda name: -expected[name]) == ["d", "c", "a", "b"]
    timed.observe(RoundRecord(1, 0, NAMES, {"a": report(1.0, 10.0), "d": report(math.nan, 0.0)}))
    assert ordered(timed, NAMES, ALL)[-1] == "a"  # 1, b 4, others 0.1 per image: c 2, d 4


def test_seconds_of_a_client_that_could_be_shared_and_was_not_are_those_of_one_rank():
    timed = schedule(micro_batches={"a": 4})
    timed.observe(RoundRecord(0, 0, NAMES, {"a": report(90.0, 10.0), "b": report(200.0, 40.0)}))
    # seconds per image: a 9, b 5, the others 7; were those of a for two ranks, c would come before b
    assert timed.orders(NAMES, ALL).all == ["d", "b", "c", "a"]


def played(costs, micro_batches, ranks, seconds, rounds, beginning=0.0):
    """Return the plan of each round, if a client of ``costs`` takes ``seconds(client, ranks)`` on so many ranks.

    In the first round, and on ranks that train together for the first time, it takes ``beginning`` seconds more.
    """
    machine = object.__new__(Machine)
    machine.ranks, machine.strategy = range(ranks), mock.Mock(world_size=ranks, global_rank=0)
    scheduler, plans = RoundScheduler(costs, micro_batches, [list(costs)], machine), []
    with (
        mock.patch.object(scheduler_module, "make_plan", lambda *args: plans.append(make_plan(*args)) or plans[-1]),
        mock.patch.object(Machine, "open_rank_groups"),
        mock.patch.object(Machine, "rank_group"),
    ):
        connected = set()
        for round_ in range(rounds):
            scheduler.orders(list(costs), dict.fromkeys(costs, 1.0))
            groups = dict(plans[-1].rank_groups)
            reports = {}
            for name, images in costs.items():
                is_new = round_ == 0 or (name in groups and groups[name] not in connected)
                taken = seconds(name, len(groups.get(name, "1"))) + beginning * is_new
                reports[name] = report(taken, images)
            connected.update(groups.values())
            scheduler.observe(RoundRecord(round_, 0, list(costs), reports))
    return plans


@pytest.mark.parametrize("beginning", [0.0, 60.0])
def test_a_client_that_several_ranks_train_no_faster_is_trained_by_one_rank(beginning):
    costs = {"large": 100.0, "small": 1.0}
    plans = played(costs, {"large": 8, "small": 1}, 4, lambda name, ranks: costs[name] / 10, 9, beginning)
    counts = [len(plan.rank_groups) for plan in plans]  # assumed, measured, tried on one rank, known
    assert counts == ([1, 1, 0] if beginning == 0 else [1, 1, 1]) + 6 * [0]
    assert plans[-1].seconds == 10


@pytest.mark.parametrize("beginning", [0.0, 60.0])
def test_a_client_that_several_ranks_train_faster_is_on_one_rank_once(beginning):
    """A network that is compiled for a minute in the first round hides no gain."""
    costs = {"large": 100.0, "small": 1.0}

    def seconds(name, ranks):
        return costs[name] / 10 / ranks + 0.5 * (ranks > 1)

    plans = played(costs, {"large": 8, "small": 1}, 4, seconds, 9, beginning)
    counts = [len(plan.rank_groups) for plan in plans]
    assert counts == ([1, 1, 0, 1] if beginning == 0 else [1, 1, 1, 0]) + 5 * [1]
    assert plans[-1].rank_groups == [("large", range(4))]


def test_ranks_that_train_together_for_the_first_time_measure_no_gain():
    """The first round has other clients; the large one comes later, and its ranks must be connected first."""
    costs, seen = {"large": 100.0, "small": 1.0}, []

    def seconds(name, ranks):
        seen.append(ranks)
        return costs[name] / 10 / ranks + 20 * (name == "large" and ranks > 1 and seen.count(ranks) == 1)

    machine = object.__new__(Machine)
    machine.ranks, machine.strategy = range(4), mock.Mock(world_size=4, global_rank=0)
    scheduler, sizes = RoundScheduler(costs, {"large": 8, "small": 1}, [list(costs)], machine), []
    with mock.patch.object(Machine, "open_rank_groups"), mock.patch.object(Machine, "rank_group"):
        for round_ in range(7):
            called = list(costs) if round_ else ["small"]
            orders = scheduler.orders(called, dict.fromkeys(costs, 1.0))
            sizes.append(4 if orders.rank_groups else 1)
            reports = {name: report(seconds(name, sizes[-1] if name == "large" else 1), costs[name]) for name in called}
            scheduler.observe(RoundRecord(round_, 0, called, reports))
    assert sizes == [1, 4, 4, 1, 4, 4, 4]


def test_a_measurement_that_was_disturbed_is_not_final(caplog):
    """Another program slows the first session of four ranks that counts; the line of each trial is written once."""
    caplog.set_level("INFO")
    costs, calls = {"large": 100.0, "small": 1.0}, []

    def seconds(name, ranks):
        calls.append(ranks)
        return costs[name] / 10 / ranks * (6 if ranks == 4 and calls.count(4) == 2 else 1)

    plans = played(costs, {"large": 8, "small": 1}, 4, seconds, 60)
    counts = [len(plan.rank_groups) for plan in plans]
    trial = counts.index(1, 3)
    assert counts[:3] == [1, 1, 0]
    assert counts[3:trial] == [0] * (trial - 3)
    assert AGAIN < trial < 2 * AGAIN  # 1.5 times as slow as one rank: after 30 sessions
    # then four ranks stay, until one rank is tried again after four times as many sessions
    assert counts[trial:] == [1] * (60 - trial)
    assert [message for message in caplog.messages if message.startswith("large")] == [
        "large: 10.0 s on 1 rank, 15.0 s on 4: one rank",
        "large: 10.0 s on 1 rank, 2.5 s on 4: 4 ranks",
    ]


def test_new_trials_take_a_twentieth_of_the_time_at_most():
    costs = {"large": 100.0, "small": 1.0}
    for slower in (0.3, 1.1, 2.0):  # than one rank

        def seconds(name, ranks, slower=slower):
            return costs[name] / 10 * (slower if ranks > 1 else 1)

        plans = played(costs, {"large": 8, "small": 1}, 4, seconds, 300)
        of_large = [10 * (slower if plan.rank_groups else 1) for plan in plans[5:]]
        assert min(of_large) < max(of_large), "nothing was tried again"
        assert sum(of_large) <= (1 + 1 / AGAIN) * len(of_large) * min(of_large)


def test_measured_plans_are_never_slower_than_one_rank_for_each_client():
    generator = torch.Generator().manual_seed(0)

    def draw(low, high):
        return low + (high - low) * float(torch.rand((), generator=generator))

    chosen = 0
    for _ in range(200):
        count, ranks = int(draw(1, 7)), int(draw(2, 9))
        costs = {f"c{i}": 10 ** draw(0, 3) for i in range(count)}
        micro_batches = {name: int(draw(1, 9)) for name in costs}
        speed, sums = {name: draw(0.5, 2) for name in costs}, {name: 10 ** draw(-2, 1) for name in costs}

        def seconds(name, group, costs=costs, micro_batches=micro_batches, speed=speed, sums=sums):
            busiest = math.ceil(micro_batches[name] / group) / micro_batches[name]
            return costs[name] * speed[name] * (busiest + sums[name] * (group > 1))

        plans = played(costs, micro_batches, ranks, seconds, AGAIN, beginning=10 ** draw(-1, 4))
        whole = make_plan([Task(name, seconds(name, 1)) for name in costs], ranks).seconds
        assert plans[-1].seconds <= whole * (1 + 1e-9)
        assert plans[-1] == plans[-2], "it still tries"
        for name, group in plans[-1].rank_groups:
            assert seconds(name, len(group)) <= seconds(name, 1)
        chosen += len(plans[-1].rank_groups)
    assert chosen > 20  # several ranks do pay, in many draws


def test_a_rank_without_neighbours_keeps_the_order_and_its_own_clients():
    alone = schedule(["a", "c", "d"], shared=False)
    alone.observe(RoundRecord(0, 0, NAMES, {"a": report(1e-3, 10.0)}))
    assert ordered(alone, NAMES, ALL) == [name for name, _ in alone.turns(alone.orders(NAMES, ALL))] == ["a", "c", "d"]


class Waiting(RoundCallback):
    """The rank that begins the first client of a round waits in it until all others have been trained."""

    def __init__(self, folder):
        self._folder = folder

    def on_round_start(self, round_, clients):
        """Remember the round."""
        self._round, self._clients = round_, clients

    def on_client_batch(self, report):
        """Note whom this rank trains."""
        (self._folder / f"{self._round} {report.client}").touch()
        deadline = time.monotonic() + PATIENCE
        while report.client == self._clients[0] and len(list(self._folder.glob(f"{self._round} *"))) < 4:
            assert time.monotonic() < deadline, "the other rank does not train the other clients"
            time.sleep(0.01)


def sources():
    return make_data(SyntheticReID(clients=4, unseen=1, scale=0.2))


def wait_on_two(folder):
    """What each of two ranks does."""
    model = fit(make_model(FedBN()), sources(), rounds=2, devices=2, callbacks=[Waiting(folder)])
    torch.save(state_of(model), folder / f"{model.strategy.global_rank}.pt")


def jitter_on_three(folder):
    """What each of three ranks does."""
    model = fit(make_model(Ditto()), sources(), rounds=3, devices=3, callbacks=[Jitter()])
    torch.save(state_of(model), folder / f"{model.strategy.global_rank}.pt")


def assert_same_on_all(folder, ranks, expected):
    for rank in range(ranks):
        found = torch.load(folder / f"{rank}.pt", weights_only=True)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), name


@pytest.mark.dist
@pytest.mark.slow
def test_a_rank_trains_all_that_a_busy_one_leaves(tmp_path):
    run_on_ranks(wait_on_two, tmp_path)
    assert_same_on_all(tmp_path, 2, state_of(fit(make_model(FedBN()), sources(), rounds=2)))


@pytest.mark.dist
@pytest.mark.slow
def test_whoever_is_slow_the_bits_are_the_same(tmp_path):
    run_on_ranks(jitter_on_three, tmp_path, ranks=3)
    assert_same_on_all(tmp_path, 3, state_of(fit(make_model(Ditto()), sources(), rounds=3)))


def count_collectives(folder):
    """What each of two ranks does: two fits, of two rounds and of five."""
    for rounds in (2, 5):
        names = []
        with ExitStack() as stack:
            for name in ("all_reduce", "broadcast", "all_gather", "barrier", "broadcast_object_list"):
                original = getattr(torch.distributed, name)
                spy = stack.enter_context(mock.patch.object(torch.distributed, name))
                spy.side_effect = partial(noted, names, name, original)
            fit(make_model(FedPav()), sources(), rounds=rounds, devices=2, callbacks=[Preemption()])
        torch.save(Counter(names), folder / f"{os.environ['RANK']}-{rounds}.pt")


def noted(names, name, original, *args, **kwargs):
    names.append(name)
    return original(*args, **kwargs)


@pytest.mark.dist
@pytest.mark.slow
def test_a_round_of_a_small_model_has_one_collective(tmp_path):
    run_on_ranks(count_collectives, tmp_path)
    for rank in range(2):
        few, many = (torch.load(tmp_path / f"{rank}-{n}.pt", weights_only=False) for n in (2, 5))
        assert many - few == Counter(all_reduce=3)
