"""From a user's module and the settings of a federation to the rank's model."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from lightning import LightningModule
from torch import Tensor
from torch.optim import Optimizer

from fedsim.core.errors import ConfigError
from fedsim.data.federated import ClientData
from fedsim.models.groups import Group, group_names
from fedsim.training.batch import Batch
from fedsim.training.own_module.blueprint import Blueprint, MakesModule
from fedsim.training.own_module.inner_trainer import Horizon, Options, Training, has_own, train
from fedsim.training.own_module.module_batch import BatchForm, described
from fedsim.training.own_module.module_client import name_of
from fedsim.training.own_module.module_errors import in_one_line, named, users_frames
from fedsim.training.own_module.module_model import ModuleModel
from fedsim.training.own_module.network import PART, ModuleNetwork, features_of
from fedsim.training.settings import ClientOverride, LocalTraining
from fedsim.training.statistics import Chooses, StatisticsPolicy, shared_names

_IDLE = (
    "train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader", "prepare_data", "validation_step",
    "test_step", "predict_step", "on_save_checkpoint", "on_load_checkpoint",
)  # fmt: skip
"""hooks of Lightning that a client has no use for: images are those of data, scores and checkpoints fedsim's"""
_OF_FORM = re.compile(
    r"values to unpack|cannot unpack|indices must be|tuple index out|'(LabelledImages|tuple|dict|list)' object has no"
)
"""Python's words about a batch in another form"""


@dataclass(frozen=True)
class OwnModule:
    """A user's module that has been tried."""

    blueprint: Blueprint
    form: BatchForm
    log_names: tuple[str, ...]
    """the numbers that it logged in its first step, by the names that they have in fedsim's log"""
    width: int
    """D, of its features"""
    head: frozenset[str]
    """names, in a network, of the parameters that its features do not depend on: its classifier"""
    training: LocalTraining
    """the clients' settings, with its optimizer in place of the configured one"""

    @property
    def idle_hooks(self) -> list[str]:
        """Its hooks that are never called."""
        return [hook for hook in _IDLE if has_own(self.blueprint.first, hook)]

    def check_override(self, client: str, override: ClientOverride) -> None:
        """Raise ConfigError for settings of one client that the module decides."""
        for name in ("backbone", "optimizer", "head_lr", "cluster", "bottom_up", "micro_batch"):
            if getattr(override, name) is not None:
                raise ConfigError(
                    f"model.clients.{client}.{name}: {self.blueprint.name} is the model of all clients, and decides on "
                    "its training; leave it out"
                )

    def model(
        self, groups_shared: frozenset[Group], private: Sequence[str], policy: StatisticsPolicy, device: torch.device,
        choose: Chooses,
    ) -> ModuleModel:  # fmt: skip
        """Return the rank's model.

        ``groups_shared`` are those of the method, which may ``choose`` among their tensors; ``private`` are patterns of
        the names of tensors that stay with the clients in any case, and ``policy`` is that of running statistics.
        """
        network = ModuleNetwork(self.blueprint.first.to(device), self.width)
        groups = {name: Group.HEAD if name in self.head else group for name, group in group_names(network).items()}
        shared = shared_names(groups, groups_shared, policy, choose=choose)
        shared -= {f"{PART}.{name}" for name in self.blueprint.sizes}
        for pattern in private:
            matching = {name for name in groups if fnmatchcase(name, f"{PART}.{pattern}")}
            if not matching:
                first = ", ".join(name.removeprefix(f"{PART}.") for name in [*groups][:5])
                raise ConfigError(
                    f"model.private: no tensor of {self.blueprint.name} is named like {pattern}; it has "
                    f"{first}{' and others' if len(groups) > 5 else ''}"
                )
            shared -= matching
        return ModuleModel(self.blueprint, network, shared, groups)


