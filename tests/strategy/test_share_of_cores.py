"""The share of a machine's cores that a rank uses by itself."""

import pytest

from fedsim.strategy import machine
from fedsim.strategy.machine import share_of_cores


class Ranks:
    """Ranks, by the name of their cores; the sum over ranks has the names of all."""

    def __init__(self, names, rank):
        self.names, self.global_rank, self.world_size = names, rank, len(names)

    def exchange(self, tables):
        [table] = tables
        assert table[self.global_rank] == self.names[self.global_rank]
        assert table.count_nonzero() == 1
        for rank, name in enumerate(self.names):
            table[rank] = name


@pytest.mark.parametrize(
    ("names", "cores", "shares"),
    [
        ([7], 16.0, [16]),
        ([7, 7, 7], 16.0, [5, 5, 5]),
        ([7, 7], 1.5, [1, 1]),
        ([7], 0.5, [1]),
        ([7, 8, 7], 8.0, [4, 8, 4]),  # rank 1 is bound to other cores, or on another machine
    ],
)
def test_ranks_with_the_same_cores_share_them(monkeypatch, names, cores, shares):
    monkeypatch.setattr(machine, "usable_cores", lambda: cores)
    for rank, share in enumerate(shares):
        monkeypatch.setattr(machine, "name_of_cores", lambda rank=rank: names[rank])
        assert share_of_cores(Ranks(names, rank)) == share
