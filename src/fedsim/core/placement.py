"""Which rank owns which client: longest processing time first."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Placement:
    """An assignment of clients to ranks.

    If ranks share no clients, a client trains on its owner during the whole run. Ranks of one machine can train
    each other's clients; the owner then creates and saves the client's state.
    """

    ranks: Mapping[str, int]
    """client -> the rank that owns it"""
    loads: tuple[float, ...]
    """rank -> predicted work, in the unit of the costs"""
    per_machine: int = 1
    """number of ranks that share their clients; 1: ranks share none"""

    def clients_of(self, rank: int) -> list[str]:
        """Return the clients of ``rank``, in the order in which :func:`place` received them."""
        return [client for client, owner in self.ranks.items() if owner == rank]

    @property
    def groups(self) -> list[range]:
        """Ranks that share their clients: those of a machine, or each rank alone."""
        return [range(first, first + self.per_machine) for first in range(0, len(self.loads), self.per_machine)]

    def shared_by(self, ranks: range) -> list[str]:
        """Return the clients of several ranks, in the order in which :func:`place` received them."""
        return [client for client, owner in self.ranks.items() if owner in ranks]

    @property
    def speedup(self) -> float:
        """Predicted speed-up over one rank: total work / work of the busiest rank."""
        return sum(self.loads) / max(self.loads) if max(self.loads) > 0 else 1.0

    @property
    def efficiency(self) -> float:
        """Predicted speed-up per rank, in (0, 1]."""
        return self.speedup / len(self.loads)


def place(costs: Mapping[str, float], num_ranks: int, per_machine: int = 1) -> Placement:
    """Assign clients to ranks, the most expensive first, each to the least loaded rank (LPT, Graham 1969).

    Clients are assigned to machines of ``per_machine`` ranks, and then on each machine to its ranks. Every rank
    computes the same result from the same arguments. Ties go to the first client and to the lower rank. ``costs`` are
    predicted work (images times local epochs) by client.

    >>> place({"msmt17": 43, "duke": 22, "market": 17, "cuhk03": 10}, num_ranks=2).ranks
    {'msmt17': 0, 'duke': 1, 'market': 1, 'cuhk03': 1}
    """
    if 1 < per_machine < num_ranks:
        machines = place(costs, num_ranks // per_machine)
        parts = [place({c: costs[c] for c in machines.clients_of(m)}, per_machine) for m in range(len(machines.loads))]
        ranks = {c: m * per_machine + rank for m, part in enumerate(parts) for c, rank in part.ranks.items()}
        loads = tuple(load for part in parts for load in part.loads)
        return Placement({client: ranks[client] for client in costs}, loads, per_machine)
    least = [(0.0, rank) for rank in range(num_ranks)]  # a heap: the least loaded rank is first
    assigned: dict[str, int] = {}
    for client in sorted(costs, key=lambda name: -costs[name]):  # sorted() is stable: ties keep the order of ``costs``
        load, rank = least[0]
        assigned[client] = rank
        heapq.heapreplace(least, (load + costs[client], rank))
    work = {rank: load for load, rank in least}
    ordered = tuple(work[rank] for rank in range(num_ranks))
    return Placement({client: assigned[client] for client in costs}, ordered, per_machine)


def by_device(devices: Sequence[object]) -> str:
    """Return a text with the ranks of a machine by device; ``devices`` are those of the ranks, in order.

    >>> by_device(["cuda:0", "cuda:1", "cuda:0", "cuda:1"])
    'cuda:0: ranks 0, 2; cuda:1: ranks 1, 3'
    """
    ranks_of: dict[str, list[str]] = {}
    for rank, device in enumerate(devices):
        ranks_of.setdefault(str(device), []).append(str(rank))
    return "; ".join(f"{device}: rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}" for device, ranks in ranks_of.items())
