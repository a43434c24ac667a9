"""Refusals of Lightning options that have no meaning, or another one, in a federation; each names a replacement."""

from __future__ import annotations

import logging
import re
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning import Callback, Trainer
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
    OnExceptionCheckpoint,
    ProgressBar,
    SpikeDetection,
    StochasticWeightAveraging,
    WeightAveraging,
)

from fedsim.core.devices import cpu_computes_bf16, devices_here
from fedsim.core.errors import ConfigError
from fedsim.core.metrics import ACCURACIES, METRICS
from fedsim.data.datamodule import FederatedDataModule
from fedsim.settings.table import section
from fedsim.strategy.strategy import FederatedStrategy

log = logging.getLogger(__name__)


@contextmanager
def naming_the_field(options: Mapping[str, Any]) -> Iterator[None]:
    """Name the field of the trainer section ``options`` that the constructor of Lightning's Trainer refuses.

    Raises:
        ConfigError: if Lightning raises; errors of other code in the block stay as they are.
    """
    try:
        yield
    except (ValueError, TypeError, MisconfigurationException) as error:
        *_, (innermost, _) = traceback.walk_tb(error.__traceback__)
        if innermost.f_globals["__name__"].partition(".")[0] != "lightning":
            raise
        raise ConfigError(_refusal(str(error), options)) from error


def _refusal(message: str, options: Mapping[str, Any]) -> str:
    """Return a line about the first field that Lightning's message names.

    >>> _refusal("`num_nodes` must be a positive integer, but got 0.", {"devices": "auto", "num_nodes": 0})[:42]
    'trainer.num_nodes: 0 cannot be used (`num_'
    """
    message = message.rstrip(".")
    facts = {name: setting.facts for name, setting in section("trainer").arguments.items()}
    names = [name for name, fact in facts.items() if fact.refused_by and re.search(fact.refused_by, message)]
    names += re.findall(rf"\b({'|'.join(options)})\b", message)
    if "for __new__()" in message:  # fields of a timedelta that is none
        names += [n for n in ("max_time", "val_check_interval") if not isinstance(options[n], str | int | float | None)]
    if not names:
        return f"trainer: {message}"
    name = names[0]
    remedy = f"; {facts[name].remedy}" if facts[name].remedy else ""
    if name in ("devices", "accelerator"):
        remedy += f"; here: {devices_here()}"
    return f"trainer.{name}: {options[name]} cannot be used ({message}){remedy}"


def check_callbacks(callbacks: Sequence[Callback]) -> None:
    """Raise ConfigError for a second progress bar, or a second callback of one state.

    Lightning's lines have the addresses of the objects, or a traceback.
    """
    bars = [type(callback).__name__ for callback in callbacks if isinstance(callback, ProgressBar)]
    if len(bars) > 1:
        raise ConfigError(
            f"trainer.callbacks: {', '.join(bars)} are progress bars, and a run shows one; leave the others out"
        )
    keys = Counter(c.state_key for c in callbacks if type(c).state_dict is not Callback.state_dict)
    for callback in callbacks:
        if keys[callback.state_key] > 1:
            name = type(callback).__name__
            raise ConfigError(f"trainer.callbacks: {name} is there twice, and a checkpoint holds one state; give one")


def check_one_batch(limit: float | str | None) -> None:
    """Raise ConfigError for one batch as ``limit_train_batches``: in a config it would be read as 1.0, all batches."""
    if isinstance(limit, int) and limit == 1:
        raise ConfigError(
            "trainer.limit_train_batches: 1 (one batch) cannot be distinguished from 1.0 (all batches); "
            "set data.limit_client_batches to 1"
        )


def limit_of_batches(trainer: Trainer, data: FederatedDataModule) -> float | None:
    """Return the batches per client and local epoch, or below 1 a share of them; None: all.

    Raises ConfigError if both settings limit them; ``fast_dev_run`` sets that of the ``trainer``.
    """
    limit = trainer.limit_train_batches
    if not isinstance(limit, int):
        return data.limit_client_batches
    if data.limit_client_batches is not None and not trainer.fast_dev_run:  # type: ignore[attr-defined] # as above
        raise ConfigError(
            f"data.limit_client_batches: trainer.limit_train_batches is {limit}, too; leave one of them out"
        )
    return limit


