"""Which clients take part in a round: axes of their own, usable with every method."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from fedsim.core.errors import ConfigError
from fedsim.core.seeding import numpy_generator

__all__ = ["AllClients", "Availability", "PoissonSampling", "RandomFraction", "Selection"]


class Selection(ABC):
    """The server's choice of clients. Every rank makes it, and all come to the same."""

    @abstractmethod
    def select(self, round_: int, clients: Sequence[str], seed: int) -> list[str]:
        """Return the clients of round ``round_``, in the order of ``clients``.

        Args:
            round_: from 0.
            clients: names of all clients.
            seed: of the run; with the round, the only source of randomness.
        """

    def expected_share(self, num_clients: int) -> float | None:  # noqa: ARG002 - of this class nothing is known
        """Return the share of ``num_clients`` clients that a round selects in expectation, whatever their data.

        None: it may depend on them. Differential privacy needs to know.
        """
        return None

    @property
    def probability(self) -> float | None:
        """With which a round selects each client, independently of other clients and rounds; None: not so."""
        return None


class AllClients(Selection):
    """Every client, every round."""

    def select(self, round_: int, clients: Sequence[str], seed: int) -> list[str]:  # noqa: ARG002 - needs neither
        """Return all clients."""
        return list(clients)

    def expected_share(self, num_clients: int) -> float:  # noqa: ARG002 - needs it not
        """Return 1."""
        return 1.0


class RandomFraction(Selection):
    """A random ceil(S * N) of the N clients, without replacement (McMahan et al., AISTATS 2017, Algorithm 1).

    Args:
        fraction: S in (0, 1].
    """

    def __init__(self, fraction: float = 0.5) -> None:
        if not 0 < fraction <= 1:
            raise ConfigError(f"model.selection.fraction: {fraction} is not in (0, 1]")
        self.fraction = fraction

    def select(self, round_: int, clients: Sequence[str], seed: int) -> list[str]:
        """Return the round's sample."""
        chosen = numpy_generator(seed, round_, "selection").permutation(len(clients))[: self._count(len(clients))]
        return [clients[i] for i in sorted(chosen)]

    def expected_share(self, num_clients: int) -> float:
        """Return ceil(S * N) / N."""
        return self._count(num_clients) / num_clients

    def _count(self, num_clients: int) -> int:
        # without the margin, 0.28 * 25 = 7.000000000000001 would select 8 of 25 clients
        return math.ceil(self.fraction * num_clients - 1e-9)


class PoissonSampling(Selection):
    """Each client with the same probability, independently: how many take part differs, and may be none.

    The sampling of which differential privacy is amplified.

    Args:
        rate: the probability, in (0, 1].
    """

    def __init__(self, rate: float = 0.5) -> None:
        if not 0 < rate <= 1:
            raise ConfigError(f"model.selection.rate: {rate} is not in (0, 1]")
        self.rate = rate

    def select(self, round_: int, clients: Sequence[str], seed: int) -> list[str]:
        """Return the round's sample."""
        draws = numpy_generator(seed, round_, "Poisson selection").random(len(clients))
        return [client for client, draw in zip(clients, draws, strict=True) if draw < self.rate]

    def expected_share(self, num_clients: int) -> float:  # noqa: ARG002 - needs it not
        """Return the probability."""
        return self.rate

    @property
    def probability(self) -> float:
        """The rate."""
        return self.rate


@dataclass(frozen=True, kw_only=True)
class Availability:
    """Clients that fail or are slow, drawn anew for each client and round."""

    drop: float = 0.0
    """probability that a selected client never answers: it neither trains nor counts"""
    straggle: float = 0.0
    """probability that a client is slow and sends what it has"""
    straggler_work: float = 0.5
    """share of its batches that a slow client gets done (at least one)"""

    def __post_init__(self) -> None:
        """Check the ranges."""
        for name in ("drop", "straggle", "straggler_work"):
            if not 0 <= self.__dict__[name] <= 1:
                raise ConfigError(f"model.availability.{name}: {self.__dict__[name]} is not in [0, 1]")
        if self.straggler_work == 0:
            raise ConfigError("model.availability.straggler_work: 0 would be a drop-out; set drop instead")

    def of(self, clients: Sequence[str], round_: int, seed: int) -> dict[str, float]:
        """Return :meth:`work` of each of ``clients``."""
        return {client: self.work(round_, client, seed) for client in clients}

    def work(self, round_: int, client: str, seed: int) -> float:
        """Return the share of its local work that ``client`` gets done: 0 (dropped), ``straggler_work`` or 1."""
        if self.drop == self.straggle == 0:
            return 1.0
        dropped, slow = numpy_generator(seed, round_, client, "availability").random(2)
        if dropped < self.drop:
            return 0.0
        return self.straggler_work if slow < self.straggle else 1.0
