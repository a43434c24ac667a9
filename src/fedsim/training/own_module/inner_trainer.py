"""Lightning's own Trainer trains a user's module in a session of a client.

It runs within a step of the outer Trainer, on this rank's device alone: it takes no signal, writes no file, prints
nothing, and sees one process. A :class:`Training` is what fedsim adds, from a strategy and a callback of Lightning's
kind.
"""

from __future__ import annotations

import logging
import math
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import lightning.pytorch
import numpy as np
import torch
from lightning import LightningModule
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.seed import isolate_rng
from lightning_utilities.core import rank_zero
from lightning_utilities.core.overrides import is_overridden
from torch import Tensor, distributed

from fedsim.core.seeding import seed_global_stream


def package_of(thing: object) -> ModuleType | None:
    """Return the package whose LightningModule a thing is, and whose Trainer trains it; None: it is none.

    A module of ``pytorch_lightning`` comes with an import of it, so fedsim need not import it.
    """
    packages = (lightning.pytorch, sys.modules.get("pytorch_lightning"))
    return next((p for p in packages if p is not None and isinstance(thing, p.LightningModule)), None)


def has_own(module: Any, hook: str) -> bool:
    """Return whether a module, or its class, has a hook of its own in place of Lightning's."""
    package: Any = package_of(module)
    return is_overridden(hook, module, package.LightningModule)


class Horizon(NamedTuple):
    """How long a module trains in the whole run, if its client takes part in every round."""

    epochs: int = 1
    """of this training"""
    round_: int = 0
    """the current one, from 0"""
    rounds: int | None = 1
    """of the run; None: it has no last one"""

    @property
    def first_epoch(self) -> int:
        """The epochs of all earlier rounds."""
        return self.epochs * self.round_

    @property
    def end(self) -> float:
        """The epochs of all rounds."""
        return math.inf if self.rounds is None else self.epochs * self.rounds


class Options(NamedTuple):
    """Settings of a Trainer."""

    device: torch.device
    precision: str = "32-true"
    accumulate: int = 1
    grad_clip: float | None = None


