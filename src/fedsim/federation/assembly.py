"""Building what a rank needs from settings and data: models by architecture, settings by client."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from lightning import Trainer
from torch import nn

from fedsim.core.placement import place
from fedsim.core.store import make_store
from fedsim.data.datamodule import FederatedDataModule
from fedsim.data.federated import ClientData
from fedsim.evaluation.classification import evaluator_for
from fedsim.evaluation.evaluator import Evaluator
from fedsim.federation.adaptive_backbones import BackboneLadder
from fedsim.federation.aggregation import Aggregator
from fedsim.federation.axis import Axis
from fedsim.federation.events import RoundCallback
from fedsim.federation.gathered import GatheringAggregator
from fedsim.federation.host import Host
from fedsim.federation.ledger import Ledger
from fedsim.federation.masked import MaskedAggregator
from fedsim.federation.parts import Parts, layout_of
from fedsim.federation.requirements import check_image_sizes, check_settings, settings_of
from fedsim.federation.round import Round
from fedsim.federation.settings import Settings
from fedsim.methods.base import Method
from fedsim.models.groups import Group, group_names
from fedsim.models.reid import Neck, ReIDModel
from fedsim.strategy.strategy import FederatedStrategy
from fedsim.training.architectures import Architectures
from fedsim.training.client import Client
from fedsim.training.flat_model import FlatModel
from fedsim.training.server import Server
from fedsim.training.settings import ClientOverride
from fedsim.training.statistics import BatchNormStatistics, StatisticsPolicy, shared_names

__all__ = ["Blueprint", "assemble", "build_residents", "make_aggregator"]


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


def assemble(how: Settings, data: FederatedDataModule, rank: int, world_size: int, device: torch.device) -> Parts:
    """Build the server and the clients that ``rank`` hosts. No image is read.

    Args:
        how: the federation as configured.
        data: the federation's data.
        rank: of this process.
        world_size: number of processes.
        device: where models live.

    Raises:
        ConfigError: if settings and data do not fit together.
    """
    settings = {c.name: settings_of(c, how.client, how.clients) for c in data.federated.clients}
    federated = data.federated.without_identities({n for n, s in settings.items() if s.clusters})
    check_settings(federated, how.clients, how.bn_stats, how.method, how.hardware)
    rungs = how.adaptive_backbones.ladder if how.adaptive_backbones else ()
    blueprint = Blueprint(how.backbone, how.neck, how.method, how.bn_stats, how.seed, rungs)
    models, archs = build_residents(blueprint, federated.clients, how.clients, device)
    costs = {c.name: float(c.num_images * settings[c.name].passes) for c in federated.clients}
    placement = place(costs, world_size)
    check_image_sizes(models, data)
    server = Server(models, archs, data.augmentation, how.seed, len(federated.public or ()))
    server.load_kept({arch: how.method.initial_state(model).server for arch, model in models.items()})
    store, hosted = make_store(how.client_store, device), set(placement.hosted_by(rank))
    clients = {
        mine.name: Client(
            data=mine, training=settings[mine.name], objective=how.objective, augmentation=data.augmentation,
            model=models[archs[mine.name]], store=store, seed=how.seed,
            kept=how.method.initial_state(models[archs[mine.name]]).client,
        ).to(device)
        for mine in federated.clients if mine.name in hosted
    }  # fmt: skip
    return Parts(
        method=how.method, federated=federated, models=models, archs=archs, costs=costs, placement=placement,
        statistics={arch: BatchNormStatistics(how.bn_stats, model) for arch, model in models.items()},
        server=server, ledger=Ledger(how.method, server, archs, how.hardware, how.accounting),
        store=store, clients=clients,
    )  # fmt: skip


def axes_of(how: Settings, parts: Parts) -> list[Axis]:
    """Return what acts around the rounds: choices that any method can be combined with.

    Raises:
        ConfigError: if they do not go together with the federation.
    """
    ladder = how.adaptive_backbones and BackboneLadder(how.adaptive_backbones, parts, how.selection)
    how.privacy.prepare(how.method, parts.server, how.selection)
    how.selection.prepare({name: data.num_images for name, data in parts.data_of.items()})
    if how.aggregation is not None:
        how.aggregation.check(how.method, parts.server, how.bn_stats)
    return [*([ladder] if ladder else []), how.selection, parts.ledger, how.privacy]


def round_of(
    how: Settings, parts: Parts, axes: Sequence[Axis], trainer: Trainer, callbacks: Sequence[RoundCallback]
) -> Round:
    """Return the round that a trainer runs."""
    strategy = trainer.strategy
    assert isinstance(strategy, FederatedStrategy)
    aggregator = make_aggregator(how, parts, strategy, strategy.root_device)
    host = Host(
        parts.clients, how.method, parts.server, aggregator, strategy, how.on_bad_update, str(trainer.precision),
        callbacks, how.privacy,
    )  # fmt: skip
    return Round(how, parts, axes, host, aggregator, strategy)


def evaluator_of(
    how: Settings,
    parts: Parts,
    data: FederatedDataModule,
    strategy: FederatedStrategy,
    callbacks: Sequence[RoundCallback],
) -> Evaluator:
    """Return what scores the federation's models."""

    def tell(what: str) -> None:
        strategy.poll()
        strategy.describe_activity(f"scoring the {what}")
        for callback in callbacks:
            callback.on_scoring(what)

    return evaluator_for(how.evaluation)(
        settings=how.evaluation, method=how.method, server=parts.server, clients=parts.clients,
        models=parts.models, archs=parts.archs, federated=parts.federated, placement=parts.placement,
        strategy=strategy, open_images=data.open_test, progress=tell,
    )  # fmt: skip


def make_aggregator(how: Settings, parts: Parts, strategy: FederatedStrategy, device: torch.device) -> Aggregator:
    """Return the sums that the method's uploads need."""
    common = (strategy, parts.statistics, parts.archs, how.reduction, device, how.seed)
    if how.aggregation is not None:
        return GatheringAggregator(how.aggregation.aggregate, *common)
    if "uploads" in how.method.requires:
        return GatheringAggregator(partial(how.method.aggregate, parts.server), *common)
    return MaskedAggregator(*common) if "masks" in how.method.requires else Aggregator(*common)


def build_residents(
    blueprint: Blueprint,
    clients: Sequence[ClientData],
    overrides: Mapping[str, ClientOverride],
    device: torch.device,
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
        models[name] = _build_resident(name, templates[layout], num_classes, blueprint, device)
        archs |= {c.name: name for c in group}
    return models, Architectures(archs)


def _build_resident(
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
