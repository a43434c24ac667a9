"""A client whose model and training are a user's module."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from lightning import LightningModule
from torch import Tensor, nn
from torchmetrics import Metric

from fedsim.training.batch import Batch, ScoredBatch
from fedsim.training.client import Client
from fedsim.training.flat_model import FlatModel, Head, Output
from fedsim.training.messages import Signals
from fedsim.training.optimizer import LocalOptimizer
from fedsim.training.own_module.module_batch import LabelledImages
from fedsim.training.own_module.module_model import ModuleModel, ModuleOutput
from fedsim.training.own_module.module_optimizer import ModuleOptimizer
from fedsim.training.own_module.rules import (
    begin_batch,
    end_batch,
    has_own,
    loss_of,
    named,
    takes_batch_number,
)
from fedsim.training.own_module.stand_in import Logged, StandInTrainer
from fedsim.training.session import Outcome
from fedsim.training.settings import autocast

log = logging.getLogger(__name__)

MUTED = Logged((), in_parts=False)
"""for models beside the client's own, whose numbers are not logged"""


class ModuleClient(Client):
    """A participant whose :attr:`module` is its model, its loss and its optimizer.

    Its sessions are those of a :class:`~fedsim.training.client.Client`: batches, random streams, uploads. The module's
    hooks are called where a Trainer calls them.

    Args:
        log_names: names that the module may log.
        arguments: of :class:`~fedsim.training.client.Client`.
    """

    model: ModuleModel

    def __init__(self, *, log_names: Sequence[str], **arguments: Any) -> None:
        super().__init__(**arguments)
        self._log_names = tuple(log_names)
        self._keeps_optimizers = False  # see ModuleOptimizer
        self._started = self._in_epoch = False
        self._images = 0
        self._last: tuple[Any, Any, int] = (None, None, 0)
        """the last output of training_step, its batch, and the batch's number"""

    @property
    def module(self) -> LightningModule:
        """The user's module; in a session a copy of its own."""
        return self.model.network.module

    @property
    def head(self) -> Head | None:
        """None: a module's classifier is its own affair."""
        return None

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the module's parameters while the client trains; at other times it has none."""
        if "session" in self.__dict__:
            yield from self.module.named_parameters(prefix, recurse, remove_duplicate)

    # -- one round -----------------------------------------------------------------------------------------------------

    def _make_ready(self, model: FlatModel, role: str = "") -> LocalOptimizer:
        """Let a copy of the module begin a session; return its optimizer."""
        assert isinstance(model, ModuleModel)
        batches = max(-(-self.data.num_images // self.batch_size), 1)
        if self.training_settings.drop_partial:
            batches = max(self.data.num_images // self.batch_size, 1)
        trainer = StandInTrainer(
            type(self.module).__name__, first_epoch=self.round * self.training_settings.local_epochs,
            epochs=self.training_settings.local_epochs, rounds=self.model.num_rounds, batches=batches,
            accumulate=self.training_settings.accumulate,
        )  # fmt: skip
        if not role:
            self._logged = Logged(self._log_names, self.session.micro_batches is not None)
            self._started, self._in_epoch = False, False
            self._takes_number = takes_batch_number(self.module)
        model.enter(trainer, MUTED if role else self._logged)
        return super()._make_ready(model, role)

    def batches(self, epoch: int, views: int = 1) -> Iterator[Batch]:
        """Yield the batches of local epoch ``epoch``, from 0, between the module's hooks of an epoch."""
        module = self.module
        if not self._started:  # here, and not earlier: the weights have been received
            self._started = True
            module.on_fit_start()
            module.on_train_start()
        self._end_epoch()
        self._in_epoch, self._images = True, 0
        module.on_train_epoch_start()
        yield from super().batches(epoch, views)
        self._end_epoch()

    @property
    def _loss_sees_batches(self) -> bool:
        """A module's loss sees cameras."""
        return True

    def _end_epoch(self) -> None:
        """Call the hooks after a local epoch, if one is open."""
        if not self._in_epoch:
            return
        self._in_epoch = False
        self._logged.size, self._logged.number = self._images, None
        self.module.on_train_epoch_end()
        self._logged.end_epoch()
        assert isinstance(self.optimizer, ModuleOptimizer)
        self.optimizer.end_epoch()

    def forward(self, images: Tensor) -> Output:
        """Return normalised images [B, 3, H, W] for :meth:`supervised_loss`, which runs the module."""
        return self.model.forward(images, self.session.precision)

    def _score(self, output: Output, batch: Batch, counts: bool) -> ScoredBatch:
        """Return the loss of ``training_step``; a module makes no guesses that fedsim knows."""
        assert isinstance(output, ModuleOutput), "a method cannot change a module's output"
        module, cameras = output.model.network.module, batch.cameras
        if cameras is not None and len(output.images) != len(cameras):  # a method's own images
            cameras = None
        labelled: Any = LabelledImages(output.images, batch.labels, cameras)
        self._logged.counts, self._logged.size = counts, len(batch.labels)
        if counts and (micro_batches := self.session.micro_batches) is not None:
            self._logged.number = micro_batches.current.number
            self._logged.counts = micro_batches.counts
        number = max(self.session.progress[1] - 1, 0)
        labelled = begin_batch(module, labelled, number)
        if counts:
            self._images += len(batch.labels)
        output.model.network.count(output.images)
        with autocast(self.device, output.precision):
            returned = module.training_step(labelled, *([number] if self._takes_number else []))
        self._logged.counts = True  # for the hooks that follow
        loss = loss_of(module, returned).float()
        self._last = (returned, labelled, number)
        return ScoredBatch(loss, batch.labels.new_full(batch.labels.shape, -1), batch.labels)

    def step(
        self,
        loss: Tensor,
        correct: Callable[[], None] | None = None,
        optimizer: LocalOptimizer | None = None,
        *,
        loose: Sequence[LocalOptimizer] = (),
    ) -> bool:
        """Back-propagate and step, with the module's hooks around it; see :meth:`Client.step`."""
        is_own = optimizer is None or optimizer is self.optimizer
        module = self.module

        def after_backward() -> None:
            if is_own:
                module.on_after_backward()
            if correct is not None:
                correct()

        if is_own:
            module.on_before_backward(loss)
        stepped = super().step(loss, after_backward, optimizer, loose=loose)
        if is_own and self._in_epoch:
            end_batch(module, *self._last)
        return stepped

    def _clip(self, stepping: LocalOptimizer) -> None:
        """Clip gradients by ``grad_clip``, unless the module does it."""
        if not has_own(self.module, "configure_gradient_clipping"):
            super()._clip(stepping)

    def end_training(self) -> None:
        """Finish the last batch and call the module's last hooks."""
        super().end_training()
        self._end_epoch()
        if self._started:
            self.module.on_train_end()
            self.module.on_fit_end()
        self.model.settle()

    def end_round(
        self,
        contribution: Sequence[Tensor],
        limit: float,
        signals: Signals = MappingProxyType({}),
        variances: Tensor | None = None,
    ) -> Outcome:
        """Check and store the results; what the module has logged is among the facts."""
        outcome = super().end_round(contribution, limit, signals, variances)
        micro_batches = self.session.micro_batches
        parts = (None, 0) if micro_batches is None else (micro_batches.rank_group, micro_batches.number)
        logged: Mapping[str, float] = self._logged.means(*parts)
        if self._logged.unknown:
            late = ", ".join(sorted(self._logged.unknown))
            log.warning(
                "%s logged %s only after its first batch: no column is there for it; log it in each batch",
                named(self.module), late,
            )  # fmt: skip
        return outcome._replace(correct=math.nan, facts={**outcome.facts, **logged})

    def leave(self) -> None:
        """Free the memory of the session, and the module's copy."""
        super().leave()
        self.model.leave()
        self._last = (None, None, 0)


def holds_metrics(module: LightningModule) -> bool:
    """Return whether a module has metrics of torchmetrics, which have a state of their own."""
    return any(isinstance(part, Metric) for part in module.modules())
