"""Running loss and accuracy of a client, kept on the device until read."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from fedsim.strategy.rank_group import RankGroup
from fedsim.training.micro_batches import MicroBatches


class RunningMetrics:
    """Sums over a client's batches. They stay on the device until they are read, so the host does not wait for batches.

    Where batches are cut, each of the ``micro_batches`` counts like a batch, also those that other ranks train.
    """

    def __init__(self, micro_batches: MicroBatches | None = None) -> None:
        self._micro_batches = micro_batches
        self._numbers: list[int] = []  # of the micro-batches, if batches are cut
        self._losses: list[Tensor] = []
        self._guesses: list[Tensor] = []
        self._labels: list[Tensor] = []
        self._parts: list[Sequence[Tensor]] = []
        self._num_parts = 0
        self.parts: list[float] = []
        """after :meth:`read`: mean over images of each part of the loss; none if it has no parts"""
        self.excess = 0.0
        """after :meth:`read`: see :attr:`MicroBatches.excess`"""

    def add(self, loss: Tensor, guesses: Tensor, labels: Tensor, parts: Sequence[Tensor] = ()) -> None:
        """Count a batch: mean loss (scalar) and its parts; guesses [B], labels [B], of identities or of clusters."""
        if self._micro_batches is not None:
            self._num_parts = len(parts)
            if not self._micro_batches.counts:
                return
            number = self._micro_batches.current.number
            assert number not in self._numbers[-1:], (
                "a micro-batch is counted twice: the method must require whole_batches"
            )
            self._numbers.append(number)
        self._losses.append(loss)
        self._guesses.append(guesses)
        self._labels.append(labels)
        self._parts.append(parts)

    def hits(self, batches: int) -> list[tuple[int, int]]:
        """Return (right guesses, images) of each of the last ``batches`` batches; waits for the device, once."""
        pairs = list(zip(self._guesses[-batches:], self._labels[-batches:], strict=True))
        right = torch.stack([(guesses == labels).sum() for guesses, labels in pairs]).tolist()
        return [(count, len(labels)) for count, (_, labels) in zip(right, pairs, strict=True)]

    def right(self) -> Tensor:
        """Return the number of correct guesses and the number of images, [2] float64; the host does not wait."""
        images = sum(len(labels) for labels in self._labels)
        device = self._labels[0].device if self._labels else None
        counts = torch.full((2,), float(images), dtype=torch.float64, device=device)
        if self._labels:
            counts[0] = (torch.cat(self._guesses) == torch.cat(self._labels)).sum()
        if self._micro_batches is not None and self._micro_batches.rank_group is not None:
            counts = self._micro_batches.rank_group.sum_(counts.cpu())  # a rank without micro-batches has no device
        return counts

    def read(self, more: Sequence[Tensor]) -> tuple[float, float, float, list[float]]:
        """Wait for the device, once; return sum of losses over images, correct images, images, and ``more`` scalars."""
        right: list[Tensor] = []
        if self._losses:
            right = [(torch.cat(self._guesses) == torch.cat(self._labels)).sum(dtype=torch.float32)]
        columns = [self._losses, *(list(column) for column in zip(*self._parts, strict=True))] if self._losses else []
        excess = (
            [] if self._micro_batches is None or self._micro_batches.excess is None else [self._micro_batches.excess]
        )
        scalars = [*right, *itertools.chain(*columns), *more, *excess]
        values = torch.stack(scalars).tolist() if scalars else []
        self.excess = values.pop() if excess else 0.0
        correct, values = sum(values[: len(right)]), values[len(right) :]
        sizes = [float(len(labels)) for labels in self._labels]
        means = [values[start : start + len(sizes)] for start in range(0, len(columns) * len(sizes), len(sizes) or 1)]
        if self._micro_batches is not None and self._micro_batches.rank_group is not None:
            correct, sizes, means = self._of_all_ranks(
                self._micro_batches.rank_group, self._micro_batches.number, correct, sizes, means
            )
        sums = [sum(mean * size for mean, size in zip(part, sizes, strict=True)) for part in means]
        loss, *parts = sums or [0.0]
        self.parts = [part / sum(sizes) for part in parts]
        return loss, correct, sum(sizes), values[len(columns) * len(self._losses) :]

    def _of_all_ranks(
        self,
        rank_group: RankGroup,
        num_micro_batches: int,
        correct: float,
        sizes: list[float],
        means: list[list[float]],
    ) -> tuple[float, list[float], list[list[float]]]:
        """Return these numbers of all ranks of a rank group, in the order in which a single rank would have them."""
        table, scalars = (
            torch.zeros(n, dtype=torch.float64)
            for n in ((2 + self._num_parts) * num_micro_batches, 1 + rank_group.size)
        )
        rows = table.view(2 + self._num_parts, num_micro_batches)
        if sizes:
            rows[:, self._numbers] = torch.tensor([sizes, *means], dtype=torch.float64)
        scalars[0], scalars[1 + rank_group.place] = correct, self.excess
        total = rank_group.sum_(torch.cat([table, scalars]))
        table.copy_(total[: len(table)])
        correct, *excess = total[len(table) :].tolist()
        self.excess = max(excess)
        sizes, *means = rows[:, rows[0] > 0].tolist()
        return correct, sizes, means
