"""Models by architecture: one for all clients whose backbones have the same layout."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fedsim.data.federated import ClientData
from fedsim.federation.parts import layout_of
from fedsim.methods.base import Method
from fedsim.models.groups import Group, group_names
from fedsim.models.reid import Neck, ReIDModel
from fedsim.training.architectures import Architectures
from fedsim.training.flat_model import FlatModel
from fedsim.training.settings import ClientOverride
from fedsim.training.statistics import StatisticsPolicy, shared_names


@dataclass(frozen=True)
class Blueprint:
    """The properties that all models of a federation have in common."""

    backbone: nn.Module
    """of clients without one of their own"""
    neck: Neck
    method: Method
    bn_stats: StatisticsPolicy
    seed: int
    """of the random initial weights"""
    ladder: Sequence[nn.Module] = ()
    """backbones that any client may come to have"""


def build_models(
    blueprint: Blueprint, clients: Sequence[ClientData], overrides: Mapping[str, ClientOverride], device: torch.device
) -> tuple[dict[str, FlatModel], Architectures]:
    """Build one resident model per architecture.

    Clients whose backbones have the same layout share one; the first client's initial weights count. Every backbone on
    the ladder gets a resident model, with room for the largest head.

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
    models: dict[str, FlatModel] = {}
    archs: dict[str, str] = {}
    for layout, group in members.items():
        name = _free_name(layout[0].lower(), models)
        num_classes = max(c.num_classes for c in (clients if blueprint.ladder else group))
        models[name] = _build_model(name, templates[layout], num_classes, blueprint, device)
        archs |= {c.name: name for c in group}
    return models, Architectures(archs)


def _build_model(
    arch: str, backbone: nn.Module, max_classes: int, blueprint: Blueprint, device: torch.device
) -> FlatModel:
    shared_head = max_classes if Group.HEAD in blueprint.method.shared_groups and max_classes else None
    with torch.random.fork_rng(devices=[]):  # the neck's initial weights depend on the seed alone
        torch.manual_seed(blueprint.seed)
        model = ReIDModel(copy.deepcopy(backbone), blueprint.neck, shared_head).to(device)
    groups = group_names(model)
    shared = shared_names(groups, blueprint.method.shared_groups, blueprint.bn_stats)
    return FlatModel(arch, model, shared, groups, max_classes)


def _free_name(name: str, taken: Mapping[str, object]) -> str:
    """Return ``name``, or with the first number that makes it new."""
    if name not in taken:
        return name
    return next(f"{name}{i}" for i in range(2, len(taken) + 3) if f"{name}{i}" not in taken)
