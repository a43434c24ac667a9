"""The ranks of one machine: they share memory, so any of them can train any of the machine's clients."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch

from fedsim.core.errors import ConfigError
from fedsim.core.owned_folders import make_owned_folder, remove_owned_folder
from fedsim.core.room import name_of_cores, usable_cores
from fedsim.core.shared import Counter, is_roomy, memory_folder, slow_folder
from fedsim.strategy.rank_group import RankGroup
from fedsim.strategy.strategy import FederatedStrategy

T = TypeVar("T")


class Machine:
    """This rank's machine; all ranks of a run create theirs together, by :func:`machine_of`.

    ``ranks`` are the ranks of the machine, by their numbers in the run.
    """

    def __init__(self, strategy: FederatedStrategy, ranks: range) -> None:
        self.strategy, self.ranks = strategy, ranks
        self._queues = 0
        with self.folder() as folder:
            self._counter = Counter(folder / "queue")

    @contextmanager
    def folder(self, num_bytes: float = 0.0, in_memory: bool = True) -> Iterator[Path]:
        """Yield a new folder that all ranks of the machine share during a block; all ranks of the run enter the block.

        The folder is in memory if there is room for ``num_bytes``. It is removed after the block; files in it that a
        process has opened stay usable. If this process is ended in the block, see :mod:`fedsim.core.owned_folders`.

        Raises:
            ConfigError: if a rank has no access to it.
        """
        name, size = self.strategy.broadcast(secrets.token_hex(8)), len(self.ranks)
        rank, machine = self.strategy.global_rank, self.ranks.start // size
        choices = torch.zeros(self.strategy.world_size // size, dtype=torch.float64)
        is_first = rank == self.ranks.start
        if is_first and in_memory and is_roomy(num_bytes):
            choices[machine] = 1
        self.strategy.exchange([choices])
        # machines may have a disk in common
        folder = (memory_folder() if choices[machine] else slow_folder()) / f"fedsim-{name}-{machine}"
        try:
            with self.strategy.together():
                if is_first:
                    make_owned_folder(folder)
            with self.strategy.together():
                if not folder.is_dir():
                    raise ConfigError(
                        f"rank {rank} cannot access {folder.parent} of rank {self.ranks.start} on the same machine; "
                        "start all ranks of a machine in one container, or their containers with --ipc=host"
                    )
            yield folder
            self.meet()
        finally:
            if is_first:
                remove_owned_folder(folder)

    @property
    def place(self) -> int:
        """This rank's place on the machine, from 0."""
        return self.strategy.global_rank - self.ranks.start

    @property
    def number(self) -> int:
        """This machine's place in the run, from 0."""
        return self.ranks.start // len(self.ranks)

    def open_rank_groups(self, blocks: Sequence[Sequence[range]]) -> None:
        """Open the rank groups of a round that there are not yet; all ranks of the run call it with the same blocks.

        ``blocks``: for each machine of the run, its rank groups, as ranges of places on the machine.
        """
        size = len(self.ranks)
        self.strategy.open_groups(
            [
                range(size * number + block.start, size * number + block.stop)
                for number, of_machine in enumerate(blocks)
                for block in of_machine
            ]
        )

    def rank_group(self, places: range) -> RankGroup:
        """Return the rank group of one of this machine's blocks."""
        return RankGroup(self.strategy, range(self.ranks.start + places.start, self.ranks.start + places.stop))

    def meet(self) -> None:
        """Wait for all ranks of the run."""
        self.strategy.exchange([])

    def queue(self, items: Sequence[T]) -> Iterator[T]:
        """Yield the items that this rank takes, one by one; all ranks of the machine call it with the same items.

        Each item, in order, goes to the first rank that is free. Ranks meet between two queues.
        """
        self._queues += 1
        return self._taken(self._queues, items)

    def _taken(self, queue: int, items: Sequence[T]) -> Iterator[T]:
        while (number := self._counter.take(queue)) < len(items):
            yield items[number]


def share_of_cores(strategy: FederatedStrategy) -> int:
    """Return the whole cores of this rank's share, at least 1; all ranks of the run call it.

    Ranks with the same cores share them equally. Ranks that are bound to cores of their own, as Slurm does, have all of
    those.
    """
    names = torch.zeros(strategy.world_size, dtype=torch.float64)
    names[strategy.global_rank] = name_of_cores()
    strategy.exchange([names])
    sharers = int((names == names[strategy.global_rank]).sum())
    return max(1, int(usable_cores() / sharers))


def machine_of(strategy: FederatedStrategy) -> Machine | None:
    """Return this rank's machine; all ranks call it together. None: ranks share no clients."""
    size = strategy.num_processes
    if size == 1 or strategy.world_size % size:
        return None
    first = strategy.global_rank // size * size
    return Machine(strategy, range(first, first + size))
