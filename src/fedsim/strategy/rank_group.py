"""Ranks of one machine that train a client together."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedsim.strategy.strategy import FederatedStrategy


@dataclass(frozen=True)
class RankGroup:
    """The ranks that train a client together, including this one: each trains some of its micro-batches."""

    strategy: FederatedStrategy
    ranks: range
    """by their numbers in the run"""

    @property
    def size(self) -> int:
        """Number of ranks, 2 or more."""
        return len(self.ranks)

    @property
    def place(self) -> int:
        """This rank's place in the group, from 0."""
        return self.strategy.global_rank - self.ranks.start

    @property
    def is_first(self) -> bool:
        """Whether this rank sends and stores the results."""
        return self.place == 0

    def meet(self) -> None:
        """Wait for the ranks of the group; all of them call it."""
        self.strategy.meet_within(self.ranks)

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over the ranks in place; all of them call it."""
        return self.strategy.sum_within_(tensor, self.ranks)
