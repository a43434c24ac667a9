"""Training steps as CUDA graphs: recorded once in a session, then replayed, each by one launch of the host.

A step of ResNet-50 is about 500 launches, for which the host needs as long as a large GPU for 32 images. A graph holds
the addresses of tensors, so all that a step reads must stay where it is until the session ends: weights and moments do,
the batch is copied to where the recorded one was, and the loss and the guesses are copied out. Tensors of the session
(received model, mask, random stream) are in the graph, too: so each session records its own.

Numbers of the host are in a graph as they were: shapes, learning rates. Where one changes, the step is recorded anew.
Learning rates as tensors would need no new graph, but torch's SGD reads them back, which waits, and its fused Adam
rounds them to float32: the numbers would not be those of the plain step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedsim.training.batch import Batch
from fedsim.training.flat_model import FlatModel
from fedsim.training.optimizer import LocalOptimizer
from fedsim.training.running_metrics import RunningMetrics
from fedsim.training.settings import ELEMENTWISE, LocalTraining

log = logging.getLogger(__name__)

WARM_UP = 3
"""Plain steps before a model's first recording: libraries choose their kernels, optimizers make their moments. In later
sessions one is enough."""


class Visiting(Protocol):
    """The view that recordings have of a session."""

    metrics: RunningMetrics
    report: Callable[[Tensor], None]
    """is told the loss of each batch, a scalar"""
    optimizers: dict[str, LocalOptimizer]


def why_plain(settings: LocalTraining, num_images: int, device: torch.device) -> str | None:
    """Return why a client with so many images on ``device`` keeps plain steps; None: its steps can be recorded."""
    if device.type != "cuda":
        return "only GPUs have graphs"
    if settings.clusters:
        return "clusters change with each local epoch"
    if settings.micro_batch_of(num_images) is not None:
        return "micro_batch cuts its batches"
    if settings.accumulate > 1:
        return "accumulate makes batches without a step"
    made = type(settings.optimizer([torch.nn.Parameter(torch.zeros(1))]))
    if made not in ELEMENTWISE:
        return f"{made.__name__} may remember things on the host"
    return None


class _Noted(RunningMetrics):
    """Stands in for the running metrics while a step is recorded: its tensors get their values with each replay."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Tensor, Tensor, Tensor, Sequence[Tensor]]] = []

    def add(self, loss: Tensor, guesses: Tensor, labels: Tensor, parts: Sequence[Tensor] = ()) -> None:
        """Note a batch."""
        self.calls.append((loss, guesses, labels, parts))


@dataclass(frozen=True)
class _Recording:
    """A recorded step, and what the host has to do beside it."""

    key: object
    """equal for all steps that it can stand for"""
    graph: torch.cuda.CUDAGraph
    batch: Batch
    """where the graph reads its images and labels"""
    metrics: _Noted
    losses: list[Tensor]
    """that are reported"""
    steps: list[tuple[LocalOptimizer, int]]
    """of each optimizer"""


class Replay:
    """The steps of one session: plain at first, then recorded, then replayed, as long as nothing of the host changes.

    Args:
        session: counts batches.
        model: whose steps they are; the graphs of its sessions share a pool of memory.
        who: client and round, for the line that says why steps stay plain.
    """

    def __init__(self, session: Visiting, model: FlatModel, who: str) -> None:
        self._session, self._model, self._memory, self._who = session, model, model.graph_memory, who
        self._recording: _Recording | None = None
        self._last: object = None
        """key of the last step, if that was plain"""
        self._alike = 0
        """plain steps of that key until now"""
        self._by: object = None

    def take(self, batch: Batch, by: object, step: Callable[[Batch], None]) -> None:
        """Train on a batch: ``step`` does so, as ``by`` says, which is the same object as long as it does the same."""
        if by is not self._by:
            self._by, self._last, self._recording = by, None, None
        key = (_layout(batch), [(o.rates, o.num_resets) for o in self._session.optimizers.values()])
        if self._recording is not None and self._recording.key == key:
            for mine, given in zip(_tensors(self._recording.batch), _tensors(batch), strict=True):
                mine.copy_(given)
            self._replay(self._recording)
            return
        if key != self._last:
            self._last, self._alike = key, 0
        enough = WARM_UP if self._memory.last is None else 1
        if self._alike >= enough and not self._memory.gave_up and (new := self._record(key, batch, step)) is not None:
            self._recording = new
            self._replay(new)
            return
        self._alike += 1
        self._memory.on_its_stream(lambda: step(batch))

    def _record(self, key: object, batch: Batch, step: Callable[[Batch], None]) -> _Recording | None:
        """Record a step without taking it; None, and a line, if that is not possible."""
        session, own = self._session, _copied(batch)
        before = {optimizer: optimizer.num_steps for optimizer in session.optimizers.values()}
        metrics, report, noted, losses = session.metrics, session.report, _Noted(), list[Tensor]()
        session.metrics, session.report = noted, losses.append
        try:
            graph = self._memory.record(self._model.generators, lambda: step(own))
        except Exception as error:  # whatever a method does: its plain step shows whether that is a mistake
            for optimizer in before:
                optimizer.forget_gradients()
            self._memory.gave_up = True
            log.warning("model.client.graph: steps of %s and later ones stay plain: %s", self._who, _first_line(error))
            return None
        finally:
            session.metrics, session.report = metrics, report
            steps = [(optimizer, optimizer.num_steps - count) for optimizer, count in before.items()]
            for optimizer, count in before.items():
                optimizer.num_steps = count
        return _Recording(key, graph, own, noted, losses, steps)

    def _replay(self, recording: _Recording) -> None:
        """Let the GPU take the recorded step, and do the host's part of it."""
        self._last = None
        recording.graph.replay()
        for optimizer, steps in recording.steps:
            optimizer.num_steps += steps
        for loss, guesses, labels, parts in recording.metrics.calls:  # copies: the next replay overwrites them
            self._session.metrics.add(loss.clone(), guesses.clone(), labels.clone(), [part.clone() for part in parts])
        for loss in recording.losses:
            self._session.report(loss.clone())


def _tensors(batch: Batch) -> list[Tensor]:
    return [batch.images, batch.labels, *batch.views, *([] if batch.targets is None else [batch.targets])]


def _layout(batch: Batch) -> object:
    """Return what must be equal for a batch to take another's place."""
    return [(tensor.shape, tensor.stride()) for tensor in _tensors(batch)], len(batch.views)


def _copied(batch: Batch) -> Batch:
    """Return a batch with tensors of its own: those of a batch are often views of a longer one."""
    views = tuple(view.clone() for view in batch.views)
    return Batch(
        batch.images.clone(), batch.labels.clone(), views, None if batch.targets is None else batch.targets.clone()
    )


def _first_line(error: BaseException) -> str:
    """Return the beginning of the first error: the end of a recording that went wrong raises one of its own."""
    while error.__context__ is not None:
        error = error.__context__
    return (str(error).splitlines() or [type(error).__name__])[0]