def own_module(
    source: MakesModule, clients: Sequence[ClientData], training: LocalTraining, sizes: Mapping[str, tuple[int, int]],
    form: BatchForm, *, seed: int, options: Options, rounds: int | None,
) -> OwnModule:  # fmt: skip
    """Return a user's module after a trial; ``sizes`` are those of ``train`` and ``test`` images, [H, W].

    Raises:
        ConfigError: if it cannot train these clients, as it is configured.
    """
    for client in clients:
        if not client.knows_identities:
            raise ConfigError(f"model.module: client {client.name} has no identities to train on; leave it out")
        if client.generated is not None:
            raise ConfigError(
                f"data.generated: client {client.name} trains a module, on real images; remove its folder"
            )
    horizon = Horizon(training.local_epochs, 0, rounds)
    blueprint = Blueprint(source, seed, max(client.num_classes for client in clients), horizon)
    _check_settings(blueprint, training)
    most, device = max(client.num_images for client in clients), options.device
    trial = TrialTraining(most, blueprint.num_classes, training, sizes, form, device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        module = blueprint.fresh(blueprint.num_classes)
        size = trial.batch_size
        remedy = partial(_remedy, trial, blueprint)
        with in_one_line(blueprint.name, f"a training on random images, in batches of {size}", remedy):
            train(module, trial, horizon, options, seed)
        has_embed = callable(getattr(blueprint.first, "embed", None))
        with in_one_line(
            blueprint.name, "taking features of random images", lambda _: "" if has_embed else "; define embed(images)"
        ):
            width, head = _features_in(blueprint, trial)
    if trial.has_schedule and training.schedule != LocalTraining().schedule:
        raise ConfigError(f"model.client.schedule: {blueprint.name} has a schedule, too; leave one of them out")
    training = replace(training, optimizer=_optimizer_like(trial.optimizers[0]), optimizer_state="reset")
    return OwnModule(blueprint, form, tuple(map(name_of, trial.sums)), width, head, training)


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
        full, remainder = divmod(most, batch)
        last = [batch if in_groups else remainder] if remainder and not training.drop_partial else []
        super().__init__([[batch] * full + last or [batch]])
        self.drop_last = training.drop_partial
        self._instances, self._classes = training.num_instances if in_groups else 2, classes
        self._trained, self._image_sizes, self._form, self.device = training.accumulate, sizes, form, device

    def read(self, epoch: int) -> Iterator[Any]:
        """Yield random batches, as many as a step takes."""
        for size in self.sizes[epoch][: self._trained]:
            count = torch.arange(size, device=self.device)
            labels = self._classes - 1 - (count // self._instances) % self._classes  # the last one may be too large
            images, *views = [self.images(size) for _ in range(self._form.num_views)]
            self.batch = Batch(images, labels, tuple(views), cameras=count % 2, rows=count)
            self.formed = self._form(self.batch)
            yield self.formed

    def images(self, count: int, kind: str = "train") -> Tensor:
        """Return random images [count, 3, H, W]."""
        return torch.randn(count, 3, *self._image_sizes[kind], device=self.device)

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        """Let Lightning end the epoch as a whole one: with the schedulers that follow what is logged."""
        trainer.fit_loop.epoch_loop.batch_progress.current.ready = trainer.num_training_batches
        super().on_train_epoch_end(trainer)

    def see_optimizers(self, trainer: Any) -> None:
        """Look at the optimizers; raise ConfigError if they step what does not last."""
        module: LightningModule = trainer.lightning_module
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


def _remedy(trial: TrialTraining, blueprint: Blueprint, error: Exception) -> str:
    """Return the end of a line about an error of a trial, if the error says what is wrong."""
    if re.search(r"Target \d+ is out of bounds", str(error)) and not blueprint.takes_classes:
        return (
            f"; labels are 0 to {blueprint.num_classes - 1}; give the module {blueprint.num_classes} classes, or an "
            "argument num_classes"
        )
    in_step = any(function == "training_step" for _, function in users_frames(error))
    lacks_name = isinstance(error, KeyError) and isinstance(trial.formed, Mapping)
    if in_step and (lacks_name or _OF_FORM.search(str(error))):
        return f"; training_step gets {described(trial.formed, trial.batch)}; see model.module_batch"
    return ""


def _optimizer_like(like: Optimizer) -> Callable[[Iterable[Any]], Optimizer]:
    """Return a function that makes optimizers of a kind, with its options: for checks, and for the rate in the log."""
    kind, group = type(like), {name: value for name, value in like.param_groups[0].items() if name != "params"}
    group["lr"] = group.get("initial_lr", group.get("lr"))  # before its schedule
    # a scheduler's step would step the old one
    attributes = {name: value for name, value in vars(like).items() if name not in ("state", "param_groups", "step")}

    def make(params: Iterable[Any]) -> Optimizer:
        made = object.__new__(kind)
        vars(made).update(attributes, state=defaultdict(dict), param_groups=[])
        made.add_param_group({"params": list(params), **group})
        return made

    return make


def _features_in(blueprint: Blueprint, training: TrialTraining) -> tuple[int, frozenset[str]]:
    """Return the width of the features, and names, in a network, of parameters that they do not depend on."""
    module, images = blueprint.ready(blueprint.num_classes).to(training.device).eval(), training.images(2)
    features = features_of(module, images)
    width = features.shape[1]
    features_of(module, training.images(2, "test"))
    if blueprint.larger is not None:
        larger, blueprint.larger = blueprint.larger.to(training.device).eval(), None
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
    return width, frozenset(f"{PART}.{name}" for name in head)


def _check_settings(blueprint: Blueprint, common: LocalTraining) -> None:
    """Raise ConfigError if settings of training require what a module does not have."""
    name, is_manual = blueprint.name, not blueprint.first.automatic_optimization
    cuts = common.micro_batch not in (None, common.batch_size)
    gathers, clips = is_manual and common.accumulate != 1, is_manual and common.grad_clip is not None
    refused = {
        f"compile: {name} decides what is compiled; set it to false": common.compile,
        f"graph: the steps of {name} stay plain; set it to false": common.graph,
        f"head_lr: {name} decides on rates in configure_optimizers; set it to null": common.head_lr is not None,
        f"cluster: {name} trains on labels; leave it out": common.clusters,
        f"long_round: {name} has schedules of its own; leave it out": common.long_round is not None,
        f"optimizer_state: the optimizer of {name} begins anew; set it to reset": common.optimizer_state == "keep",
        f"micro_batch: Lightning trains {name} on whole batches; set it to null, and for less memory set batch_size "
        "and accumulate": cuts,
        f"accumulate: {name} optimizes manually, and decides itself when it steps; set it to 1": gathers,
        f"grad_clip: {name} optimizes manually; call self.clip_gradients in it, and set grad_clip to null": clips,
    }  # fmt: skip
    for problem, applies in refused.items():
        if applies:
            raise ConfigError(f"model.client.{problem}")
