"""A trial of a user's module before the run: a session like any other, of one step on random images, on a copy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from lightning import LightningModule
from torch import Tensor
from torch.optim import Optimizer

from fedsim.core.errors import ConfigError
from fedsim.training.batch import Batch
from fedsim.training.own_module.blueprint import Blueprint, copy_of
from fedsim.training.own_module.inner_trainer import Batches, Events, Horizon, Options, train
from fedsim.training.own_module.module_batch import BatchForm
from fedsim.training.own_module.module_client import name_of
from fedsim.training.own_module.network import features_of
from fedsim.training.own_module.package import in_one_line, named
from fedsim.training.settings import LocalTraining

_MAX_TRIED = 8
"""images of a trial whose batches are shuffled"""


class OptimizerTemplate:
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
    """the numbers that it logged, by the names that they have in fedsim's log"""
    width: int
    """D, of its features"""
    head: frozenset[str]
    """names of the parameters that its features do not depend on: its classifier"""
    has_schedule: bool
    """whether it has a scheduler"""
    optimizer: OptimizerTemplate
    """makes optimizers like the first one of a client"""


class ClientNumbers(Protocol):
    """The numbers of a client that a trial follows."""

    @property
    def num_images(self) -> int:
        """Number of training images."""

    @property
    def num_classes(self) -> int:
        """Number of identities."""


class TrialImages(Batches):
    """Random images in the sizes and numbers of a run's clients; a trial trains on the first ones.

    Args:
        clients: of the run.
        training: their common settings.
        sizes: of ``train`` and ``test`` images, [H, W].
        form: of the batches.
    """

    def __init__(
        self,
        clients: Sequence[ClientNumbers],
        training: LocalTraining,
        sizes: Mapping[str, tuple[int, int]],
        form: BatchForm,
    ) -> None:
        most, in_groups = max(client.num_images for client in clients), training.draws_people
        batch = training.batch_of(most)
        number = max(1, most // batch if training.drop_partial else -(-most // batch))
        super().__init__([[batch if in_groups else min(batch, _MAX_TRIED)] * number])
        self._instances = training.num_instances if in_groups else 2
        self._classes = max(client.num_classes for client in clients)
        self._trained, self._image_sizes, self._form = training.accumulate, sizes, form
        self.device = torch.device("cpu")

    def read(self, epoch: int) -> Iterator[Any]:
        """Yield random batches."""
        for size in self.sizes[epoch][: self._trained]:
            count = torch.arange(size, device=self.device)
            labels = (count // self._instances) % self._classes
            images, *views = [self.images(size) for _ in range(self._form.num_views)]
            yield self._form(Batch(images, labels, tuple(views), cameras=count % 2))

    def images(self, count: int, kind: str = "train") -> Tensor:
        """Return random images [count, 3, H, W]."""
        return torch.randn(count, 3, *self._image_sizes[kind], device=self.device)


class _Look(Events):
    """Notes what Lightning has made of a module."""

    def on_fit_start(self, trainer: Any, module: LightningModule) -> None:
        """Look at the optimizers; raise ConfigError if they step what does not last."""
        super().on_fit_start(trainer, module)
        self.optimizers: list[Any] = trainer.optimizers
        self.has_schedule = bool(trainer.lr_scheduler_configs)
        of_module = {id(parameter) for parameter in module.parameters()}
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        if not groups:
            raise ConfigError(f"{named(module)}: configure_optimizers returned no optimizer; return one")
        if any(id(p) not in of_module for group in groups for p in group["params"]):
            raise ConfigError(
                f"{named(module)}: configure_optimizers has tensors that are not parameters of the module; register "
                "them"
            )


def try_module(blueprint: Blueprint, images: TrialImages, horizon: Horizon, options: Options, seed: int) -> StepTrial:
    """Let a copy of a module train a little; no random stream of the caller advances.

    Raises:
        ConfigError: in one line, if the module fails or breaks a rule.
    """
    images.device = device = options.device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        module = blueprint.build(blueprint.num_classes)
        look = _Look(images)
        with in_one_line(blueprint.name, "a training on random images"):
            logged = train(module, images, look, horizon, options, seed)
        with in_one_line(blueprint.name, "taking features of random images"):
            fresh = copy_of(blueprint.first).to(device).eval()
            width, head = _features(fresh, blueprint, images)
            features_of(fresh, images.images(2, "test"))
    return StepTrial(tuple(map(name_of, logged)), width, head, look.has_schedule, OptimizerTemplate(look.optimizers[0]))


def _features(module: LightningModule, blueprint: Blueprint, images: TrialImages) -> tuple[int, frozenset[str]]:
    """Return the width of the features, and the names of the parameters that they do not depend on."""
    some = images.images(2)
    features = features_of(module, some)
    width = features.shape[1]
    if blueprint.takes_classes:
        larger = blueprint.ready(blueprint.num_classes + 1).to(images.device).eval()
        if features_of(larger, some).shape[1] != width:
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