def check_trainer(
    trainer: Trainer, has_validation: bool = True, metrics: Sequence[str] = (*METRICS, *ACCURACIES)
) -> None:
    """Raise ConfigError for the first option of ``trainer`` that fedsim does not support.

    ``has_validation``: clients hold out validation data, which monitors of ``val/*`` need. ``metrics``: names of the
    scores.
    """
    limit, steps = trainer.limit_train_batches, trainer.log_every_n_steps  # type: ignore[attr-defined] # in a connector
    problems = {
        f"gradient_clip_val: {trainer.gradient_clip_val} is for the server's step; set model.client.grad_clip": (
            trainer.gradient_clip_val is not None
        ),
        "barebones: a federation needs loggers and callbacks; leave it out": trainer.barebones,
        "reload_dataloaders_every_n_epochs: a federation's loaders have no images; leave it out": (
            trainer.reload_dataloaders_every_n_epochs != 0  # type: ignore[attr-defined] # set in Lightning's connector
        ),
        f"accumulate_grad_batches: {trainer.accumulate_grad_batches} would skip rounds; set model.client.accumulate": (
            trainer.accumulate_grad_batches != 1
        ),
        f"limit_train_batches: {limit} must be an int, batches per client; for a share set data.limit_client_batches": (
            isinstance(limit, float) and limit != 1.0
        ),
        f"limit_train_batches: {limit} trains nothing; use at least 1 batch per client": (
            isinstance(limit, int) and limit < 1
        ),
        "overfit_batches: not supported; set data.limit_client_batches": (
            trainer.overfit_batches != 0  # type: ignore[attr-defined] # set in Lightning's connector
        ),
        f"val_check_interval: {trainer.val_check_interval} is within a round; set trainer.check_val_every_n_epoch": (
            trainer.val_check_interval not in (None, 1.0)
        ),
        f"check_val_every_n_epoch: {trainer.check_val_every_n_epoch} is not a number of rounds; set it to 1 or more": (
            trainer.check_val_every_n_epoch is None or trainer.check_val_every_n_epoch < 1
        ),
        f"num_sanity_val_steps: {trainer.num_sanity_val_steps} is not a number of batches; use 0, or -1 for all": (
            trainer.num_sanity_val_steps < -1
        ),
        f"log_every_n_steps: {steps} is not a number of rounds; set it to 1 or more, or to 0 to log nothing": steps < 0,
        f"precision: {trainer.precision} is not supported; use 32-true or bf16-mixed": (
            trainer.precision not in ("32-true", "bf16-mixed")
        ),
    }
    if not isinstance(trainer.strategy, FederatedStrategy):
        name = type(trainer.strategy).__name__
        raise ConfigError(
            f"trainer.strategy: {name} is not fedsim's; in a config leave it out; in Python use "
            "fedsim.Trainer, or strategy=FederatedStrategy()"
        )
    trainer.strategy.check()
    if trainer.strategy._layer_sync is not None:
        raise ConfigError("trainer.sync_batchnorm: clients have unequal numbers of batches; set model.bn_stats instead")
    for problem, present in problems.items():
        if present:
            raise ConfigError(f"trainer.{problem}")
    for callback in trainer.callbacks:  # type: ignore[attr-defined] # Lightning's stub misses it
        _check_callback(callback, f"trainer.callbacks: {type(callback).__name__}")
        if isinstance(callback, (ModelCheckpoint, EarlyStopping)) and callback.monitor is not None:
            _check_monitor(f"trainer.callbacks: {type(callback).__name__}", callback.monitor, has_validation, metrics)
    if trainer.strategy.root_device.type == "cuda" and not torch.are_deterministic_algorithms_enabled():
        log.info("GPU kernels may differ in the last bits from run to run; --trainer.deterministic=true prevents it")


