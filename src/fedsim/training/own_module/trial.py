"""A trial of a user's module before the run: one step on random images, on a copy that is thrown away."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from lightning import LightningModule
from torch import Tensor
from torch.optim import Optimizer

from fedsim.core.errors import ConfigError, FedSimError
from fedsim.training.own_module.blueprint import Blueprint
from fedsim.training.own_module.module_batch import LabelledImages
from fedsim.training.own_module.module_model import attach
from fedsim.training.own_module.rules import (
    begin_batch,
    end_batch,
    features_of,
    has_own,
    loss_of,
    named,
    takes_batch_number,
)
from fedsim.training.own_module.schedules import configured
from fedsim.training.own_module.stand_in import Logged, StandInTrainer


class SameKind:
    """Makes optimizers of the kind, and with the options, of another one: for checks, and for the rate in the log."""

    def __init__(self, like: Optimizer) -> None:
        like.state.clear()
        self._like = like
        self._options = {name: value for name, value in like.param_groups[0].items() if name != "params"}
        self._options["lr"] = self._options.get("initial_lr", self._options.get("lr"))  # before its schedule
        like.param_groups.clear()

    def __call__(self, params: Iterable[Any]) -> Optimizer:
        """Return an optimizer of these parameters, in one group."""
        made = object.__new__(type(self._like))
        made.__dict__.update(self._like.__dict__)
        made.state, made.param_groups = defaultdict(dict), []
        made.add_param_group({"params": list(params), **self._options})
        return made


class StepTrial(NamedTuple):
    """The results of one step of a module."""

    log_names: tuple[str, ...]
    """the names that it logged"""
    width: int
    """D, of its features"""
    head: frozenset[str]
    """names of the parameters that its features do not depend on: its classifier"""
    has_schedule: bool
    """whether it has a scheduler"""
    optimizer: SameKind
    """makes optimizers like that of a client"""


class TrialImages(NamedTuple):
    """The images of a trial."""

    size: tuple[int, int]
    """[H, W] of training images"""
    test_size: tuple[int, int]
    """[H, W] of test images"""
    num_images: int
    """of a batch"""
    num_instances: int
    """images of each identity"""


def try_module(blueprint: Blueprint, trials: TrialImages, device: torch.device) -> StepTrial:
    """Let a copy of a module take one step; no random stream of the caller advances.

    Raises:
        ConfigError: in one line, if the module fails or breaks a rule.
    """
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        module = copy.deepcopy(blueprint.first).to(device).train()
        trainer = StandInTrainer(blueprint.name, first_epoch=0, epochs=1, rounds=1, batches=2, accumulate=1)
        logged = Logged(None)
        attach(module, trainer, logged)
        optimizer, schedules = configured(module)
        trainer.optimizers, trainer.lr_scheduler_configs = [optimizer], schedules
        images = torch.randn(trials.num_images, 3, *trials.size, device=device)
        labels = (torch.arange(trials.num_images, device=device) // trials.num_instances) % blueprint.num_classes
        batch = LabelledImages(images, labels, torch.arange(trials.num_images, device=device) % 2)
        logged.size = trials.num_images
        with _in_one_line(module, "training"):
            _step(module, optimizer, batch)
            module.on_train_epoch_end()
            logged.end_epoch()
            for schedule in schedules:
                schedule.step(module, schedule.interval, schedule.frequency)
            module.on_train_end()
            module.on_fit_end()
        fresh = copy.deepcopy(blueprint.first).to(device).eval()
        with _in_one_line(module, "taking features"):
            width, head = _features(fresh, blueprint, torch.randn(2, 3, *trials.size, device=device))
            features_of(fresh, torch.randn(2, 3, *trials.test_size, device=device))
    return StepTrial(logged.all_names, width, head, bool(schedules), SameKind(optimizer))


def _step(module: LightningModule, optimizer: Optimizer, batch: Any) -> None:
    """Take one step as a client does."""
    module.on_fit_start()
    module.on_train_start()
    module.on_train_epoch_start()
    batch = begin_batch(module, batch, 0)
    returned = module.training_step(batch, *([0] if takes_batch_number(module) else []))
    loss = loss_of(module, returned)
    module.on_before_backward(loss)
    loss.backward()
    module.on_after_backward()
    module.on_before_optimizer_step(optimizer)
    if has_own(module, "configure_gradient_clipping"):
        module.configure_gradient_clipping(optimizer, None, "norm")
    if has_own(module, "optimizer_step"):
        module.optimizer_step(0, 0, optimizer, lambda: loss)
    else:
        optimizer.step()
    module.on_before_zero_grad(optimizer)
    end_batch(module, returned, batch, 0)


def _features(module: LightningModule, blueprint: Blueprint, images: Tensor) -> tuple[int, frozenset[str]]:
    """Return the width of the features, and the names of the parameters that they do not depend on."""
    features = features_of(module, images)
    width = features.shape[1]
    if blueprint.takes_classes:
        larger = blueprint.build(blueprint.num_classes + 1).to(images.device).eval()
        if features_of(larger, images).shape[1] != width:
            raise ConfigError(
                f"{named(module)} gives features whose number depends on num_classes; define embed(images), which "
                "returns what the classifier gets"
            )
    head = set(blueprint.sizes)
    if features.requires_grad:  # else they are computed without gradients, which shows nothing
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        reached = torch.autograd.grad(features.sum(), [*trained.values()], allow_unused=True)
        head |= {name for name, gradient in zip(trained, reached, strict=True) if gradient is None}
    return width, frozenset(head)


@contextmanager
def _in_one_line(module: LightningModule, activity: str) -> Iterator[None]:
    """Report errors of the user's code in one line."""
    try:
        yield
    except FedSimError:
        raise
    except Exception as error:
        *_, last = str(error).splitlines() or [""]
        raise ConfigError(
            f"{named(module)} failed in {activity}, on random images ({type(error).__name__}: {last.strip()}); try it "
            "under lightning.Trainer, too"
        ) from error
