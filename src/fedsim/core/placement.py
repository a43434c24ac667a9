"""Which rank hosts which client: longest processing time first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Placement:
    """An assignment of clients to ranks.

    A client stays on its rank for the whole run, because that is where its private state lives.
    """

    ranks: Mapping[str, int]
    """client -> its rank"""
    loads: tuple[float, ...]
    """rank -> predicted work, in the unit of the costs"""

    def hosted_by(self, rank: int) -> list[str]:
        """Return the clients of ``rank``, in the order in which they were given to :func:`place`."""
        return [client for client, host in self.ranks.items() if host == rank]

    @property
    def speedup(self) -> float:
        """Predicted speed-up over one rank: total work / work of the busiest rank."""
        return sum(self.loads) / max(self.loads) if max(self.loads) > 0 else 1.0

    @property
    def efficiency(self) -> float:
        """Predicted speed-up per rank, in (0, 1]."""
        return self.speedup / len(self.loads)


def place(costs: Mapping[str, float], num_ranks: int) -> Placement:
    """Assign clients to ranks, the most expensive first, each to the least loaded rank (LPT, Graham 1969).

    Every rank computes the same result from the same arguments. Ties go to the first client and to the lower rank.
    ``costs`` are predicted work (images times local epochs) by client.

    >>> place({"msmt17": 43, "duke": 22, "market": 17, "cuhk03": 10}, num_ranks=2).ranks
    {'msmt17': 0, 'duke': 1, 'market': 1, 'cuhk03': 1}
    """
    loads = [0.0] * num_ranks
    assigned: dict[str, int] = {}
    for client in sorted(costs, key=lambda name: -costs[name]):  # sorted() is stable: ties keep the given order
        rank = min(range(num_ranks), key=loads.__getitem__)
        assigned[client] = rank
        loads[rank] += costs[client]
    return Placement({client: assigned[client] for client in costs}, tuple(loads))
