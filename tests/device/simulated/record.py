"""Counts of what a run asked of the simulated GPU."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from simulated.places import site


class Reading(NamedTuple):
    """Totals at one moment; the difference of two is what happened between them."""

    kernels: int
    """launches"""
    waits: int
    """times that the host waited for the device"""
    to_host: int
    """copies from the device to the host, single numbers included"""
    to_device: int
    """copies from the host to the device"""

    def since(self, earlier: Reading) -> Reading:
        """Return what has happened since ``earlier``."""
        return Reading(*(now - before for now, before in zip(self, earlier, strict=True)))


@dataclass
class Record:
    """Everything that was counted since the simulation began."""

    kernels: Counter[str] = field(default_factory=Counter)
    """operation -> launches"""
    kernel_sites: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(operation, line of fedsim) -> launches; filled only if ``with_sites``, which is slow"""
    waits: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(reason, lines of fedsim) -> waits"""
    copies: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """(``to host`` or ``to device``, ``asynchronous`` or ``blocking``, lines of fedsim) -> copies"""
    collectives: list[str] = field(default_factory=list)
    """what this rank asked of the other ranks, in order"""
    captures: list[bool] = field(default_factory=list)
    """of each recording of a graph, whether it succeeded"""
    with_sites: bool = False

    def kernel(self, name: str, launches: int = 1) -> None:
        """Count an operation."""
        self.kernels[name] += launches
        if self.with_sites:
            self.kernel_sites[name, site(1)] += launches

    def wait(self, why: str) -> None:
        """Count a wait."""
        self.waits[why, site()] += 1

    def copy(self, direction: str, manner: str) -> None:
        """Count a copy."""
        self.copies[direction, manner, site()] += 1

    def reading(self) -> Reading:
        """Return the totals so far."""
        to_host, to_device = (
            sum(count for (direction, _, _), count in self.copies.items() if direction == wanted)
            for wanted in ("to host", "to device")
        )
        return Reading(sum(self.kernels.values()), sum(self.waits.values()), to_host, to_device)

    def waits_since(self, earlier: Counter[tuple[str, str]]) -> str:
        """Return a line for each wait since ``earlier``, a copy of :attr:`waits`: for the message of a test."""
        return "\n".join(f"{n} x {why} at {where}" for (why, where), n in (self.waits - earlier).most_common())
