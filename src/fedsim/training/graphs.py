"""Training steps as CUDA graphs: captured once in a session, then replayed, each by one launch of the host.

A step of ResNet-50 is about 500 launches, for which the host needs as long as a large GPU for 32 images. A graph holds
the addresses of tensors, so all tensors that a step reads must keep their place until the session ends. Weights and
moments do; the batch is copied into the captured one, and the loss and the guesses are copied out. Tensors of the
session (received model, mask, random stream) are in the graph, too: so each session captures its own.

A graph holds the host's numbers at the time of capture: shapes, learning rates. If one changes, the step is captured
again. Learning rates as tensors would need no new graph, but torch's SGD reads them back, for which the host waits, and
its fused Adam rounds them to float32: the numbers would not be those of the plain step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedsim.core.work import Counts, Role
from fedsim.training.batch import Batch
from fedsim.training.flat_model import FlatModel
from fedsim.training.optimizer import LocalOptimizer
from fedsim.training.running_metrics import RunningMetrics
from fedsim.training.settings import ELEMENTWISE, LocalTraining

log = logging.getLogger(__name__)

WARM_UP = 3
"""Plain steps before a model's first capture: libraries choose their kernels, optimizers make their moments. In later
sessions one is enough."""


class HasSteps(Protocol):
    """The part of a session that :class:`Replay` needs."""

    metrics: RunningMetrics
    report: Callable[[Tensor], None]
    """called with the loss of each batch, a scalar"""
    optimizers: dict[str, LocalOptimizer]


def why_plain(settings: LocalTraining, num_images: int, device: torch.device) -> str | None:
    """Return why a client with ``num_images`` images keeps plain steps on ``device``; None: it can capture them."""
    if device.type != "cuda":
        return "only GPUs have graphs"
    if settings.clusters:
        return "clusters change with each local epoch"
    if settings.micro_batch_of(num_images) is not None:
        return "micro_batch cuts its batches"
    if settings.accumulate > 1:
        return "accumulate makes batches without a step"
    optimizer_class = type(settings.optimizer([torch.nn.Parameter(torch.zeros(1))]))
    if optimizer_class not in ELEMENTWISE:
        return f"{optimizer_class.__name__} may keep state on the host"
    return None


class _CapturedMetrics(RunningMetrics):
    """Replaces the running metrics while a step is captured: each replay writes the values of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Tensor, Tensor, Tensor, Sequence[Tensor]]] = []

    def add(self, loss: Tensor, guesses: Tensor, labels: Tensor, parts: Sequence[Tensor] = ()) -> None:
        self.calls.append((loss, guesses, labels, parts))


@dataclass(frozen=True)
class _CapturedStep:
    """A captured CUDA graph and its host-side bookkeeping."""

    key: object
    """equal for all steps that the graph can replace"""
    graph: torch.cuda.CUDAGraph
    batch: Batch
    """the images and labels that the graph reads"""
    metrics: _CapturedMetrics
    losses: list[Tensor]
    """the losses to report"""
    steps: list[tuple[LocalOptimizer, int]]
    """number of steps of each optimizer"""
    work: Mapping[Role, Counts]
    """images and steps of each role"""


class Replay:
    """The steps of one session: plain at first, then captured, then replayed while the host's numbers stay the same.

    Args:
        session: counts batches.
        model: the model that is trained; the graphs of its sessions share a pool of memory.
        session_name: client and round, for the warning that steps stay plain.
    """

    def __init__(self, session: HasSteps, model: FlatModel, session_name: str) -> None:
        self._session, self._model, self._memory = session, model, model.graph_memory
        self._session_name = session_name
        self._captured: _CapturedStep | None = None
        self._last: object = None
        """key of the last step, if that was plain"""
        self._num_plain = 0
        """plain steps of that key until now"""
        self._hooks: object = None

    def take(self, batch: Batch, hooks: object, step: Callable[[Batch], None]) -> None:
        """Train on a batch by ``step``, which calls ``hooks``; other hooks need another graph."""
        if hooks is not self._hooks:
            self._hooks, self._last, self._captured = hooks, None, None
        key = (_layout(batch), [(o.rates, o.num_resets) for o in self._session.optimizers.values()])
        if self._captured is not None and self._captured.key == key:
            for static, tensor in zip(_tensors(self._captured.batch), _tensors(batch), strict=True):
                static.copy_(tensor)
            self._replay(self._captured)
            return
        if key != self._last:
            self._last, self._num_plain = key, 0
        enough = WARM_UP if self._memory.last is None else 1
        ready = self._num_plain >= enough and not self._memory.gave_up
        if ready and (captured := self._capture(key, batch, step)) is not None:
            self._captured = captured
            self._replay(captured)
            return
        self._num_plain += 1
        self._memory.on_its_stream(lambda: step(batch))

    def _capture(self, key: object, batch: Batch, step: Callable[[Batch], None]) -> _CapturedStep | None:
        """Capture a step without taking it; None, and a warning, if that is not possible."""
        session, static = self._session, batch.changed(Tensor.clone)  # tensors are often views of longer ones
        before = {optimizer: optimizer.num_steps for optimizer in session.optimizers.values()}
        metrics, report, captured, losses = session.metrics, session.report, _CapturedMetrics(), list[Tensor]()
        done = self._model.take_work()
        session.metrics, session.report = captured, losses.append
        try:
            graph = self._memory.capture(self._model.generators, lambda: step(static))
        except Exception as error:  # any error of a method: its plain step shows whether the method is wrong
            for optimizer in before:
                optimizer.forget_gradients()
            self._memory.gave_up = True
            log.warning(
                "model.client.graph: steps of %s and later ones stay plain: %s", self._session_name, _first_line(error)
            )
            return None
        finally:
            session.metrics, session.report = metrics, report
            steps = [(optimizer, optimizer.num_steps - count) for optimizer, count in before.items()]
            for optimizer, count in before.items():
                optimizer.num_steps = count
            work = self._model.take_work()
            self._model.add_work(done)
        return _CapturedStep(key, graph, static, captured, losses, steps, work)

    def _replay(self, captured: _CapturedStep) -> None:
        """Replay a captured step on the GPU, and update the host's counts."""
        self._last = None
        captured.graph.replay()
        for optimizer, steps in captured.steps:
            optimizer.num_steps += steps
        self._model.add_work(captured.work)
        for loss, guesses, labels, parts in captured.metrics.calls:  # copies: the next replay overwrites them
            self._session.metrics.add(loss.clone(), guesses.clone(), labels.clone(), [part.clone() for part in parts])
        for loss in captured.losses:
            self._session.report(loss.clone())


def _tensors(batch: Batch) -> list[Tensor]:
    optional = [tensor for tensor in (batch.targets, batch.cameras, batch.rows) if tensor is not None]
    return [batch.images, batch.labels, *batch.views, *optional]


def _layout(batch: Batch) -> object:
    """Return the layout of a batch: only a batch of equal layout can be copied into the captured one."""
    return [(tensor.shape, tensor.stride()) for tensor in _tensors(batch)], len(batch.views)


def _first_line(error: BaseException) -> str:
    """Return the first line of the first error: a failed capture raises another error at its end."""
    while error.__context__ is not None:
        error = error.__context__
    return (str(error).splitlines() or [type(error).__name__])[0]
