"""A client whose model and training are a user's module: Lightning's Trainer trains it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar, Literal

import torch
from lightning import LightningModule
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn

from fedsim.core.errors import ConfigError
from fedsim.core.seeding import derive_seed
from fedsim.training.batch import Batch
from fedsim.training.client import Client, Trains
from fedsim.training.flat_model import FlatModel, Head, Output
from fedsim.training.optimizer import LocalOptimizer
from fedsim.training.own_module.inner_trainer import Horizon, Options, Training, muted, train
from fedsim.training.own_module.module_batch import BatchForm
from fedsim.training.own_module.module_errors import in_one_line, named
from fedsim.training.own_module.module_model import ModuleModel, ModuleOptimizer, ModuleOutput
from fedsim.training.own_module.network import PART
from fedsim.training.session import Outcome
from fedsim.training.settings import autocast

log = logging.getLogger(__name__)

CountsFrom = Literal["run", "round"]
_TAKEN = frozenset({"loss", "images", "steps", "weight"})
"""numbers of a client that fedsim logs itself"""


class ModuleClient(Client):
    """A participant whose :attr:`module` is its model, its loss and its optimizer.

    Args:
        log_names: names that the module may log.
        form: of the batches of its ``training_step``.
        counts_from: where its epochs, steps and schedules begin: with the run, or with each round.
        arguments: of :class:`~fedsim.training.client.Client`.
    """

    has_guesses: ClassVar[bool] = False
    checks_loss: ClassVar[bool] = False
    model: ModuleModel
    optimizer: ModuleOptimizer

    def __init__(self, *, log_names: Sequence[str], form: BatchForm, counts_from: CountsFrom, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.form = form
        self._log_names, self._counts_from = tuple(log_names), counts_from
        self._training: _ClientTraining | None = None

    @property
    def module(self) -> LightningModule:
        """The user's module, with the values of the model; while it trains a copy of it."""
        self.model.flat.spread()
        return self.model.network.module

    @property
    def head(self) -> Head | None:
        """None: a module's classifier is its own affair."""
        return None

    def named_parameters(self, *arguments: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the module's parameters during a session; at other times it has none."""
        if "session" in self.__dict__:
            yield from self.module.named_parameters(*arguments, **options)

    # -- one round -----------------------------------------------------------------------------------------------------

    def load(self) -> None:
        """Load the client's private tensors into the rank's model."""
        super().load()
        self.model.load_kept(self.kept)
        self._logged: dict[str, Tensor] = {}  # see train()
        self.has_losses, self._number = True, 0  # of trainings

    def _make_ready(self, model: FlatModel, role: str = "") -> LocalOptimizer:
        """Return a view of the module's optimizers for methods."""
        if role:
            name = self.model.blueprint.name
            raise ConfigError(f"model.method: it trains a second model, and a Trainer trains {name}; choose another")
        self.session.shown_round = self.round  # batches have cameras
        model.network.begin_training()
        return self._begin_steps(model.optimizer(self.training_settings), role, model)

    def fit(
        self, hooks: Trains, epochs: Sequence[int] | None = None, *, repeats: int = 1, max_steps: int | None = None,
        after_epoch: Callable[[int], None] = lambda _: None,
    ) -> None:  # fmt: skip
        """Let Lightning train the module; ``hooks`` change its losses and its steps, see :meth:`Client.fit`."""
        chosen, settings = range(self.local_epochs) if epochs is None else epochs, self.training_settings
        training = _ClientTraining(self, hooks, chosen, repeats, max_steps, after_epoch)
        if not training.sizes:
            return
        is_cut = max_steps is not None or settings.local_steps is not None
        horizon = Horizon(len(training.sizes) if is_cut else len(chosen), self.round, self.model.num_rounds)
        if self._counts_from == "round":
            horizon = Horizon(horizon.epochs)
        options = Options(self.device, self.session.precision, settings.accumulate, settings.grad_clip)
        self._number += 1
        seed = derive_seed(self.seed, self.round, self.client_name, "modules", self._number)
        self._training, steps = training, self.optimizer.num_steps
        try:
            train(self.model.fresh(), training, horizon, options, seed)
        except Exception as error:  # of the user's code, whose traceback names neither client nor batch
            error.add_note(f"{self._named}{training.place}")
            raise
        self._training, blueprint = None, self.model.blueprint
        took_none = self.optimizer.num_steps == steps and not blueprint.first.automatic_optimization
        if took_none and getattr(hooks, "sees_steps", True):
            raise ConfigError(
                f"model.method: it changes or counts steps, and {blueprint.name} took none by Lightning; call step() "
                "of self.optimizers() in it"
            )
        if training.has_counted:
            self._logged |= {name: sums + self._logged.get(name, 0) for name, sums in training.sums.items()}
        self.kept |= self.model.end()

    def supervised_loss(self, output: Output, batch: Batch, counts: bool = True) -> Tensor:
        """Return the module's loss (scalar) of a batch; if it ``counts``, its numbers are logged."""
        assert isinstance(output, ModuleOutput), "a method cannot change a module's output"
        if self._training is not None and output.model is self.model:
            return self._training.loss_of(output.images, batch, counts)
        network = output.model.network
        network.count(output.images)
        in_context, name = autocast(self.device, self.session.precision), type(network.module).__name__
        with in_one_line(name, "a step without a Trainer"), output.model.flat.moving(), in_context:
            step = network.module.training_step
            number = (0,) if is_param_in_hook_signature(step, "batch_idx", min_args=2) else ()
            loss = _loss_in(step(self.form(batch._replace(images=output.images)), *number))
        if not isinstance(loss, Tensor):
            raise ConfigError(f"{named(network.module)}: the method needs a loss; return one in training_step")
        return loss.float()

    def step(self, loss: Tensor, correct: Callable[[], None] | None = None, *_: Any, **options: Any) -> bool:  # noqa: ARG002 - Lightning has the loss
        """Let Lightning back-propagate and step, with ``correct`` before the step; see :meth:`Client.step`."""
        assert self._training is not None, "steps belong to client.fit"
        assert not options.get("loose"), "a Trainer has the optimizers of its module"
        return self._training.step(correct)

    @property
    def _checked(self) -> Iterable[Tensor]:
        return (tensor for name, tensor in self.kept.items() if not name.startswith(f"{PART}."))

    def end_round(self, *arguments: Any, **options: Any) -> Outcome:
        """Check and store the results; what the module has logged is among the facts."""
        outcome = super().end_round(*arguments, **options)
        logged = {name_of(name): float(total / images) for name, (total, images) in self._logged.items()}
        if late := sorted(logged.keys() - set(self._log_names)):
            log.warning(
                "%s logged %s only after its first batch: no column is there for it; log it in each batch",
                named(self.module), ", ".join(late),
            )  # fmt: skip
        loss = outcome.loss if self.has_losses else math.nan
        return outcome._replace(loss=loss, correct=math.nan, facts={**outcome.facts, **logged})

    def leave(self) -> None:
        """Free the memory of the session, and the module's copy."""
        self._training, self.model.flat.is_stale = None, False
        self.model.set_num_classes(self.num_classes)
        super().leave()


def name_of(logged: str) -> str:
    """Return the name of a number that a module logs; one that fedsim has, too, gets a prefix."""
    return f"module_{logged}" if logged in _TAKEN else logged


class _ClientTraining(Training):
    """A training of a client's module in some local epochs: a method's hooks at the places of Lightning."""

    def __init__(
        self, client: ModuleClient, hooks: Trains, epochs: Sequence[int], repeats: int, max_steps: int | None,
        after_epoch: Callable[[int], None],
    ) -> None:  # fmt: skip
        self._client, self._hooks, self._repeats, self._after_epoch = client, hooks, repeats, after_epoch
        self._flat, self._session = client.model.flat, client.session
        left, accumulate = math.inf if max_steps is None else max_steps, client.training_settings.accumulate
        self._plans: list[tuple[Tensor, list[Tensor]]] = []
        for epoch in epochs:
            labels, order = self._session.plan(epoch, client.local_epochs, client.limit_batches)
            order = order[: int(min(left * accumulate, len(order)))]
            left -= math.ceil(len(order) / accumulate)  # an epoch ends with a step
            if order:
                self._plans.append((labels, order))
        super().__init__([[len(batch) for batch in order for _ in range(repeats)] for _, order in self._plans])
        self.drop_last = client.training_settings.drop_partial
        self._correct: Callable[[], None] | None = None
        self._step: Callable[[], Any] | None = None
        self._no_loss = torch.full((), math.nan, device=client.device)
        self._no_number = torch.zeros_like(self._no_loss)
        self._loss: Tensor | None = None
        """of the current batch, as the module returned it first"""
        self._is_counted = self.has_counted = False
        """whether a batch has been counted in the client's numbers: the current one, and any"""

    @property
    def place(self) -> str:
        """The current batch, for messages."""
        batch = vars(self).get("_batch")
        return "" if batch is None else f", batch of {len(batch.labels)} images"

    @property
    def sampler(self) -> Sequence[int]:
        """The positions, among the client's training images, of the images of an epoch."""
        return [i for batch in self._plans[self.epoch][1] for _ in range(self._repeats) for i in batch.tolist()]

    def read(self, epoch: int) -> Iterator[Any]:
        labels, order = self._plans[epoch]
        for number, batch in enumerate(self._session.read(order, labels, self._client.form.num_views), start=1):
            self._batch, self._version = batch, batch.images._version
            for _ in range(self._repeats):
                self._check_images()
                self._session.progress = (epoch, number, len(order))
                yield self._client.form(batch)

    def give(self, module: LightningModule) -> None:
        """Let ``setup`` see the values of the session's start."""
        self._client.model.give(module, self._client.kept)

    def load(self, module: LightningModule) -> None:
        """Give the module the values of the session's start."""
        self._module = module
        self._client.model.begin(module, self._client.kept)

    def see_optimizers(self, trainer: Any) -> None:
        """Show methods the optimizers, and scale their rates, if no scheduler does it."""
        self._client.optimizer.trainer = trainer
        factor = self._client.training_settings.rate_factor(self._client.round)
        for group in () if factor == 1 or trainer.lr_scheduler_configs else self._client.optimizer.param_groups:
            group["lr"] *= factor

    @contextmanager
    def _hook(self) -> Iterator[None]:
        """Let a hook of the method read and write the model's values."""
        self._flat.is_stale = True
        yield
        self._flat.spread()

    def training_step(self, step: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Return the output of the module's step, with the loss that the method makes of it."""
        self._run, self._args, self._loss = step, args, None
        with self._hook():
            loss = self._hooks.loss(self._client, self._batch)
        if loss is self._loss:
            return self._returned
        self._check_images()
        if not self._module.automatic_optimization:
            name = self._client.model.blueprint.name
            raise ConfigError(f"model.method: it changes losses, and {name} optimizes manually; choose another")
        return {**self._returned, "loss": loss} if isinstance(self._returned, Mapping) else loss

    def _check_images(self) -> None:
        """Raise ConfigError if the module has changed the batch's images, which the method uses, too."""
        if self._batch.images._version != self._version:
            raise ConfigError(
                f"{named(self._module)} changes its images in place, which the method uses, too; change a copy"
            )

    def loss_of(self, images: Tensor, batch: Batch, counts: bool) -> Tensor:
        """Return the module's loss (scalar) of the current batch, or of other images."""
        batch_of_module, *further = self._args
        if images is not self._batch.images or batch.labels is not self._batch.labels:
            if images is not batch.images:
                batch = batch._replace(images=images, views=())
            if batch.cameras is None or len(batch.cameras) != len(images):
                batch = batch._replace(cameras=None, rows=None)
            batch_of_module = self._client.form(batch)
        self._client.model.network.count(images)
        with self._flat.moving(), nullcontext() if counts else muted(self._module):
            returned = self._run(batch_of_module, *further)
        loss = _loss_in(returned)
        loss = loss if isinstance(loss, Tensor) and loss.numel() == 1 else self._no_loss
        if self._loss is None:
            self._returned, self._loss = returned, loss
        if counts and not self._is_counted:  # a closure may be called again
            self._is_counted = self.has_counted = True
            self._client.has_losses &= loss is not self._no_loss
            number = self._no_number if loss is self._no_loss else loss.detach().float().reshape(())
            self._session.metrics.add(number, torch.full_like(batch.labels, -1), batch.labels)
        return loss

    def optimizer_step(self, step: Callable[[], Any]) -> Any:
        """Let the method take the step of an optimizer."""
        self._step, self._result = step, None
        self._take_step()
        self._step = None
        return self._result

    def _take_step(self) -> None:
        with self._hook():
            self._hooks.take_step(self._client, self._no_loss)

    def step(self, correct: Callable[[], None] | None) -> bool:
        """Step, with ``correct`` before it; without an optimizer's turn, nothing steps yet."""
        if self._step is None:
            return False
        self._correct = correct
        with self._flat.moving():
            self._result = self._step()
        self._correct = None
        optimizer = self._client.optimizer
        optimizer.num_steps, optimizer.work.steps = optimizer.num_steps + 1, optimizer.work.steps + 1
        return True

    def on_after_backward(self, *_: Any) -> None:
        """Let the method know of gradients that wait for a step."""
        if self._step is None and self._module.automatic_optimization:
            self._take_step()

    def on_before_optimizer_step(self, *_: Any) -> None:
        """Let the method correct the gradients."""
        if self._correct is not None:
            with self._hook():
                self._correct()

    def after_batch(self) -> None:
        self._is_counted = False
        self._session.report((self._no_loss if self._loss is None else self._loss).detach())

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        """Let the method know of the end of an epoch."""
        with self._hook():
            self._after_epoch(self.epoch)
        super().on_train_epoch_end(trainer)


def _loss_in(returned: Any) -> Any:
    return returned.get("loss") if isinstance(returned, Mapping) else returned
