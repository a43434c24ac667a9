"""One virtual client: private images, private state, and the local training loop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import ClassVar, Protocol

import torch
from lightning import LightningModule
from torch import Tensor, nn

from fedsim.core.allocator import is_out_of_memory
from fedsim.core.errors import TrainingError
from fedsim.core.seeding import derive_seed, seed_global_stream, torch_generator
from fedsim.core.store import ClientStore
from fedsim.core.work import Counts, Role
from fedsim.strategy.rank_group import RankGroup
from fedsim.training import failures
from fedsim.training.batch import Batch, ClientImages, ScoredBatch
from fedsim.training.centers import score_with_centers
from fedsim.training.features import PLAIN, Extraction, extract_features
from fedsim.training.flat_model import FlatModel, Output
from fedsim.training.labels.labeller import labeller_of
from fedsim.training.messages import Download, Measured, Signals
from fedsim.training.objective import Objective, supervised_loss
from fedsim.training.optimizer import LocalOptimizer, loose_optimizer
from fedsim.training.private_state import PrivateState
from fedsim.training.session import BatchReport, ClientSession, Outcome
from fedsim.training.settings import LocalTraining

__all__ = ["Batch", "BatchReport", "Client", "Outcome", "Output"]

_MOMENTS = "optimizer"
"""prefix of the names of kept tensors that belong to an optimizer"""
_OF_A_SESSION = frozenset({"kept", "optimizer", "progress", "received", "round", "session", "work"})
"""attributes that each session sets; none is a parameter, a buffer or a module"""


class Trains(Protocol):
    """The two hooks of a method that train a client on a batch."""

    def loss(self, client: Client, batch: Batch) -> Tensor:
        """Return the loss of a batch, a scalar with gradient."""

    def take_step(self, client: Client, loss: Tensor) -> None:
        """Step the optimizer."""


class Client(PrivateState, LightningModule):
    """A participant of the federation.

    It owns what lasts from round to round: data, settings, and the private tensors, which are in a store between
    sessions. Clients of an architecture are loaded into the rank's model one after another; the state of one round
    belongs to a :class:`ClientSession`.

    Args:
        images: its data, with images that are opened before it trains.
        training: local epochs, batches, optimizer, rates.
        objective: the supervised loss.
        model: of the client's architecture, on this rank.
        store: of private states.
        seed: of the run.
        trains_alone: whether no part of its model is averaged with other clients' models.
    """

    has_guesses: ClassVar[bool] = True
    """whether its model guesses identities"""
    checks_loss: ClassVar[bool] = True
    """whether a loss that is not finite makes an update a bad one"""
    received: Download
    """during a session: the server's message"""
    session: ClientSession
    """while it trains"""

    def __init__(
        self, *, images: ClientImages, training: LocalTraining, objective: Objective, model: FlatModel,
        store: ClientStore, seed: int, trains_alone: bool,
    ) -> None:  # fmt: skip
        super().__init__()
        self.images, self.data = images, images.data
        """its training images with labels and cameras: batches without augmentation, and random samples"""
        self.client_name, self.num_classes = self.data.name, self.data.num_classes
        self.training_settings, self.objective = training, objective
        self.model, self.store, self.seed = model, store, seed
        self._keeps_optimizers = training.keeps_state(trains_alone)
        self.limit_batches: float | None = None
        """see FederatedDataModule.limit_client_batches"""
        self.kept = {}
        self.round = 0
        """the current one, from 0"""
        self.progress = (0, 0, 0)
        """of the last session; see :attr:`ClientSession.progress`"""
        self.work: Mapping[Role, Counts] = {}
        """this rank's part of the images and steps of the last session, whether or not its results count"""

    def __setattr__(self, name: str, value: Tensor | nn.Module) -> None:
        """Set an attribute; torch, which is slow at it, need not look for parameters in those of a session."""
        if name in _OF_A_SESSION:
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def begin_round(
        self, round_: int, work: float, precision: str, listener: Callable[[BatchReport], None],
        rank_group: RankGroup | None = None, poison: Callable[[Batch], Batch] | None = None,
    ) -> None:  # fmt: skip
        """Load the private state and set every random stream of this session to round ``round_``, from 0.

        ``work`` is the share of the local work to do (stragglers: below 1), and ``precision`` is ``32-true`` or
        ``bf16-mixed``. ``listener`` is called after every batch. The ranks of ``rank_group`` train the client together.
        ``poison`` changes the batches of an attacker; None: it is honest.
        """
        self.round, self.work = round_, {}
        self.session = ClientSession(
            self.images, self.training_settings, labeller_of(self), self.generator, work=work, precision=precision,
            report=partial(self._report, listener), rank_group=rank_group, reseed=self._seed_micro_batch,
            poison=poison, shown_round=round_ if self.objective.sees_batches else None,
        )  # fmt: skip
        self.model.begin_work(self.session.is_first)
        self.load()
        seed_global_stream(derive_seed(self.seed, round_, self.client_name, "modules"))  # for random modules of users
        self.optimizer = self._make_ready(self.model)
        self.session.use_prefetch_and_graphs(self.model, f"client {self.client_name}, round {round_ + 1},")

    def trainable_replica(self, role: str) -> FlatModel:
        """Return a second model, made ready to train in this session, with its own dropout stream.

        Its weights are those of the last client: load all of them. It steps by ``client.step(loss, optimizer=...)``
        with its ``optimizer(client.training_settings)``. See :meth:`FlatModel.replica` for ``role``.
        """
        replica = self.model.replica(role)
        self._make_ready(replica, f" {role}")
        return replica

    def _make_ready(self, model: FlatModel, role: str = "") -> LocalOptimizer:
        """Prepare a model to train in this session; return its optimizer."""
        model.reset_counters()
        if self.session.micro_batches is not None:
            self.session.micro_batches.models[role] = model
        if model.network.has_dropout:
            model.network.set_generator(self.generator(f"dropout{role}", device=self.device))
        model.network.begin_training()
        return self._begin_steps(model.optimizer(self.training_settings), role, model)

    def loose_optimizer(self, role: str, module: nn.Module, lr: float | None = None) -> LocalOptimizer:
        """Return an optimizer of this session for the parameters of a module that is no part of a model.

        It is the configured one, with rates that follow the schedule from ``lr``; None: from the client's own. It steps
        with the model, by ``client.step(loss, loose=[optimizer])``. ``module`` is on the client's device, its
        parameters are float32, and ``role`` names its moments if they are kept. Keep the parameters, too
        (:meth:`keep`), and declare them (:meth:`fedsim.methods.base.Method.loose_tensors`).
        """
        return self._begin_steps(loose_optimizer(self.training_settings, module, lr), f" {role}", self.model)

    def _begin_steps(self, optimizer: LocalOptimizer, role: str, model: FlatModel) -> LocalOptimizer:
        """Make an optimizer ready for the steps of this session, which count with those of the ``model``."""
        prefix = f"{_MOMENTS}{role}."
        optimizer.work, self.session.optimizers[prefix] = model.network.work, optimizer
        optimizer.reset(self.round)
        if self._keeps_optimizers:
            optimizer.continue_from({n.removeprefix(prefix): t for n, t in self.kept.items() if n.startswith(prefix)})
        return optimizer

    def _seed_micro_batch(self, number: int) -> None:
        """Give every random layer its own stream for a micro-batch."""
        assert self.session.micro_batches is not None
        seed_global_stream(derive_seed(self.seed, self.round, self.client_name, "modules", number))
        for role, model in self.session.micro_batches.models.items():
            if model.network.has_dropout:
                model.network.set_generator(self.generator(f"dropout{role} {number}", device=self.device))

    def batches(self, epoch: int, views: int = 1) -> Iterator[Batch]:
        """Yield the batches of local epoch ``epoch``, from 0: fewer if the client does only a share of the work.

        ``views`` is the number of augmented versions of each image; the first is the same for any number.
        """
        return self.session.batches(epoch, self.local_epochs, self.limit_batches, max(views, self.objective.num_views))

    def fit(
        self, hooks: Trains, epochs: Sequence[int] | None = None, *, repeats: int = 1, max_steps: int | None = None,
        after_epoch: Callable[[int], None] = lambda _: None,
    ) -> None:  # fmt: skip
        """Train on the batches of ``epochs``, by default those of this round; ``hooks``, usually the method, step.

        ``repeats`` is the number of times that it trains on each batch. It ends early after ``max_steps`` steps; None:
        it does not. ``after_epoch`` is called with each epoch that is over. To a user's module, whose schedules and
        counters need to know how long it trains in all rounds, each call is a training of its own.
        """
        for epoch in range(self.local_epochs) if epochs is None else epochs:
            for batch in self.batches(epoch):
                for _ in range(repeats):
                    self.train_on(batch, hooks)
                if self.optimizer.num_steps == max_steps:
                    return
            after_epoch(epoch)

    def train_on(self, batch: Batch, hooks: Trains) -> None:
        """Train on a batch: ``hooks``, usually the method, compute the loss and take the step.

        With ``model.client.graph`` the step may be replayed, see :mod:`fedsim.training.graphs`.
        """
        if self.session.replay is None:
            hooks.take_step(self, hooks.loss(self, batch))
        else:
            self.session.replay.take(batch, hooks, lambda batch: hooks.take_step(self, hooks.loss(self, batch)))

    @contextmanager
    def personal_training(self) -> Iterator[None]:
        """Count the work of this block as that of a personal model, which trains in place of the client's."""
        before = self.model.network.work
        self.model.network.work = self.optimizer.work = self.model.work["personal"]
        try:
            yield
        finally:
            self.model.network.work = self.optimizer.work = before

    def forward(self, images: Tensor) -> Output:
        """Run the client's model on normalised images [B, 3, H, W]."""
        return self.model.forward(images, self.session.precision)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of the model during a session of the client; at other times it has none."""
        if "session" in self.__dict__:
            parts = {"network": self.model.network} | ({"head": self.model.head} if self.model.has_own_heads else {})
            for name, part in parts.items():
                yield from part.named_parameters(f"{prefix}.{name}" if prefix else name, recurse, remove_duplicate)

    def training_step(self, batch: Batch, batch_idx: int = 0) -> Tensor:  # noqa: ARG002 - Lightning's signature
        """Return the supervised loss of a batch (scalar) and count it."""
        return self.supervised_loss(self.output(batch), batch)

    def output(self, batch: Batch) -> Output:
        """Return the model's output for a batch, with the features of all views that the loss compares."""
        output, further = self.forward(batch.images), batch.views[: self.objective.num_views - 1]
        return output._replace(views=tuple(self.forward(view).features for view in further)) if further else output

    def supervised_loss(self, output: Output, batch: Batch, counts: bool = True) -> Tensor:
        """Return the supervised loss (scalar) of a model's output for a batch; if it ``counts``, log it."""
        scored = self._score(output, batch, counts)
        if counts:
            self.session.metrics.add(scored.loss.detach(), scored.guesses, scored.truth, scored.parts)
        return scored.loss

    def _score(self, output: Output, batch: Batch, counts: bool) -> ScoredBatch:
        """Return the loss of a batch by its labels: identities, or clusters, whose proxies always move."""
        if not self.training_settings.clusters:
            if self.objective.center is None:
                return supervised_loss(self.objective, output, batch)
            return score_with_centers(self.objective, self.kept, self.num_classes, output, batch, counts=counts)
        pseudo = self.session.pseudo
        assert pseudo is not None, "there are no clusters before the first local epoch"
        return pseudo.score(output.features.neck, batch.labels)

    def step(
        self, loss: Tensor, correct: Callable[[], None] | None = None, optimizer: LocalOptimizer | None = None, *,
        loose: Sequence[LocalOptimizer] = (),
    ) -> bool:  # fmt: skip
        """Back-propagate, and step the optimizer after every ``accumulate`` batches and after an epoch's last one.

        A step takes the mean gradient over its images, whatever its number of batches and micro-batches.
        ``correct`` changes the gradient of a step, before clipping. ``optimizer`` is that of a replica; None: the
        client's own, and then progress is reported. The ``loose`` ones step with it, which needs whole batches.
        ``grad_clip`` bounds each optimizer's gradient on its own. Returns whether the optimizer stepped.
        """
        settings, stepped = self.training_settings, optimizer or self.optimizer
        _, done, total = self.session.progress
        share, micro_batches = self.session.share, self.session.micro_batches
        scaled = loss if share == 1 else loss * share
        if micro_batches is None:
            scaled.backward()
        elif not micro_batches.backward(scaled, stepped):
            return False
        steps = done % settings.accumulate == 0 or done == total  # also outside batches(), where both are 0
        if steps:
            if correct is not None:
                correct()
            for stepping in (stepped, *loose):
                if settings.grad_clip is not None:
                    nn.utils.clip_grad_norm_(stepping.parameters, settings.grad_clip)
                stepping.step()
        if stepped is self.optimizer:
            self.session.report(loss.detach())
        return steps

    def _report(self, listener: Callable[[BatchReport], None], loss: Tensor) -> None:
        """Report the progress of the session to a listener; ``loss`` is that of the last batch."""
        epoch, done, total = self.session.progress
        share = (epoch + done / max(total, 1)) / self.local_epochs
        images = (epoch * total + done) * self.training_settings.batch_of(len(self.images.labels))
        listener(BatchReport(self.client_name, done, total, share, loss, images))

    def end_training(self) -> None:
        """Finish the last batch; raise NoClustersError if the session had no labels to train on."""
        if self.session.micro_batches is not None:
            self.session.micro_batches.settle()
        self.session.labeller.check()

    @property
    def _checked(self) -> Iterable[Tensor]:
        """Those of the kept tensors that must be finite."""
        return self.kept.values()

    def end_round(
        self, contribution: Sequence[tuple[Tensor, float]], signals: Signals = MappingProxyType({}),
        variances: Tensor | None = None,
    ) -> Outcome:  # fmt: skip
        """Check the results of the session, and store the private state; in a rank group only the first rank stores it.

        ``contribution`` are the tensors on the device that the client sends, each with its largest magnitude.
        The ``signals`` are read in the same wait for the device, and returned with the results. None of the running
        ``variances`` that the client sends, if there are any, may be negative.

        Raises:
            BadUpdateError: if the loss, a weight or a signal is not finite, or too large to be summed, or a variance is
                negative. The stored state is then that from before the round.
        """
        for prefix, optimizer in self.session.optimizers.items() if self._keeps_optimizers else ():
            self.kept |= {prefix + name: tensor for name, tensor in optimizer.state().items()}
        sent = [(part, limit) for part, limit in contribution if part.numel()]
        parts = (*(part for part, _ in sent), self.model.private, *filter(torch.is_floating_point, self._checked))
        bounds = [bound.to(self.device) for part in parts if part.numel() for bound in part.aminmax()]  # NaN if any
        bounds += [] if variances is None else [variances.amin()]
        # the session's only wait for the device
        loss, correct, images, values = self.session.metrics.read([*bounds, *self._on_device(signals)])
        extremes, values = values[: len(bounds)], values[len(bounds) :]
        if not all(math.isfinite(value) for value in (*([loss] if self.checks_loss else []), *extremes)):
            raise failures.not_finite(self._named, f"{self._start} loss or weights")
        if variances is not None and extremes[-1] < 0:
            raise failures.negative_variance(self._named, extremes[-1])
        for position, (_, limit) in enumerate(sent):
            if max(map(abs, extremes[2 * position : 2 * position + 2])) > limit:
                raise failures.too_large(self._named, f"{self._start} the update", limit)
        if (inexact := self.session.inexact) is not None:
            raise failures.bad_update(
                self._named, inexact, "the weight of the loss", "model.client.micro_batch to null"
            )
        numbers = {name: s.read(values) if isinstance(s, Measured) else s for name, s in signals.items()}
        if numbers:
            names = [entry.name for entry in self.model.flat.shared_parameters]
            failures.check_signals(self._named, numbers, names)
        if self.session.is_first:
            self.store_private(self.model.private, self.kept)
        of_loss = zip(self.objective.parts, self.session.metrics.parts, strict=False)
        seconds = time.perf_counter() - self.session.started
        return Outcome(loss, correct, images, seconds, {**self.session.labeller.facts, **dict(of_loss)}, numbers)

    def _on_device(self, signals: Signals) -> list[Tensor]:
        """Return the scalars, float64, of all measured signals."""
        measured = (signal.values.detach() for signal in signals.values() if isinstance(signal, Measured))
        tensors = (values.to(self.device, torch.float64, non_blocking=True) for values in measured)
        return [value for values in tensors for value in values.flatten().unbind()]

    def leave(self) -> None:
        """Free the memory of the session, whether or not its results count."""
        self.unload()
        self.model.end_session()
        for optimizer in self.session.optimizers.values():
            optimizer.release()  # its moments would occupy the device until the client's next round
        self.progress, is_first = self.session.progress, self.session.is_first
        # all ranks of a rank group take all steps
        self.work = {r: (images, steps if is_first else 0) for r, (images, steps) in self.model.take_work().items()}
        del self.session  # tensors of every batch, random generators

    def out_of_memory(self, error: RuntimeError | MemoryError) -> TrainingError | None:
        """Return an error that names the batch and the remedy, if memory ran out."""
        if not is_out_of_memory(error):
            return None
        return failures.out_of_memory(self._named, self.client_name, self.batch_size, self.progress, error)

    @property
    def _named(self) -> str:
        return f"client {self.client_name}, round {self.round + 1}"

    @property
    def _start(self) -> str:
        """How large the session began, for messages: it may be the global model that is bad."""
        vector = self.received.vector
        return f"it received a global model with values up to {vector.abs().max():.4g}, and" if len(vector) else ""

    def generator(self, purpose: str, device: torch.device | str = "cpu") -> torch.Generator:
        """Return a random stream of this client, round and purpose."""
        return torch_generator(self.seed, self.round, self.client_name, purpose, device=device)

    @property
    def batch_size(self) -> int:
        """B for this client: at most its images."""
        return self.training_settings.batch_of(self.data.num_images)

    @property
    def local_epochs(self) -> int:
        """E in this round."""
        return self.training_settings.epochs_in(self.round)

    def plain_features(self, extraction: Extraction = PLAIN) -> Tensor:
        """Return the features [n, D] of all images, without augmentation, in evaluation mode."""
        features = extract_features(self.model.network, self.images.pixels, extraction, self.device)
        self.model.network.train()
        if not features.isfinite().all():
            raise failures.not_finite(self._named, "features")
        return features
