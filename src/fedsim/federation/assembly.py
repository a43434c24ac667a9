"""Building what a rank needs from settings and data: the server, the models and the clients that it hosts."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence

import torch
from torch import nn

from fedsim.data.datamodule import FederatedDataModule
from fedsim.data.federated import ClientData
from fedsim.federation.checks.requirements import (
    check_batches,
    check_compiler,
    check_graphs,
    check_image_sizes,
    check_micro_batches,
    check_settings,
    settings_of,
)
from fedsim.federation.components.ledger import Ledger
from fedsim.federation.parts import Parts, layout_of
from fedsim.federation.scheduling.rank_share import make_rank_share
from fedsim.federation.settings import Settings
from fedsim.models.groups import Group, group_names
from fedsim.models.reid import ReIDModel
from fedsim.strategy.machine import Machine
from fedsim.training.client import Client
from fedsim.training.flat_model import FlatModel
from fedsim.training.server import Server
from fedsim.training.statistics import BatchNormStatistics, shared_names


def assemble(
    how: Settings,
    data: FederatedDataModule,
    rank: int,
    world_size: int,
    device: torch.device,
    machine: Machine | None = None,
) -> Parts:
    """Build the server and the clients that ``rank`` may train: its own, or those of its ``machine``.

    No image is read. With a machine, all ranks of the run assemble together.

    Raises:
        ConfigError: if settings and data do not fit together.
    """
    settings = {c.name: settings_of(c, how.client, how.overrides) for c in data.federated.clients}
    federated = data.federated.without_identities({n for n, s in settings.items() if s.clusters})
    check_settings(federated, how.overrides, how.bn_stats, how.method, how.hardware)
    check_batches(federated.clients, settings, says=rank == 0)
    models, archs = _build_models(how, federated.clients, device)
    costs = {c.name: float(c.num_images * settings[c.name].passes) for c in federated.clients}
    check_micro_batches(settings, models, how.method, how.objective, how.reduction)
    check_graphs(federated.clients, settings, how.method, device, says=rank == 0)
    check_compiler(settings, device)
    check_image_sizes(models, data)
    for model in models.values():
        model.prepare(settings.values())
    server = Server(models, archs, data.augmentation, how.seed, len(federated.public or ()))
    server.load_kept({arch: how.method.initial_state(model).server for arch, model in models.items()})
    trains_alone = len(federated.clients) == 1 or not how.method.shared_groups
    largest = max(model.flat.buffer.nbytes for model in models.values())
    micro_batches = {c.name: settings[c.name].micro_batches_of(c.num_images) for c in federated.clients}
    rank_share = make_rank_share(costs, micro_batches, rank, world_size, machine, how.client_store, device, largest)
    near = set(rank_share.near)
    clients = {
        mine.name: Client(
            data=mine, training=settings[mine.name], objective=how.objective, augmentation=data.augmentation,
            model=models[archs[mine.name]], store=rank_share.states, seed=how.seed, trains_alone=trains_alone,
        ).to(device)
        for mine in federated.clients if mine.name in near
    }  # fmt: skip
    for name in rank_share.own:  # now, so that out-of-memory shows before round 1
        clients[name].start(how.method.initial_state(models[archs[name]]).client)
    return Parts(
        method=how.method, federated=federated, models=models, archs=archs, costs=costs,
        micro_batches=micro_batches, rank_share=rank_share,
        statistics={arch: BatchNormStatistics(how.bn_stats, model) for arch, model in models.items()},
        server=server, ledger=Ledger(how.method, server, archs, how.hardware, how.accounting),
        clients=clients, objective=how.objective,
    )  # fmt: skip


def _build_models(
    how: Settings, clients: Sequence[ClientData], device: torch.device
) -> tuple[dict[str, FlatModel], dict[str, str]]:
    """Build one model per architecture: return architecture -> model, client -> architecture.

    Clients whose backbones have the same layout share one; the first client's initial weights count. Every backbone on
    the ladder gets a model, with room for the largest head.
    """
    groups: dict[tuple[str, ...], tuple[nn.Module, list[ClientData]]] = {}
    common, ladder = layout_of(how.backbone), how.adaptive_backbones.ladder if how.adaptive_backbones else ()
    for data in clients:
        own = how.overrides[data.name].backbone if data.name in how.overrides else None
        backbone, layout = (how.backbone, common) if own is None else (own, layout_of(own))
        groups.setdefault(layout, (backbone, []))[1].append(data)
    for backbone in ladder:
        groups.setdefault(layout_of(backbone), (backbone, []))
    models: dict[str, FlatModel] = {}
    archs: dict[str, str] = {}
    for layout, (backbone, group) in groups.items():
        name = layout[0].lower()
        if name in models:
            name = next(new for i in itertools.count(2) if (new := f"{name}{i}") not in models)
        max_classes = max(c.num_classes for c in (clients if ladder else group))
        shared_head = max_classes if Group.HEAD in how.method.shared_groups and max_classes else None
        with torch.random.fork_rng(devices=[]):  # the neck's initial weights depend on the seed alone
            torch.manual_seed(how.seed)
            network = ReIDModel(copy.deepcopy(backbone), how.neck, shared_head, how.objective.head_std).to(device)
        of_names = group_names(network)
        shared = shared_names(of_names, how.method.shared_groups, how.bn_stats)
        models[name] = FlatModel(name, network, shared, of_names, max_classes)
        archs |= {c.name: name for c in group}
    return models, archs
