"""Micro-batches, so that ranks can share a batch: their sums are exact on any number of ranks.

The gradient of a batch, a mean over its images, is the weighted sum of the micro-batches' gradients. Normalisation
layers and losses see one micro-batch at a time, as with gradient accumulation; running statistics take one step for
each batch, to the mean over the micro-batches. The size of a micro-batch decides the result, and the number of ranks
does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter

import torch
from torch import Tensor, nn

from fedsim.core.exact import GRID, accumulate
from fedsim.strategy.rank_group import RankGroup
from fedsim.training.batch import Batch
from fedsim.training.flat_model import FlatModel
from fedsim.training.optimizer import LocalOptimizer

GRADIENT_GRID = 2.0**44
"""Grid points per unit of gradients. These are smaller than weights, which use :data:`~fedsim.core.exact.GRID`."""

LARGEST_GRADIENT = 2.0**6
"""Largest gradient of a micro-batch for which sums are exact: weights of micro-batches sum to 1, so that no sum of
micro-batches exceeds 2**50 grid points."""

LARGEST_CHANGE = 2.0**10
"""Largest change of running statistics in a micro-batch for which sums are exact, on the grid of uploads."""


def cut(num_images: int, size: int) -> list[slice]:
    """Cut a batch into micro-batches of ``size`` images, in order.

    A last one of one image joins the micro-batch before it: batch normalisation cannot train on one image.

    >>> [len(range(10)[part]) for part in cut(10, 4)], [len(range(9)[part]) for part in cut(9, 4)]
    ([4, 4, 2], [4, 5])
    """
    starts = list(range(0, num_images, size))
    if len(starts) > 1 and size > 1 and num_images - starts[-1] == 1:
        starts.pop()
    return [slice(*bounds) for bounds in zip(starts, [*starts[1:], num_images], strict=True)]


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch of a batch, on this rank."""

    number: int
    """among all micro-batches of the session"""
    weight: float
    """its share of the batch's images; 0: another rank counts it, and this rank has no micro-batch of the batch"""
    is_first: bool
    """whether it is this rank's first one of the batch"""
    is_last: bool
    """whether it is this rank's last one of the batch"""
    is_whole: bool = False
    """whether the batch is one micro-batch: then there is nothing to sum, and all ranks of the rank group do the
    same"""


class MicroBatches:
    """The micro-batches of a session's batches.

    Args:
        size: images in a micro-batch.
        rank_group: the ranks that share the batches; None: this one has them all.
        reseed: sets the random streams of layers, by the number of the micro-batch.
    """

    def __init__(self, size: int, rank_group: RankGroup | None, reseed: Callable[[int], None]) -> None:
        self.size, self.rank_group, self._reseed = size, rank_group, reseed
        self.number = 0
        """micro-batches of the session so far, of all ranks"""
        self.models: dict[str, FlatModel] = {}
        """the models that train in this session, by role"""
        self.excess: Tensor | None = None
        """largest value in a micro-batch so far, as a share of the largest that is exact; a scalar on the device. It
        does not depend on the rank that trains a micro-batch"""
        self.is_first = rank_group is None or rank_group.is_first
        """whether this rank counts what all ranks of the rank group do"""
        self._gradients: dict[int, _GradientSum] = {}
        self._statistics: list[_StatisticsSum] | None = None  # of the batch, while a micro-batch of it is trained

    @property
    def counts(self) -> bool:
        """Whether this rank counts the current micro-batch in the client's loss and accuracy."""
        micro_batch = self.current
        return self.is_first if micro_batch.is_whole else micro_batch.weight > 0

    def of(self, batch: Batch) -> Iterator[Batch]:
        """Yield this rank's micro-batches: every rank gets at least one."""
        self.settle()
        slices, first = cut(len(batch.labels), self.size), self.number
        self.number += len(slices)
        if len(slices) == 1:
            self.current = MicroBatch(first, 1.0, is_first=True, is_last=True, is_whole=True)
            self._reseed(first)
            yield batch
            return
        position, count = (self.rank_group.place, self.rank_group.size) if self.rank_group else (0, 1)
        indices = range(position, len(slices), count)
        statistics = [_StatisticsSum(model) for model in self.models.values()]
        self._statistics = statistics
        for index in indices or [0]:
            weight = len(batch.labels[slices[index]]) / len(batch.labels) if indices else 0.0
            is_first, is_last = index == position or not indices, not indices or index == indices[-1]
            self.current = MicroBatch(first + index, weight, is_first=is_first, is_last=is_last)
            self._reseed(first + index)
            for running in statistics:
                running.restart()
            self._count_images(self.counts)
            yield batch.changed(itemgetter(slices[index]))
            self.settle()

    def settle(self) -> None:
        """Add the running statistics of the last micro-batch; after the last one of a batch, sum them over the ranks.

        It is also called after training, because a method may leave the loop over batches after a step.
        """
        self._count_images(self.is_first)
        statistics = self._statistics
        if statistics is None:
            return
        for running in statistics:
            self._watch(running.add(self.current.weight), LARGEST_CHANGE)
        if not self.current.is_last:
            return
        self._statistics = None
        totals = [total for running in statistics for total in running.totals]
        if totals:
            joined = self._sum(torch.cat(totals))
            for total, part in zip(totals, joined.split([len(total) for total in totals]), strict=True):
                total.copy_(part)
        for running in statistics:
            running.finish()

    def backward(self, loss: Tensor, optimizer: LocalOptimizer) -> bool:
        """Back-propagate the loss of the current micro-batch; return whether gradients are those of the whole batch."""
        micro_batch = self.current
        if micro_batch.is_whole:
            loss.backward()
            return True
        gradient = self._gradients.setdefault(id(optimizer), _GradientSum(optimizer))
        if micro_batch.is_first:
            gradient.begin()
        loss.backward()
        self._watch(gradient.add(micro_batch.weight), LARGEST_GRADIENT)
        if not micro_batch.is_last:
            return False
        self._sum(gradient.total)
        if self.rank_group is not None:
            self.rank_group.sum_(gradient.num_gradients)
        gradient.finish()
        return True

    def _count_images(self, counts: bool) -> None:
        """Let passes count on this rank, or not."""
        for model in self.models.values():
            for work in model.work.values():
                work.counts_images = counts

    def _watch(self, tensors: Sequence[Tensor], limit: float) -> None:
        """Keep the largest addend of a micro-batch, as a share of the ``limit``; the host does not wait."""
        if tensors:
            excess = nn.utils.get_total_norm(tensors, float("inf")) / limit
            self.excess = excess if self.excess is None else torch.maximum(self.excess, excess)

    def _sum(self, total: Tensor) -> Tensor:
        return total if self.rank_group is None else self.rank_group.sum_(total)