_ON_A_STEP: dict[tuple[type[Callback], ...], str] = {
    (GradientAccumulationScheduler,): "set model.client.accumulate",
    (StochasticWeightAveraging, WeightAveraging): "set model.server_optimizer, or average checkpoints of fedsim export",
    (ModelPruning,): "choose a model.method that prunes, such as FedDIP or SubFedAvg",
    (SpikeDetection,): "look at train/loss, and set model.on_bad_update",
    (BaseFinetuning,): "choose the parts that train in your backbone or module",
}
"""kinds of callbacks of Lightning that change what an optimizer steps -> the setting instead of them"""


def data_of(trainer: Trainer) -> FederatedDataModule:
    """Return the trainer's data; raise ConfigError if they are not a federation's."""
    data = trainer.datamodule  # type: ignore[attr-defined] # Lightning sets it if there is one
    if data is None:
        raise ConfigError("data: a federation has the images of its clients; give datamodule=FederatedDataModule(...)")
    if not isinstance(data, FederatedDataModule):
        raise ConfigError(f"data: {type(data).__name__} is not a FederatedDataModule")
    return data


def warn_of_idle_ranks(ranks: int, per_machine: int, micro_batches: Mapping[str, int]) -> None:
    """Warn if ranks have nothing to train; those of a machine can share a client that has several ``micro_batches``."""
    enough, clients = sum(min(number, per_machine) for number in micro_batches.values()), len(micro_batches)
    if ranks > enough:
        log.warning(
            "trainer.devices: %d ranks, but only %d client%s: the other ranks have nothing to train; %d %s enough",
            ranks, clients, "s" * (clients != 1), enough, "are" if enough > 1 else "is",
        )  # fmt: skip


def warn_of_slow_precision(trainer: Trainer) -> None:
    """Warn if a CPU without instructions for bfloat16 must compute in it."""
    if trainer.precision == "bf16-mixed" and trainer.strategy.root_device.type == "cpu" and not cpu_computes_bf16():
        log.warning("trainer.precision: this CPU lacks instructions for bf16-mixed; 32-true is several times as fast")


def _check_callback(callback: Callback, field: str) -> None:
    """Raise ConfigError if ``callback`` acts or saves within a round, or saves too little to resume from."""
    if isinstance(callback, (LearningRateFinder, BatchSizeFinder)):
        raise ConfigError(f"{field} would train the server's step; set model.client, or try values with fedsim sweep")
    for kinds, remedy in _ON_A_STEP.items():
        if isinstance(callback, kinds):
            raise ConfigError(f"{field} acts on the server's step; {remedy}")
    if isinstance(callback, OnExceptionCheckpoint) or getattr(callback, "save_on_exception", False):
        raise ConfigError(
            f"{field} would save half a round after an error; leave it out: last.ckpt is at most one round old"
        )
    if isinstance(callback, ModelCheckpoint) and callback.save_weights_only:
        raise ConfigError(
            f"{field}'s save_weights_only leaves out states that a resumed run needs; use fedsim export for the weights"
        )


def _check_monitor(field: str, monitor: str, has_validation: bool, metrics: Sequence[str]) -> None:
    """Raise ConfigError if ``monitor`` is a test score, or not logged."""
    split, _, metric = monitor.partition("/")
    main = "mAP" if "mAP" in metrics else metrics[0]
    if split == "test":
        raise ConfigError(
            f"{field} would choose by {monitor}; monitor val/{main}, or oracle/{main} to declare the use of test data"
        )
    if split == "val" and not has_validation:
        raise ConfigError(f"{field} monitors {monitor}, but data.val is none; set data.val to identities or images")
    scores = split in ("val", "oracle") and metric.rpartition("/")[2] in metrics
    if not scores and split not in ("train", "client", "comm", "time"):
        raise ConfigError(f"{field} monitors {monitor}, which no such run logs; monitor val/{main} or train/loss")
