"""From a user's module and the settings of a federation to the rank's model."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch
from torch import nn

from fedsim.core.errors import ConfigError
from fedsim.data.federated import ClientData
from fedsim.models.groups import Group, group_names
from fedsim.training.flat_model import arch_name
from fedsim.training.own_module.blueprint import Blueprint, MakesModule
from fedsim.training.own_module.module_client import holds_metrics
from fedsim.training.own_module.module_model import ModuleModel
from fedsim.training.own_module.network import PART, ModuleNetwork
from fedsim.training.own_module.trial import StepTrial, TrialImages, try_module
from fedsim.training.settings import ClientOverride, LocalTraining
from fedsim.training.statistics import StatisticsPolicy, shared_names

log = logging.getLogger(__name__)

_MAX_TRIED = 8
"""images of a trial whose batches are shuffled"""


@dataclass(frozen=True)
class OwnModule:
    """A user's module that has been tried."""

    blueprint: Blueprint
    trial: StepTrial

    @property
    def name(self) -> str:
        """Of its class."""
        return self.blueprint.name

    def training(self, common: LocalTraining) -> LocalTraining:
        """Return settings with the module's optimizer in place of the configured one.

        Raises:
            ConfigError: if they require what a module does not have.
        """
        field, name = "model.client", self.name
        refused = {
            f"{field}.compile: {name} decides what is compiled; set it to false": common.compile,
            f"{field}.graph: the steps of {name} stay plain; set it to false": common.graph,
            f"{field}.head_lr: {name} decides on rates in configure_optimizers; set it to null": (
                common.head_lr is not None
            ),
            f"{field}.cluster: {name} trains on labels; leave it out": common.clusters,
            f"{field}.long_round: {name} has schedules of its own; leave it out": common.long_round is not None,
            f"{field}.optimizer_state: the optimizer of {name} begins anew; set it to reset": (
                common.optimizer_state == "keep"
            ),
            f"{field}.schedule: {name} has a schedule, too; leave one of them out": (
                self.trial.has_schedule and common.schedule != LocalTraining().schedule
            ),
        }
        for line, applies in refused.items():
            if applies:
                raise ConfigError(line)
        if common.micro_batch not in (None, common.batch_size):
            self._check_micro_batches(f"{field}.micro_batch")
        return replace(common, optimizer=self.trial.optimizer, optimizer_state="reset")

    def check_override(self, client: str, override: ClientOverride) -> None:
        """Raise ConfigError for settings of one client that the module decides."""
        for name in ("backbone", "optimizer", "head_lr", "cluster", "bottom_up", "micro_batch"):
            if getattr(override, name) is not None:
                raise ConfigError(
                    f"model.clients.{client}.{name}: {self.name} is the model of all clients, and decides on its "
                    "training; leave it out"
                )

    def _check_micro_batches(self, field: str) -> None:
        module = self.blueprint.first
        if not getattr(module, "whole_batch_safe", False):
            raise ConfigError(
                f"{field}: the loss of {self.name} may need whole batches; set it to null, or the module's attribute "
                "whole_batch_safe to True if its loss is a mean over images"
            )
        if holds_metrics(module):
            raise ConfigError(f"{field}: {self.name} has metrics, which count whole batches; set it to null")

    def model(
        self,
        groups_shared: frozenset[Group],
        private: Sequence[str],
        policy: StatisticsPolicy,
        max_classes: int,
        device: torch.device,
    ) -> ModuleModel:
        """Return the rank's model.

        ``groups_shared`` are those of the method, ``private`` are patterns of the names of tensors that stay with the
        clients in any case, ``policy`` is that of running statistics, and ``max_classes`` the largest number of
        classes.
        """
        network = ModuleNetwork(self.blueprint.build(self.blueprint.num_classes).to(device), self.trial.width)
        _copy_state(network.module, self.blueprint.first)
        head = {f"{PART}.{name}" for name in self.trial.head}
        groups = {name: Group.HEAD if name in head else group for name, group in group_names(network).items()}
        shared = shared_names(groups, groups_shared, policy) - {f"{PART}.{name}" for name in self.blueprint.sizes}
        for pattern in private:
            matching = {name for name in groups if fnmatchcase(name.removeprefix(f"{PART}."), pattern)}
            if not matching:
                names = ", ".join(name.removeprefix(f"{PART}.") for name in list(groups)[:5])
                raise ConfigError(
                    f"model.private: no tensor of {self.name} is named like {pattern}; it has {names}"
                    f"{' and others' if len(groups) > 5 else ''}"
                )
            shared -= matching
        return ModuleModel(arch_name(self.name), self.blueprint, network, shared, groups, max_classes)


def own_module(
    source: MakesModule, clients: Sequence[ClientData], training: LocalTraining, sizes: Mapping[str, tuple[int, int]],
    seed: int, device: torch.device,
) -> OwnModule:  # fmt: skip
    """Return a user's module after a trial; ``sizes`` are those of ``train`` and ``test`` images, [H, W]."""
    for client in clients:
        if not client.knows_identities:
            raise ConfigError(f"model.module: client {client.name} has no identities to train on; leave it out")
        if client.generated is not None:
            raise ConfigError(
                f"data.generated: client {client.name} trains a module, on real images; remove its folder"
            )
    blueprint = Blueprint(source, seed, max(client.num_classes for client in clients))
    in_groups = training.sampler == "identity"
    num_images = (
        (training.batch_size or _MAX_TRIED) if in_groups else min(training.batch_size or _MAX_TRIED, _MAX_TRIED)
    )
    trials = TrialImages(sizes["train"], sizes["test"], num_images, training.num_instances if in_groups else 2)
    return OwnModule(blueprint, try_module(blueprint, trials, device))


def _copy_state(module: nn.Module, source: nn.Module) -> None:
    """Give a module all the tensors of another one of the same kind."""
    module.load_state_dict(source.state_dict())
