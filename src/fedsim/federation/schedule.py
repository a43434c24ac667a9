"""Who trains whom in a round: the ranks of a machine take its clients one by one, the most expensive first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from fedsim.federation.axis import Axis, RoundRecord
from fedsim.strategy.machine import Machine


class Schedule(Axis):
    """Deals the clients of a round to ranks, by their expected seconds; these come from the rounds before.

    List scheduling, the longest first (Graham 1969): the last rank ends at most a third later than in the best plan.
    The order changes no bit of the results, because sums are exact.

    Args:
        costs: client -> images times local epochs.
        clients: those that this rank may train.
        machine: the ranks that share them; None: this rank has them for itself, and keeps their order.
    """

    def __init__(self, costs: Mapping[str, float], clients: Sequence[str], machine: Machine | None) -> None:
        self._costs, self._clients, self._machine = costs, frozenset(clients), machine
        self._seconds: dict[str, float] = {}
        """client -> seconds for a training image, measured in its last visit"""

    def order(self, called: Sequence[str], work: Mapping[str, float]) -> list[str]:
        """Return those of the clients ``called`` that are trained here, or by another rank of the machine, in order.

        ``work``: client -> share of its work that gets done.
        """
        here = [name for name in called if name in self._clients]
        if self._machine is None:
            return here
        usual = fmean(self._seconds.values()) if self._seconds else 1.0
        expected = {name: work[name] * self._costs[name] * self._seconds.get(name, usual) for name in here}
        return sorted(here, key=lambda name: -expected[name])

    def deal(self, order: Sequence[str]) -> Iterator[str]:
        """Yield the clients that this rank trains, of those in :meth:`order`."""
        return iter(order) if self._machine is None else self._machine.deal(order)

    def observe(self, record: RoundRecord) -> None:
        """Learn how long visits take."""
        if self._machine is not None:
            measured = {name: report for name, report in record.reports.items() if report.images}
            self._seconds |= {name: report.seconds / report.images for name, report in measured.items()}