class Training:
    """A training: its batches, as a loader of Lightning, and fedsim's work at the hooks of its strategy and callback.

    This kind has no batches: it may end before its first one. It advances epochs, and adds up what is logged.

    Args:
        sizes: images of each batch of each epoch.
    """

    epoch = 0
    """of the next batches, from 0"""
    drop_last = False
    """whether a last batch of fewer images is left out"""
    horizon: Horizon
    outer: World

    def __init__(self, sizes: list[list[int]]) -> None:
        self.sizes = sizes
        self._logged: dict[str, list[tuple[Tensor, float]]] = {}  # numbers, where they were computed, and their weights
        self._images = self._weight = 0.0  # of the epoch so far, and those to which the next numbers belong

    def __len__(self) -> int:
        return len(self.sizes[self.epoch])

    if not TYPE_CHECKING:  # mypy would take any name for one of these

        def __getattr__(self, name: str) -> NoReturn:
            """Say what a module finds in its ``train_dataloader``."""
            raise AttributeError(
                f"self.trainer.train_dataloader has no {name}: fedsim makes the batches; it has batch_size, dataset, "
                "drop_last and sampler"
            )

    @property
    def batch_size(self) -> int:
        """Images of the largest batch of an epoch."""
        return max(self.sizes[self.epoch])

    @property
    def sampler(self) -> Sequence[int]:
        """The positions of the images of an epoch."""
        return self.dataset

    @property
    def dataset(self) -> range:
        """The images of an epoch, by number, for modules that count them."""
        return range(sum(self.sizes[self.epoch]))

    def __iter__(self) -> Iterator[Any]:
        return self.read(self.epoch)

    def read(self, epoch: int) -> Iterator[Any]:  # noqa: ARG002 - subclasses need it
        """Yield the batches of an epoch."""
        return iter(())

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:  # noqa: ARG002 - Lightning's
        """Note numbers; those on a device stay there until :attr:`sums` are read."""
        for name, value in metrics.items():
            if name not in ("epoch", "step"):  # by which Lightning counts
                number = torch.as_tensor(value).detach().to(torch.float64, copy=True)
                self._logged.setdefault(name, []).append((number, self._weight or 1.0))

    @property
    def sums(self) -> dict[str, Tensor]:
        """Name of what is logged -> [sum, images] float64 on the CPU; the host waits for the device, once."""
        numbers = iter(_read([number for noted in self._logged.values() for number, _ in noted]))
        sums = {}
        for name, noted in self._logged.items():
            total = images = 0.0
            for _, weight in noted:  # not by sum(), whose rounding depends on Python's version
                total, images = total + next(numbers) * weight, images + weight
            sums[name] = torch.tensor([total, images], dtype=torch.float64)
        return sums

    def give(self, module: LightningModule) -> None:
        """Set values that ``setup`` may look at: it may make further layers."""

    def load(self, module: LightningModule) -> None:
        """Set values: the module is on its device, and its optimizers are not made yet."""

    def training_step(self, step: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Return the output of ``training_step`` for a batch."""
        return step(*args)

    def optimizer_step(self, step: Callable[[], Any]) -> Any:
        """Take the step of an optimizer, with the closure that computes gradients; return its output."""
        return step()

    def after_batch(self) -> None:
        """A batch is over."""

    def see_optimizers(self, trainer: Any) -> None:
        """The module has made its optimizers: for the training, or anew during it."""

    def on_train_epoch_start(self, *_: Any) -> None:
        """Give what is logged from here the weight of an image."""
        self._images = self._weight = 0.0

    def on_train_batch_start(self, _trainer: Any, _module: LightningModule, _batch: Any, number: int) -> None:
        """Give what is logged from here the weight of a batch."""
        self._weight = float(self.sizes[self.epoch][number])
        self._images += self._weight

    def on_train_batch_end(self, *_: Any) -> None:
        """Let callbacks of the run talk to other ranks."""
        with _seeing(self.outer):
            self.after_batch()

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        """Go on to the next epoch, if there is one; give what is logged from here the weight of this one.

        Lightning ends a run itself: a callback may have asked it for a further epoch, which repeats the last one.
        """
        self._weight = self._images
        trainer.should_stop |= self.epoch + 1 == len(self.sizes) and trainer.current_epoch + 1 < self.horizon.end
        self.epoch = min(self.epoch + 1, len(self.sizes) - 1)


def train(module: LightningModule, training: Training, horizon: Horizon, options: Options, seed: int) -> None:
    """Let Lightning train a module."""
    package: Any = package_of(module)
    training.horizon = horizon
    hooks: dict[str, Any] = {
        name: staticmethod(getattr(training, name)) for name in dir(training) if name.startswith(("on_", "log_"))
    }
    module.prepare_data = _nothing  # type: ignore[method-assign] # of this copy: images are fedsim's
    with (
        TemporaryDirectory() as folder, _seeing((None, 0)) as training.outer, _outermost(package),
        isolate_rng(include_cuda=False),
    ):  # fmt: skip
        hooks |= dict.fromkeys(("save_dir", "root_dir", "log_dir"), folder)  # files last no longer than the training
        bases = (package.Callback, package.loggers.logger.DummyLogger)
        callback, logger = (type("Events", (base,), hooks)() for base in bases)
        seed_global_stream(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002 - the stream that modules of users draw from
        trainer = package.Trainer(
            accelerator=options.device.type, devices=1, strategy=_strategy(package, training, options.device, folder),
            precision=options.precision, accumulate_grad_batches=options.accumulate,
            gradient_clip_val=options.grad_clip, default_root_dir=folder, logger=logger, callbacks=[callback],
            log_every_n_steps=1,
            plugins=[import_module(f"{package.__name__}.plugins.environments").LightningEnvironment()],
            max_epochs=-1 if horizon.rounds is None else horizon.epochs * horizon.rounds,
            reload_dataloaders_every_n_epochs=1, limit_val_batches=0, num_sanity_val_steps=0,
            use_distributed_sampler=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, enable_autolog_hparams=False, detect_anomaly=torch.is_anomaly_enabled(),
        )  # fmt: skip
        trainer._signal_connector.register_signal_handlers = _nothing  # they are the outer Trainer's
        trainer._logger_connector.log_metrics = partial(_log, trainer._logger_connector, training)
        # where it would read them from a checkpoint: the hooks before see none, and new schedulers begin at 0
        trainer._checkpoint_connector.restore_training_state = partial(_go_on, trainer, horizon, len(training))
        on_interrupt = signal.getsignal(signal.SIGINT)
        if any(has_own(module, hook) for hook in ("setup", "configure_model", "configure_callbacks")):
            training.give(module)
        try:
            trainer.fit(module, training)
        except SystemExit as error:
            if isinstance(error.__context__, KeyboardInterrupt):  # Ctrl-C, which Lightning makes an exit, and ignores
                signal.signal(signal.SIGINT, on_interrupt)
                raise KeyboardInterrupt from error
            raise
        finally:
            module.trainer = None


def _log(connector: Any, training: Training, metrics: Mapping[str, Any], step: int | None = None) -> None:
    """Note what a module logs, in place of Lightning, whose loggers wait for each number of each batch."""
    connector._logged_metrics.update(metrics)
    training.log_metrics(metrics, step)


def _read(numbers: Sequence[Tensor]) -> list[float]:
    """Return scalars, some of which may be on a device; the host waits for it once."""
    on_device = [number for number in numbers if not number.is_cpu]
    read = iter(torch.stack(on_device).tolist() if on_device else ())
    return [number.item() if number.is_cpu else next(read) for number in numbers]


class _SetUp(Training):
    """Ends before its first batch."""

    def on_fit_start(self, trainer: Any, *_: Any) -> None:
        trainer.fit_loop.max_epochs = 0


def set_up(module: LightningModule, horizon: Horizon, seed: int) -> None:
    """Let Lightning call the hooks of a module that come before its training, such as ``setup``."""
    train(module, _SetUp([[1]] * horizon.epochs), horizon, Options(torch.device("cpu")), seed)


def _below(folder: str, act: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    """Let Lightning write or remove a file of its, if it is below a folder."""
    [path] = [value for value in (*arguments, *options.values()) if isinstance(value, str | os.PathLike)]
    if Path(path).resolve().is_relative_to(Path(folder).resolve()):
        act(*arguments, **options)


def _strategy(package: Any, training: Training, device: torch.device, folder: str) -> Any:
    """Return Lightning's strategy of a single device, with the additions of a training."""
    strategy = package.strategies.SingleDeviceStrategy(device)
    move, step, optimize = strategy.model_to_device, strategy.training_step, strategy.optimizer_step
    make_optimizers = strategy.setup_optimizers

    def model_to_device() -> None:
        move()
        training.load(strategy.lightning_module)

    def setup_optimizers(trainer: Any) -> None:
        make_optimizers(trainer)
        training.see_optimizers(trainer)

    strategy.model_to_device, strategy.setup_optimizers = model_to_device, setup_optimizers
    strategy.training_step = lambda *args, **options: training.training_step(partial(step, **options), args)
    strategy.optimizer_step = lambda *args, **options: training.optimizer_step(partial(optimize, *args, **options))
    # a run's checkpoints hold its clients; those of the training last as long as its folder
    for name in ("save_checkpoint", "remove_checkpoint"):
        setattr(strategy, name, partial(_below, folder, getattr(strategy, name)))
    strategy.teardown = lambda: strategy.precision_plugin.teardown()  # the module stays: its values are read afterwards
    return strategy


def _go_on(trainer: Any, horizon: Horizon, num_batches: int) -> None:
    """Count the epochs, batches and optimizer steps of earlier rounds, and step new schedulers for them, in order."""
    module, epochs = trainer.lightning_module, horizon.first_epoch
    stepping = [n for n in range(1, num_batches + 1) if n % trainer.accumulate_grad_batches == 0 or n == num_batches]
    is_manual = not module.automatic_optimization  # each optimizer steps on each batch, and the module steps schedulers
    of_epoch = num_batches * max(len(trainer.optimizers), 1) if is_manual else len(stepping)
    # one that follows what is logged begins anew
    configs = [] if is_manual else [config for config in trainer.lr_scheduler_configs if not config.reduce_on_plateau]
    by_step = [config for config in configs if config.interval == "step"]
    by_epoch = [config for config in configs if config.interval != "step"]
    for epoch in range(epochs if configs else 0):
        for steps, number in enumerate(stepping if by_step else (), start=1):
            _count(trainer, epoch, epoch * num_batches + number, epoch * of_epoch + steps)
            for config in by_step:
                if number % config.frequency == 0:
                    module.lr_scheduler_step(config.scheduler, None)
        _count(trainer, epoch, (epoch + 1) * num_batches, (epoch + 1) * of_epoch)
        for config in by_epoch:
            if (epoch + 1) % config.frequency == 0:
                module.lr_scheduler_step(config.scheduler, None)
    _count(trainer, epochs, epochs * num_batches, epochs * of_epoch)


def _count(trainer: Any, epochs: int, batches: int, steps: int) -> None:
    """Set the counters of a Trainer."""
    loop = trainer.fit_loop.epoch_loop
    counts = (
        (trainer.fit_loop.epoch_progress.current, epochs), (loop.batch_progress.total, batches),
        (loop.automatic_optimization.optim_progress.optimizer.step.total, steps),
        (loop.manual_optimization.optim_step_progress.total, steps),
    )  # fmt: skip
    for progress, count in counts:
        vars(progress).update(dict.fromkeys(vars(progress), count))


World = tuple[Any, int]
"""torch's default process group, None if there is none, and Lightning's rank"""


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[Any]:
    """Let an attribute have another value for a while; yield what it was."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield before
    finally:
        setattr(owner, name, before)


def muted(module: object) -> AbstractContextManager[Any]:
    """Let modules of a module's package log nothing for a while."""
    package: Any = package_of(module)
    return replaced(package.LightningModule, "log", _nothing)


@contextmanager
def _seeing(world: World) -> Iterator[World]:
    """Let torch, Lightning, metrics and the module see a process group for a while; yield what they saw before."""
    group, rank = world
    with replaced(distributed.GroupMember, "WORLD", group) as old, replaced(rank_zero_only, "rank", rank) as old_rank:
        yield old, old_rank


@contextmanager
def _outermost(package: Any) -> Iterator[None]:
    """Silence Lightning's words on each Trainer, and let the module's autocast contexts be the outermost ones.

    Others keep casts of weights that have moved since. Callbacks of installed packages (entry points) are the run's:
    to look for them takes longer than all else that a Trainer does before its first batch.
    """
    depth = torch.autocast_increment_nesting() - 1
    for _ in range(depth + 1):
        torch.autocast_decrement_nesting()
    torch.clear_autocast_cache()
    try:
        with (
            # not by levels: setting one clears the caches of all loggers
            replaced(rank_zero.log, "disabled", True),
            replaced(logging.getLogger(f"{package.__name__}.accelerators.cuda"), "disabled", True),
            replaced(package.trainer.connectors.callback_connector, "_load_external_callbacks", lambda _: []),
        ):
            yield
    finally:
        for _ in range(depth):
            torch.autocast_increment_nesting()


def _nothing(*_: Any, **__: Any) -> None:
    """Stand for a function that is not needed; no lambda, as users pickle modules."""
