"""One visit of a client to the resident model: batches, reports, random streams."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fedsim.training.labels.source import LabelSource, PseudoLabels
    from fedsim.training.optimizer import LocalOptimizer
    from fedsim.training.settings import LocalTraining


class BatchReport(NamedTuple):
    """Progress within a client's round, for progress displays."""

    client: str
    done: int
    """batches of this local epoch that are done"""
    total: int
    """batches of this local epoch"""
    share: float
    """of the client's whole round that is done, in (0, 1]"""
    loss: Tensor
    """of the last batch; reading it waits for the device, so do that rarely"""


class Tally:
    """Sums over a client's batches. They stay on the device until somebody reads them, so no batch waits."""

    def __init__(self) -> None:
        self._losses: list[Tensor] = []
        self._guesses: list[Tensor] = []
        self._labels: list[Tensor] = []

    def add(self, loss: Tensor, guesses: Tensor, labels: Tensor) -> None:
        """Count one batch: mean loss (scalar), guesses [B] and labels [B], of identities or of clusters."""
        self._losses.append(loss)
        self._guesses.append(guesses)
        self._labels.append(labels)

    def precision(self, batches: int) -> float:
        """Return the share of right guesses in the last ``batches`` batches; waits for the device."""
        guesses, labels = torch.cat(self._guesses[-batches:]), torch.cat(self._labels[-batches:])
        return float((guesses == labels).double().mean())

    def read(self, more: Sequence[Tensor]) -> tuple[float, float, float, list[float]]:
        """Wait for the device, once; return sum of losses over images, correct images, images, and ``more`` scalars."""
        if not self._losses:
            return 0.0, 0.0, 0.0, torch.stack([*more]).tolist() if more else []
        correct = (torch.cat(self._guesses) == torch.cat(self._labels)).sum(dtype=torch.float32)
        correct, *values = torch.stack([correct, *self._losses, *more]).tolist()
        sizes = [len(labels) for labels in self._labels]
        loss = sum(mean * size for mean, size in zip(values, sizes, strict=False))
        return loss, correct, float(sum(sizes)), values[len(sizes) :]


class Outcome(NamedTuple):
    """The results of a visit."""

    loss: float
    """sum over images"""
    correct: float
    images: float
    seconds: float
    facts: Mapping[str, float]
    """other numbers, by name"""


class Visit:
    """A client's stay at the resident model: one round. Not a module, because attributes of modules are slow to set.

    Args:
        stream: purpose, device -> a random stream of this client and round.
        augments: whether the augmentation is random.
        device: of the images.
        work: share of the local work to do.
        precision: of forward passes.
        listener: called after every batch.
        source: of the labels.
    """

    def __init__(
        self,
        stream: Callable[[str, torch.device | str], torch.Generator],
        augments: bool,
        device: torch.device,
        *,
        work: float,
        precision: str,
        listener: Callable[[BatchReport], None],
        source: LabelSource,
    ) -> None:
        self.work, self.precision, self.listener = work, precision, listener
        self.started = time.perf_counter()
        self.tally = Tally()
        self.progress = (0, 0, 0)
        """local epoch, batches of it that have begun, batches of it in all"""
        self.optimizers: list[LocalOptimizer] = []
        """of replicas that train"""
        self.source = source
        self.batch_stream = stream("batches", "cpu")
        self._stream, self._augments, self._device = stream, augments, device
        self._augment_streams: dict[int, torch.Generator] = {}
        self._steps_left = 0

    @property
    def pseudo(self) -> PseudoLabels | None:
        """Clusters of the current local epoch, of clients without identities."""
        return self.source.pseudo

    def within_steps(self, epoch: int, num_batches: int, settings: LocalTraining) -> int:
        """Return how many of an epoch's batches may be used before ``local_steps`` steps are taken."""
        if settings.local_steps is None:
            return num_batches
        if epoch == 0:  # also of a second training in the same visit
            self._steps_left = max(1, int(self.work * settings.local_steps))
        count = min(num_batches, self._steps_left * settings.accumulate)
        self._steps_left -= math.ceil(count / settings.accumulate)
        return count

    @cached_property
    def generated_stream(self) -> torch.Generator:
        """The random stream that puts generated images into batches; most clients have none."""
        return self._stream("generated images", "cpu")

    def augment_stream(self, view: int) -> torch.Generator | None:
        """Return the random stream of one view = 0, 1, ... of the images; None if nothing is random."""
        if not self._augments:
            return None
        if view not in self._augment_streams:
            self._augment_streams[view] = self._stream(f"augment {view}" if view else "augment", self._device)
        return self._augment_streams[view]
