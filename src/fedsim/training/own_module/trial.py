"""A trial of a user's module before the run: a session like any other, of one step on random images, on a copy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from lightning import LightningModule
from torch import Tensor
from torch.optim import Optimizer

from fedsim.core.errors import ConfigError
from fedsim.training.batch import Batch
from fedsim.training.own_module.blueprint import Blueprint
from fedsim.training.own_module.inner_trainer import Training
from fedsim.training.own_module.module_batch import BatchForm
from fedsim.training.own_module.network import features_of
from fedsim.training.own_module.package import named
from fedsim.training.settings import LocalTraining

_MAX_TRIED = 8
"""images of a trial whose batches are shuffled"""


class TrialTraining(Training):
    """Trains on random images in the sizes and numbers of a run's clients; notes what Lightning makes of a module.

    Args:
        most: images of the largest client.
        classes: largest number of people of a client.
        training: their common settings.
        sizes: of ``train`` and ``test`` images, [H, W].
        form: of the batches.
        device: of the images.
    """

    def __init__(
        self, most: int, classes: int, training: LocalTraining, sizes: Mapping[str, tuple[int, int]], form: BatchForm,
        device: torch.device,
    ) -> None:  # fmt: skip
        batch, in_groups = training.batch_of(most), training.draws_people
        number = max(1, most // batch if training.drop_partial else -(-most // batch))
        super().__init__([[batch if in_groups else min(batch, _MAX_TRIED)] * number])
        self._instances, self._classes = training.num_instances if in_groups else 2, classes
        self._trained, self._image_sizes, self._form, self.device = training.accumulate, sizes, form, device

    def read(self, epoch: int) -> Iterator[Any]:
        """Yield random batches, as many as a step takes."""
        for size in self.sizes[epoch][: self._trained]:
            count = torch.arange(size, device=self.device)
            labels = (count // self._instances) % self._classes
            images, *views = [self.images(size) for _ in range(self._form.num_views)]
            yield self._form(Batch(images, labels, tuple(views), cameras=count % 2))

    def images(self, count: int, kind: str = "train") -> Tensor:
        """Return random images [count, 3, H, W]."""
        return torch.randn(count, 3, *self._image_sizes[kind], device=self.device)

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


def optimizer_like(like: Optimizer) -> Callable[[Iterable[Any]], Optimizer]:
    """Return a function that makes optimizers of a kind, with its options: for checks, and for the rate in the log."""
    group = {**like.param_groups[0]}
    group["lr"] = group.get("initial_lr", group.get("lr"))  # before its schedule
    del group["params"]
    others = {name: value for name, value in vars(like).items() if name not in ("param_groups", "state")}

    def make(params: Iterable[Any]) -> Optimizer:
        made = object.__new__(type(like))
        vars(made).update(others, state=defaultdict(dict), param_groups=[])
        made.add_param_group({"params": list(params), **group})
        return made

    return make


def features_in(blueprint: Blueprint, training: TrialTraining) -> tuple[int, frozenset[str]]:
    """Return the width of the features, and the names of the parameters that they do not depend on: the classifier."""
    module, images = blueprint.first.to(training.device).eval(), training.images(2)
    features = features_of(module, images)
    width = features.shape[1]
    features_of(module, training.images(2, "test"))
    if blueprint.takes_classes:
        larger = blueprint.ready(blueprint.num_classes + 1).to(training.device).eval()
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
