"""Building what a rank needs from settings and data: models by architecture, settings by client."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fedsim.core.errors import ConfigError
from fedsim.core.store import ClientStore
from fedsim.data.augmentation import Augmentation
from fedsim.data.datamodule import FederatedDataModule
from fedsim.data.federated import ClientData, FederatedData
from fedsim.federation.hardware import Hardware
from fedsim.methods.base import Method
from fedsim.models.groups import group_names
from fedsim.models.reid import Neck, ReIDModel
from fedsim.strategy.strategy import FederatedStrategy
from fedsim.training.client import Client
from fedsim.training.flat_model import Resident
from fedsim.training.settings import ClientOverride, LocalTraining, Objective
from fedsim.training.statistics import StatisticsPolicy, shared_names

__all__ = [
    "Blueprint",
    "build_clients",
    "build_residents",
    "check_equal_start",
    "check_image_size",
    "check_image_sizes",
    "check_settings",
    "layout_of",
    "settings_of",
]


@dataclass(frozen=True)
class Blueprint:
    """What all models of a federation have in common."""

    backbone: nn.Module
    """of clients without one of their own"""
    neck: Neck
    method: Method
    bn_stats: StatisticsPolicy
    seed: int
    """of the random initial weights"""
    ladder: Sequence[nn.Module] = ()
    """backbones that any client may come to have"""


def check_settings(
    federated: FederatedData,
    overrides: Mapping[str, ClientOverride],
    bn_stats: StatisticsPolicy,
    method: Method,
    hardware: Hardware | None = None,
) -> None:
    """Raise ConfigError where settings name what the data do not have."""
    names = [c.name for c in federated.clients]
    named = {"model.clients": list(overrides), "model.hardware.clients": list(hardware.clients) if hardware else []}
    for field, clients in named.items():
        for name in clients:
            if name not in names:
                raise ConfigError(f"{field}: there is no client {name}; choose from {', '.join(names)}")
    _check_identities(federated, method)
    if bn_stats == "recalibrate" and federated.public is None:
        raise ConfigError("model.bn_stats: recalibrate needs public images; set data.public to an unseen data set")
    if method.needs_public_images and federated.public is None:
        raise ConfigError(
            f"model.method: {type(method).__name__}, as it is configured, needs public images; "
            "set data.public to an unseen data set"
        )
    if method.needs_hardware:
        _check_speeds(names, type(method).__name__, hardware)


def _check_speeds(clients: Sequence[str], method: str, hardware: Hardware | None) -> None:
    if hardware is None:
        raise ConfigError(f"model.hardware: {method}, as it is configured, weighs by images_per_second; set it")
    for name in clients:
        if hardware.speed(name) == float("inf"):
            raise ConfigError(
                f"model.hardware.images_per_second: client {name}'s is infinite, and {method}, as it is configured, "
                "weighs by it; give a number"
            )


def _check_identities(federated: FederatedData, method: Method) -> None:
    """Refuse what needs labels of people where clients have none."""
    unlabelled = [client.name for client in federated.clients if not client.knows_identities]
    if not unlabelled:
        return
    if given := [c.name for c in federated.clients if not c.knows_identities and c.generated is not None]:
        raise ConfigError(
            f"data.generated: client {given[0]} knows no identities, which generated images are labelled with; "
            "remove its folder or leave model.client.cluster out"
        )
    if method.needs_identities:
        raise ConfigError(
            f"model.method: {type(method).__name__}, as it is configured, needs identities, and client {unlabelled[0]} "
            "clusters its images instead; leave model.client.cluster out or choose another method"
        )
    if method.shares_head and len(unlabelled) < len(federated.clients):
        raise ConfigError(
            f"model.method.share_head: client {unlabelled[0]} has no identity head, others have; set it to false"
        )


def settings_of(data: ClientData, common: LocalTraining, overrides: Mapping[str, ClientOverride]) -> LocalTraining:
    """Return a client's settings: the common ones with its own in their place.

    Raises:
        ConfigError: if they are wrong, or a batch is larger than the client's data.
    """
    settings, name = common, data.name
    if name in overrides:
        settings = overrides[name].apply(common)
        settings.check(f"model.clients.{name}")
    if not settings.clusters and not data.knows_identities:
        raise ConfigError(
            f"model.client.cluster: the training images of client {name} have no identities; give it, for example {{}}"
        )
    if settings.batch_size > data.num_images:
        raise ConfigError(
            f"model.client.batch_size: {settings.batch_size} is more than the {data.num_images} training images of "
            f"client {name}; set model.clients.{name}.batch_size to at most {data.num_images}"
        )
    return settings


def build_residents(
    blueprint: Blueprint,
    clients: Sequence[ClientData],
    overrides: Mapping[str, ClientOverride],
    device: torch.device,
) -> tuple[dict[str, Resident], dict[str, str]]:
    """Build one resident model per architecture.

    Clients whose backbones have the same layout share one; the first client's initial weights count. Of a ladder, all
    backbones have one, which fits any client.

    Returns:
        (architecture -> resident model, client -> architecture).
    """
    templates: dict[tuple[str, ...], nn.Module] = {}
    members: dict[tuple[str, ...], list[ClientData]] = {}
    common = layout_of(blueprint.backbone)
    for data in clients:
        own = overrides[data.name].backbone if data.name in overrides else None
        backbone, layout = (blueprint.backbone, common) if own is None else (own, layout_of(own))
        templates.setdefault(layout, backbone)
        members.setdefault(layout, []).append(data)
    for backbone in blueprint.ladder:
        templates.setdefault(layout_of(backbone), backbone)
        members.setdefault(layout_of(backbone), [])
    residents: dict[str, Resident] = {}
    archs: dict[str, str] = {}
    for layout, group in members.items():
        name = _free_name(layout[0].lower(), residents)
        num_classes = max(c.num_classes for c in (clients if blueprint.ladder else group))
        residents[name] = _build_resident(name, templates[layout], num_classes, blueprint, device)
        archs |= {c.name: name for c in group}
    return residents, archs


def build_clients(
    mine: Sequence[ClientData],
    settings: Mapping[str, LocalTraining],
    residents: Mapping[str, Resident],
    archs: Mapping[str, str],
    store: ClientStore,
    *,
    method: Method,
    objective: Objective,
    augmentation: Augmentation,
    seed: int,
) -> dict[str, Client]:
    """Build the clients that a rank hosts.

    Args:
        mine: what they hold.
        settings: client -> its settings.
        residents: architecture -> its resident model.
        archs: client -> architecture.
        store: of the rank, where private states wait.
        method: says what a client remembers from the start.
        objective: the supervised loss.
        augmentation: of training images.
        seed: of the run.
    """
    return {
        data.name: Client(
            data=data,
            training=settings[data.name],
            objective=objective,
            augmentation=augmentation,
            resident=residents[archs[data.name]],
            store=store,
            seed=seed,
            kept=method.initial_kept(residents[archs[data.name]]),
        ).to(residents[archs[data.name]].device)
        for data in mine
    }


def check_image_sizes(residents: Mapping[str, Resident], data: FederatedDataModule) -> None:
    """Raise ConfigError if a model cannot process images in the sizes of training and of tests."""
    crop = data.augmentation.crop
    check_image_size(residents, "augmentation.crop" if crop else "size", crop or data.size)
    check_image_size(residents, "test_size", data.test_size)


def check_image_size(residents: Mapping[str, Resident], name: str, size: tuple[int, int]) -> None:
    """Raise ConfigError if a model cannot process images of this height and width."""
    for arch, resident in residents.items():
        images = torch.zeros(2, 3, *size, device=resident.flat.buffer.device)
        backbone = resident.model.eval().backbone
        try:
            with torch.no_grad():
                maps = backbone(images)
        except (RuntimeError, ValueError) as error:
            raise ConfigError(f"data.{name}: {arch} cannot process images of {list(size)} pixels ({error})") from error
        if maps.dim() not in (2, 4) or maps.shape[1] != backbone.out_channels:
            raise ConfigError(
                f"model.backbone: {arch} returns {list(maps.shape)} for 2 images; it must be [2, C, h, w] or [2, C] "
                f"with C = out_channels = {backbone.out_channels}"
            )


def check_equal_start(strategy: FederatedStrategy, residents: Mapping[str, Resident]) -> None:
    """Raise ConfigError unless all ranks built the same initial weights: the backbone's come from the caller."""
    checksums = torch.zeros(strategy.world_size, len(residents), dtype=torch.float64)
    mine = [resident.checksum for resident in residents.values()]
    checksums[strategy.global_rank] = torch.tensor(mine, dtype=torch.float64)
    strategy.exchange([checksums])
    if len(checksums.unique(dim=0)) > 1:
        raise ConfigError("model.backbone: ranks start from different weights; call seed_everything() before it")


def layout_of(backbone: nn.Module) -> tuple[str, ...]:
    """Return what backbones of one architecture have in common."""
    # repr() tells strides and epsilons, which shapes do not
    shapes = (f"{n}{list(t.shape)}" for n, t in backbone.state_dict().items())
    return (type(backbone).__name__, repr(backbone), *shapes)


def _build_resident(
    arch: str, backbone: nn.Module, max_classes: int, blueprint: Blueprint, device: torch.device
) -> Resident:
    shared_head = max_classes if blueprint.method.shares_head and max_classes else None
    with torch.random.fork_rng(devices=[]):  # the neck's initial weights depend on the seed alone
        torch.manual_seed(blueprint.seed)
        model = ReIDModel(copy.deepcopy(backbone), blueprint.neck, shared_head).to(device)
    groups = group_names(model)
    shared = shared_names(groups, blueprint.method.shared_groups, blueprint.bn_stats)
    return Resident(arch, model, shared, groups, max_classes)


def _free_name(name: str, taken: Mapping[str, object]) -> str:
    """Return ``name``, or with the first number that makes it new."""
    if name not in taken:
        return name
    return next(f"{name}{i}" for i in range(2, len(taken) + 3) if f"{name}{i}" not in taken)
