"""Sums of large tables by ranks of one machine, in memory that they share: gloo sends them through sockets."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from fedsim.core.owned_folders import make_owned_folder, remove_owned_folder
from fedsim.core.shared import is_roomy, memory_folder, shared_rows, slow_folder

LEAST = 2**16
"""numbers in a table for which two meetings of all ranks cost less than gloo's copies"""

_PART = 2**20  # numbers that are summed at a time: 8 MB


class MemorySum:
    """Sums float64 tables on CPUs. All ranks of the machine create theirs together.

    Each rank writes its numbers; then each adds up a share of the table over all ranks, in their order. Two areas are
    used in turn: a slow rank may still read one while other ranks write into the other.

    Args:
        rank: of this process.
        ranks: their number.
        exchange: sums a small float64 table over the ranks in place; no rank leaves before all have come.
        broadcast: returns rank 0's text.
    """

    def __init__(
        self, rank: int, ranks: int, exchange: Callable[[Tensor], object], broadcast: Callable[[str], str]
    ) -> None:
        self._rank, self._ranks, self._exchange, self._turn = rank, ranks, exchange, 0
        shape = (2, ranks + 1, _PART)  # the last row is the sum
        folder = memory_folder() / f"fedsim-sum-{broadcast(secrets.token_hex(8))}"
        if rank == 0:
            with suppress(OSError):  # without the folder there is no file: then no rank sums in memory
                make_owned_folder(folder)
        try:
            self._areas = self._open(folder / "areas", shape)
        finally:
            if rank == 0:
                remove_owned_folder(folder)  # the file exists as long as a process has it open

    def _open(self, path: Path, shape: tuple[int, int, int]) -> Tensor | None:
        """Return the areas; None, on all ranks, if there is no room, or a rank has no access to rank 0's file."""
        areas = None
        for is_own_turn in (self._rank == 0, self._rank > 0):  # rank 0 makes the file
            if is_own_turn and (_has_room(8.0 * math.prod(shape)) if self._rank == 0 else path.exists()):
                areas = shared_rows(path, shape)
            num_open = torch.tensor([float(areas is not None)], dtype=torch.float64)
            self._exchange(num_open)
        return areas if num_open.item() == self._ranks else None

    def sum_(self, table: Tensor) -> bool:
        """Sum a contiguous float64 table over the ranks in place; return False, on all ranks, if there is no memory."""
        if self._areas is None:
            return False
        for part in table.view(-1).split(_PART):
            area, size = self._areas[self._turn], len(part)
            self._turn = 1 - self._turn
            area[self._rank, :size] = part
            self._meet()
            start, stop = (size * rank // self._ranks for rank in (self._rank, self._rank + 1))
            torch.sum(area[: self._ranks, start:stop], dim=0, out=area[self._ranks, start:stop])
            self._meet()
            part.copy_(area[self._ranks, :size])
        return True

    def _meet(self) -> None:
        self._exchange(torch.zeros(1, dtype=torch.float64))


def _has_room(num_bytes: float) -> bool:
    """Whether the folder in memory has so much room; a temporary folder on a disk does not count."""
    return memory_folder() != slow_folder() and is_roomy(num_bytes)