class _GradientSum:
    """The gradient of a batch, summed over its micro-batches: one vector, as each operation is a launch on GPUs."""

    def __init__(self, optimizer: LocalOptimizer) -> None:
        self.parameters = optimizer.parameters
        self._sizes = [parameter.numel() for parameter in self.parameters]
        self.total = torch.zeros(sum(self._sizes), dtype=torch.float64, device=optimizer.flat.buffer.device)
        self.num_gradients = torch.zeros(len(self._sizes), dtype=torch.float64)
        """for each parameter, the number of micro-batches that gave a gradient; on the CPU"""
        self._before: list[Tensor | None] = []

    def begin(self) -> None:
        """Begin a batch: set the gradients of earlier batches of the same step aside."""
        self.total.zero_()
        self.num_gradients.zero_()
        self._before = [parameter.grad for parameter in self.parameters]
        self._clear()

    def add(self, weight: float) -> list[Tensor]:
        """Add a micro-batch's gradients, clear those of the parameters, and return them."""
        gradients = [parameter.grad for parameter in self.parameters]
        self._clear()
        present = [gradient.flatten() for gradient in gradients if gradient is not None]
        if len(present) == len(gradients):
            present = [torch.cat(present)]
            accumulate(self.total, weight, present[0], GRADIENT_GRID)
            self.num_gradients += 1
            return present
        for number, (gradient, part) in enumerate(zip(gradients, self.total.split(self._sizes), strict=True)):
            if gradient is not None:
                accumulate(part, weight, gradient.flatten(), GRADIENT_GRID)
                self.num_gradients[number] += 1
        return present

    def finish(self) -> None:
        """Set the parameters' gradients: the batch's, plus those of earlier batches of the same step."""
        counts, parts = self.num_gradients.tolist(), (self.total / GRADIENT_GRID).to(torch.float32).split(self._sizes)
        earlier, added = [], []
        for parameter, part, count, before in zip(self.parameters, parts, counts, self._before, strict=True):
            gradient = part.view_as(parameter) if count else None
            if before is not None and gradient is not None:
                earlier.append(before)
                added.append(gradient)
            parameter.grad = gradient if before is None else before
        if earlier:
            torch._foreach_add_(earlier, added)

    def _clear(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


class _StatisticsSum:
    """The change of a model's running statistics in a batch: the mean over micro-batches, each from the same start."""

    def __init__(self, model: FlatModel) -> None:
        self._views = model.flat.running
        self._start = [view.clone() for view in self._views]
        self.totals = [torch.zeros_like(view, dtype=torch.float64) for view in self._views]

    def restart(self) -> None:
        for view, start in zip(self._views, self._start, strict=True):
            view.copy_(start)

    def add(self, weight: float) -> list[Tensor]:
        """Add the changes in a micro-batch, and return them."""
        changes = [view - start for view, start in zip(self._views, self._start, strict=True)]
        for total, change in zip(self.totals, changes, strict=True):
            accumulate(total, weight, change)
        return changes

    def finish(self) -> None:
        for view, start, total in zip(self._views, self._start, self.totals, strict=True):
            view.copy_(start + total / GRID)
