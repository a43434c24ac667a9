"""Sums in the memory of one machine: what plain loops give, whoever is slow, and gloo where there is no memory."""

import random
import threading
import time
from unittest import mock

import pytest
import torch

from failing import run_on_ranks
from fedsim.methods import FedPav
from fedsim.models import SmallCNN
from fedsim.strategy import memory_sum
from fedsim.strategy.memory_sum import MemorySum
from small import fit, make_model, vector

PART = 1000


class Ranks:
    """Threads that stand for ranks: they exchange through a list."""

    def __init__(self, number):
        self.number, self.tables, self.barrier = number, [None] * number, threading.Barrier(number)

    def run(self, work):
        """Return what ``work(rank, exchange)`` returns on each rank."""
        found = [None] * self.number

        def one(rank):
            found[rank] = work(rank, lambda table: self._exchange(rank, table))

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.number)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    def _exchange(self, rank, table):
        self.tables[rank] = table.clone()
        self.barrier.wait()
        total = sum(self.tables)
        self.barrier.wait()
        table.copy_(total)


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch, tmp_path):
    monkeypatch.setattr(memory_sum, "_PART", PART)
    monkeypatch.setattr(memory_sum, "memory_folder", lambda: tmp_path)


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_sums_are_those_of_a_loop(ranks, tmp_path):
    sizes = [1, 3, PART, PART + 1, 4 * PART + 7, 2]
    tables = torch.randint(-(2**40), 2**40, (ranks, len(sizes), max(sizes))).double()

    def work(rank, exchange):
        memory, rng, mine = MemorySum(rank, ranks, exchange, lambda _: "name"), random.Random(rank), []
        for i, size in enumerate(sizes):
            table = tables[rank, i, :size].clone().view(-1, 1)
            time.sleep(0.005 * rng.random())
            assert memory.sum_(table)
            mine.append(table)
        return mine

    for found in Ranks(ranks).run(work):
        for i, size in enumerate(sizes):
            expected = [sum(tables[rank, i, j].item() for rank in range(ranks)) for j in range(size)]
            assert found[i].flatten().tolist() == expected
    assert list(tmp_path.iterdir()) == [], "a file is left"


@pytest.mark.parametrize("poor", [[0], [1], [0, 1]])
def test_a_rank_without_memory_lets_all_take_another_way(poor, monkeypatch):
    real, asked = memory_sum.shared_rows, []

    def shared_rows(path, shape):  # rank 0 asks first
        asked.append(path)
        return None if len(asked) - 1 in poor else real(path, shape)

    monkeypatch.setattr(memory_sum, "shared_rows", shared_rows)

    def work(rank, exchange):
        table = torch.ones(4, dtype=torch.float64)
        return MemorySum(rank, 2, exchange, lambda _: "name").sum_(table), table.tolist()

    assert Ranks(2).run(work) == [(False, [1.0] * 4)] * 2


def wide(**trainer):
    """A fit of one round; sums of less than 1 MiB would go with the reports."""
    torch.manual_seed(0)  # of first weights
    return fit(make_model(FedPav(), backbone=SmallCNN(64)), rounds=1, **trainer)


def fit_on_two(folder):
    """What each of two ranks does."""
    with mock.patch.object(memory_sum, "_PART", PART):
        model = wide(devices=2)
    assert model.strategy._memory._areas is not None
    torch.save(vector(model), folder / f"{model.strategy.global_rank}.pt")


@pytest.mark.dist
@pytest.mark.slow
def test_a_fit_has_the_bits_of_one_rank(tmp_path):
    run_on_ranks(fit_on_two, tmp_path)
    alone = vector(wide())
    for rank in range(2):
        assert torch.equal(torch.load(tmp_path / f"{rank}.pt", weights_only=True), alone)
