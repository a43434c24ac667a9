"""Longest processing time first: a case by hand, Graham's bound, and FedReIDBench's predicted speed-ups."""

import itertools
import random

import pytest

from fedsim.core.placement import place

FEDREIDBENCH = {  # training images, Zhuang et al., ACM MM 2020
    "msmt17": 32621,
    "duke": 16522,
    "market": 12936,
    "cuhk03": 7365,
    "prid": 3744,
    "cuhk01": 1940,
    "viper": 632,
    "3dpes": 450,
    "ilids": 248,
}


def best_makespan(costs, num_ranks):
    """The busiest rank's load in the best of all assignments."""
    best = sum(costs)
    for ranks in itertools.product(range(num_ranks), repeat=len(costs)):
        loads = [0] * num_ranks
        for cost, rank in zip(costs, ranks, strict=True):
            loads[rank] += cost
        best = min(best, max(loads))
    return best


def test_case_worked_by_hand():
    # 7 -> 0 (7|0), 6 -> 1 (7|6), 5 -> 1 (7|11), 4 -> 0 (11|11), 3 -> 0, a tie (14|11)
    placement = place({"a": 3, "b": 5, "c": 7, "d": 4, "e": 6}, num_ranks=2)
    assert placement.ranks == {"a": 0, "b": 1, "c": 0, "d": 0, "e": 1}
    assert placement.loads == (14, 11)
    assert placement.speedup == 25 / 14
    assert placement.efficiency == 25 / 28


def test_equal_costs_go_to_the_ranks_in_turn():
    placement = place(dict.fromkeys("abcde", 2.0), num_ranks=3)
    assert placement.ranks == {"a": 0, "b": 1, "c": 2, "d": 0, "e": 1}


def test_grahams_worst_case_is_reached():
    placement = place({"a": 3, "b": 3, "c": 2, "d": 2, "e": 2}, num_ranks=2)
    assert max(placement.loads) == 7
    assert best_makespan([3, 3, 2, 2, 2], 2) == 6  # 7 / 6 = 4/3 - 1/(3 * 2)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("seed", range(6))
def test_within_grahams_bound_of_the_best(seed, num_ranks):
    rng = random.Random(seed)
    costs = [rng.randint(1, 30) for _ in range(6)]
    placement = place({f"client{i}": cost for i, cost in enumerate(costs)}, num_ranks)
    best = best_makespan(costs, num_ranks)
    assert best <= max(placement.loads) <= (4 / 3 - 1 / (3 * num_ranks)) * best + 1e-9
    for rank in range(num_ranks):
        assert placement.loads[rank] == sum(costs[int(name[-1])] for name in placement.clients_of(rank))


@pytest.mark.parametrize(("num_ranks", "speedup"), [(1, 1.0), (2, 2.0), (3, 2.34), (4, 2.34), (8, 2.34), (9, 2.34)])
def test_fedreidbench_speedup(num_ranks, speedup):
    placement = place(FEDREIDBENCH, num_ranks)
    assert placement.speedup == pytest.approx(speedup, abs=0.01)
    assert placement.efficiency == pytest.approx(speedup / num_ranks, abs=0.01)
    assert sum(placement.loads) == 76458


def test_hosted_by_keeps_the_given_order():
    placement = place({"small": 1, "large": 9, "medium": 5, "tiny": 0.5, "other": 4}, num_ranks=2)
    assert list(placement.ranks) == ["small", "large", "medium", "tiny", "other"]
    assert placement.clients_of(0) == ["small", "large"]
    assert placement.clients_of(1) == ["medium", "tiny", "other"]


def test_more_ranks_than_clients():
    placement = place({"a": 1, "b": 2}, num_ranks=4)
    assert placement.ranks == {"b": 0, "a": 1}
    assert placement.loads == (2, 1, 0, 0)
    assert placement.clients_of(3) == []
    assert placement.speedup == 1.5


def test_costs_of_zero():
    placement = place({"a": 0, "b": 0}, num_ranks=2)
    assert placement.speedup == 1.0
    assert set(placement.ranks) == {"a", "b"}


def test_clients_are_divided_among_machines_and_then_among_their_ranks():
    costs = {"a": 9, "b": 5, "c": 4, "d": 3, "e": 3, "f": 2}
    # machines: a (9|0), b (9|5), c (9|9), d, a tie (12|9), e (12|12), f, a tie (14|12)
    placement = place(costs, num_ranks=4, per_machine=2)
    assert [placement.shared_by(ranks) for ranks in placement.groups] == [["a", "d", "f"], ["b", "c", "e"]]
    # first machine: a -> 0, d -> 1, f -> 1; second: b -> 2, c -> 3, e -> 3
    assert placement.ranks == {"a": 0, "b": 2, "c": 3, "d": 1, "e": 3, "f": 1}
    assert placement.loads == (9, 5, 5, 7)
    assert placement.speedup == 26 / 9


def test_ranks_of_one_machine_share_all_clients_and_ranks_alone_none():
    costs = {"a": 2.0, "b": 1.0}
    assert place(costs, num_ranks=2, per_machine=2).groups == [range(2)]
    assert place(costs, num_ranks=2, per_machine=2).ranks == place(costs, num_ranks=2).ranks
    assert place(costs, num_ranks=2).groups == [range(1), range(1, 2)]
