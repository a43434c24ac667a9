"""One session of a client in the rank's model: batches, reports, random streams."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from fedsim.core.transfer import ahead, send
from fedsim.data.batches import grouped, limited, shares_of_steps
from fedsim.strategy.rank_group import RankGroup
from fedsim.training.batch import Batch, ClientImages
from fedsim.training.flat_model import FlatModel
from fedsim.training.graphs import Replay, why_plain
from fedsim.training.labels.labeller import Labeller, PseudoLabels
from fedsim.training.micro_batches import LARGEST_CHANGE, LARGEST_GRADIENT, MicroBatches
from fedsim.training.optimizer import LocalOptimizer
from fedsim.training.running_metrics import RunningMetrics
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
    images: int
    """of all its batches so far, as if each were full"""


class Outcome(NamedTuple):
    """The results of a session."""

    loss: float
    """sum over images"""
    correct: float
    images: float
    seconds: float
    facts: Mapping[str, float]
    """other numbers, by name"""
    signals: Mapping[str, float | Sequence[float]] = MappingProxyType({})
    """the numbers that the method measures, see :attr:`Upload.signals`"""


class ClientSession:
    """The local training of one client in one round.

    It owns what ends with the round: running metrics, progress, optimizers, micro-batches, captured steps and the
    random streams of batches. The :class:`Client` owns what lasts: data, settings, private state and kept tensors. A
    session is no ``nn.Module``, because attributes of modules are slow to set.

    ``stream`` returns a random stream of this client and round, by purpose and device. ``reseed`` sets the random
    streams of layers, for each micro-batch of a batch. ``report`` is called with the loss of each batch, a scalar.
    ``poison`` changes the batches of an attacker. ``shown_round``: batches have cameras and this round; None: without.
    See :meth:`Client.begin_round` for the other arguments.
    """

    def __init__(
        self,
        images: ClientImages,
        settings: LocalTraining,
        labeller: Labeller,
        stream: Callable[[str, torch.device | str], torch.Generator],
        *,
        work: float,
        precision: str,
        report: Callable[[Tensor], None],
        rank_group: RankGroup | None = None,
        reseed: Callable[[int], None] = lambda _: None,
        poison: Callable[[Batch], Batch] | None = None,
        shown_round: int | None = None,
    ) -> None:
        self.started = time.perf_counter()
        self.labeller, self.work, self.precision, self.report = labeller, work, precision, report
        size = settings.micro_batch_of(len(images.labels))
        self.micro_batches = None if size is None else MicroBatches(size, rank_group, reseed)
        """the micro-batches of its batches; None: batches are not cut"""
        self.metrics = RunningMetrics(self.micro_batches)
        self.progress = (0, 0, 0)
        """local epoch, number of its batches that have begun, number of its batches"""
        self.share = 1.0
        """share of the images of an optimizer step that are in the current batch"""
        self.optimizers: dict[str, LocalOptimizer] = {}
        """optimizers of the models that train, by the prefix of their tensors' names in the client's store"""
        self._copies: torch.cuda.Stream | None = None
        self.replay: Replay | None = None
        """captures and replays steps; None: steps are plain"""
        self.batch_stream = stream("batches", "cpu")
        self._images, self._settings, self._stream, self._poison = images, settings, stream, poison
        self.shown_round = shown_round
        self._augment_streams: dict[int, torch.Generator] = {}
        self._steps_left = 0

    def use_prefetch_and_graphs(self, model: FlatModel, session_name: str) -> None:
        """Copy images ahead, and replay steps of ``model``, where the settings require it and it is possible.

        ``session_name`` contains client and round, for messages.
        """
        if self._settings.prefetch and model.device.type == "cuda" and self._images.pixels.is_far:
            self._copies = model.copy_stream
        if self._settings.graph and why_plain(self._settings, len(self._images.labels), model.device) is None:
            self.replay = None if model.graph_memory.gave_up else Replay(self, model, session_name)

    @property
    def pseudo(self) -> PseudoLabels | None:
        """Clusters of the current local epoch, for clients without identities."""
        return self.labeller.pseudo

    @property
    def is_first(self) -> bool:
        """Whether this rank sends and stores the results: in a rank group, only the first rank does."""
        return self.micro_batches is None or self.micro_batches.is_first

    @property
    def inexact(self) -> str | None:
        """The reason why sums of micro-batches are not exact; None: they are. Read the running metrics before."""
        if self.metrics.excess <= 1:
            return None
        return (
            f"a micro-batch has a gradient beyond {LARGEST_GRADIENT:.0f}, or moves running statistics by more "
            f"than {LARGEST_CHANGE:.0f}, where sums of micro-batches are no longer exact"
        )

    def batches(self, epoch: int, local_epochs: int, limit: float | None, views: int) -> Iterator[Batch]:
        """Yield the batches of a local epoch, or this rank's micro-batches of them; see :meth:`Client.batches`."""
        for optimizer in self.optimizers.values():
            optimizer.begin_epoch(epoch)
        labels, order = self.plan(epoch, local_epochs, limit)
        shares = shares_of_steps(order, self._settings.accumulate)
        for position, batch in enumerate(self.read(order, labels, views), start=1):
            self.progress, self.share = (epoch, position, len(order)), shares[position - 1]
            if self.micro_batches is None:
                yield batch
            else:
                yield from self.micro_batches.of(batch)
        self.share = 1.0

    def plan(self, epoch: int, local_epochs: int, limit: float | None) -> tuple[Tensor, list[Tensor]]:
        """Return the labels of all images, and the positions of the images of each batch of a local epoch."""
        share = min(max(self.work * local_epochs - epoch, 0.0), 1.0)
        labels, order = self.labeller.plan(self.batch_stream, share > 0)
        order = limited(order, limit)
        count = max(int(share * len(order) + 1e-9), min(1, len(order)) if epoch == 0 else 0)
        return labels, order[: self.within_steps(epoch, count)]

    def within_steps(self, epoch: int, num_batches: int) -> int:
        """Return the number of an epoch's batches that are used until ``local_steps`` steps are taken."""
        settings = self._settings
        if settings.local_steps is None:
            return num_batches
        if epoch == 0:  # also of a second training in the same session
            self._steps_left = max(1, int(self.work * settings.local_steps))
        count = min(num_batches, self._steps_left * settings.accumulate)
        self._steps_left -= math.ceil(count / settings.accumulate)
        return count

    def read(self, batches: list[Tensor], labels: Tensor, views: int) -> Iterator[Batch]:
        """Yield batches, given as positions in ``labels``, with ``views`` augmented versions of each image."""
        images = self._images
        groups = grouped(batches, images.pixels.num_values * self._settings.batch_of(len(images.labels)))
        indices = [torch.cat(group) for group in groups]
        rows = [self.labeller.rows(index) for index in indices]
        real = images.pixels.batches(rows)
        if self._copies is not None:
            real = ahead(real, self._copies)
        read: Iterator[tuple[Tensor, Tensor | None]] = zip(real, itertools.repeat(None))
        if images.mixture is not None:
            read = images.mixture.mix(real, [images.labels[row] for row in rows], self._generated_stream)
        for group, index, row, (pixels, targets) in zip(groups, indices, rows, read, strict=True):
            sizes = [len(batch) for batch in group]
            on_host = labels.index_select(0, index)
            batch_labels = send(on_host, images.device).split_with_sizes(sizes)
            soft = [None] * len(sizes) if targets is None else targets.split_with_sizes(sizes)
            augmented = [images.augmentation(pixels, self._augment_stream(v), sizes).split(sizes) for v in range(views)]
            shown = self._cameras_and_rows(row, sizes)
            values = zip(batch_labels, on_host.split(sizes), soft, shown, *augmented, strict=True)
            for label, host_label, target, (camera, place), image, *further in values:
                batch = Batch(image, label, tuple(further), target, camera, self.shown_round or 0, host_label, place)
                yield batch if self._poison is None else self._poison(batch)._replace(on_host=None)

    def _cameras_and_rows(self, rows: Tensor, sizes: list[int]) -> Sequence[Iterable[Tensor | None]]:
        """Return the cameras and the positions of the images of each batch, on the device."""
        if self.shown_round is None:
            return [(None, None)] * len(sizes)
        pairs = torch.stack([self._images.cameras.index_select(0, rows), rows])
        shown: Sequence[Tensor] = send(pairs, self._images.device).split(sizes, dim=1)
        return shown

    @cached_property
    def _generated_stream(self) -> torch.Generator:
        """The random stream that puts generated images into batches."""
        return self._stream("generated images", "cpu")

    def _augment_stream(self, view: int) -> torch.Generator | None:
        """Return the random stream of one view = 0, 1, ... of the images; None if nothing is random."""
        if not self._images.augmentation.is_random:
            return None
        if view not in self._augment_streams:
            purpose = f"augment {view}" if view else "augment"
            self._augment_streams[view] = self._stream(purpose, self._images.device)
        return self._augment_streams[view]
