"""Assembly of a rank's parts from settings and data: the server, the models and the clients that it may train."""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from fedsim.core.errors import ConfigError
from fedsim.core.seeding import seeded_host
from fedsim.core.store import ClientStore, MemoryStore
from fedsim.data.datamodule import FederatedDataModule
from fedsim.data.federated import ClientData
from fedsim.federation.checks.requirements import (
    check_batches,
    check_compiler,
    check_graphs,
    check_image_sizes,
    check_micro_batches,
    check_own_module,
    check_received_statistics,
    check_settings,
    settings_by_client,
    warn_of_unused_images,
)
from fedsim.federation.components.ledger import Ledger
from fedsim.federation.parts import Parts, layout_of, trains_alone
from fedsim.federation.root import root_of
from fedsim.federation.scheduling.rank_share import make_rank_share
from fedsim.federation.settings import Settings
from fedsim.models.groups import Group, group_names
from fedsim.models.reid import ReIDModel
from fedsim.strategy.machine import Machine
from fedsim.training.batch import ClientImages
from fedsim.training.client import Client
from fedsim.training.flat_model import FlatModel
from fedsim.training.lazy_clients import LazyClients
from fedsim.training.own_module.assembly import OwnModule, own_module
from fedsim.training.own_module.blueprint import MakesModule
from fedsim.training.own_module.inner_trainer import Options
from fedsim.training.own_module.module_batch import PairBatch
from fedsim.training.own_module.module_client import ModuleClient
from fedsim.training.server import Server, arch_name
from fedsim.training.statistics import BatchNormStatistics, shared_names

log = logging.getLogger(__name__)


def assemble(
    settings: Settings,
    data: FederatedDataModule,
    rank: int,
    world_size: int,
    device: torch.device,
    machine: Machine | None = None,
    precision: str = "32-true",
    rounds: int | None = 1,
) -> Parts:
    """Build the server and the clients that ``rank`` may train: those that it owns, or all of its ``machine``.

    No image is read. With a machine, all ranks of the run assemble together.

    Raises:
        ConfigError: if settings and data contradict each other.
    """
    tried = None
    if settings.module is not None:
        options = Options(device, precision, settings.client.accumulate, settings.client.grad_clip)
        tried = _try_module(settings, settings.module, data, options, rounds, logs=rank == 0)
    training = settings.client if tried is None else tried.training
    client_settings = settings_by_client(data.federated, training, settings.overrides)
    federated = data.federated.without_identities({n for n, s in client_settings.items() if s.clusters})
    check_settings(federated, settings.overrides, settings.bn_stats, settings.method, settings.hardware)
    roots = root_of(settings, federated)
    if rank == 0 and not roots:
        warn_of_unused_images(federated, settings.bn_stats, settings.method)
    everyone = [*federated.clients, *roots]
    client_settings |= {root.name: training for root in roots}
    check_batches(everyone, client_settings, logs=rank == 0)
    for name, of_client in client_settings.items():
        settings.method.check(of_client, name)
    models, archs = _build_models(settings, everyone, device, tried)
    root_archs = {root.name: archs.pop(root.name) for root in roots}
    costs = {c.name: float(c.num_images * client_settings[c.name].passes) for c in federated.clients}
    check_micro_batches(client_settings, models, settings.method, settings.objective, settings.reduction)
    check_graphs(everyone, client_settings, settings.method, settings.objective, device, logs=rank == 0)
    check_compiler(client_settings, device)
    if tried is None:  # whose trial has had images of these sizes
        check_image_sizes(models, data)
    check_received_statistics(models, settings.method, settings.bn_stats)
    for model in models.values():
        model.prepare(client_settings.values())
    server = Server(models, archs, data.augmentation, settings.training_seed, len(federated.public or ()))
    initial = {arch: settings.method.initial_state(model) for arch, model in models.items()}
    server.load_kept({arch: state.server for arch, state in initial.items()})
    for arch, model in models.items():  # copies, as states are often views of the model
        model.initial_kept = {name: tensor.to("cpu", copy=True) for name, tensor in initial[arch].client.items()}
    largest = max(model.flat.buffer.nbytes for model in models.values())
    micro_batches = {c.name: client_settings[c.name].micro_batches_of(c.num_images) for c in federated.clients}
    places = settings.pace.places(settings.selection, len(federated.clients))
    rank_share = make_rank_share(
        costs, micro_batches, rank, world_size, machine, settings.client_store, device, largest, places
    )
    data_of, is_alone = {c.name: c for c in federated.clients}, trains_alone(settings.method, federated)
    mean_images = sum(client.num_images for client in federated.clients) / len(federated.clients)

    make_client: Callable[..., Client] = Client
    if tried is not None:
        counts_from = settings.module_counts_from
        make_client = partial(ModuleClient, log_names=tried.log_names, form=tried.form, counts_from=counts_from)

    def make(name: str, images: ClientImages, store: ClientStore = rank_share.states) -> Client:
        return make_client(
            images=images, training=client_settings[name], objective=settings.objective,
            model=models[archs.get(name) or root_archs[name]], store=store, seed=settings.training_seed,
            trains_alone=is_alone,
        ).to(device)  # fmt: skip

    def images_of(client: ClientData) -> ClientImages:
        return ClientImages(replace(client, mean_images=mean_images), data.augmentation, device)

    own_store = MemoryStore(torch.device("cpu"))  # of rank 0, which trains the root alone
    made_roots = [make(root.name, images_of(root), own_store) for root in roots]
    clients = LazyClients(rank_share.trainable_clients, make, lambda name: images_of(data_of[name]))
    return Parts(
        method=settings.method, federated=federated, models=models, archs=archs, costs=costs,
        micro_batches=micro_batches, rank_share=rank_share,
        statistics={arch: BatchNormStatistics(settings.bn_stats, model) for arch, model in models.items()},
        server=server, ledger=Ledger(settings.method, server, archs, settings.hardware, settings.accounting),
        clients=clients, objective=settings.objective, training=training,
        root=next(iter(made_roots), None), logged=() if tried is None else tried.log_names,
    )  # fmt: skip


def _try_module(
    settings: Settings, source: MakesModule, data: FederatedDataModule, options: Options, rounds: int | None, logs: bool
) -> OwnModule:
    """Return the user's module after a trial; refuse settings that it contradicts, and log hooks without effect."""
    sizes = {"train": data.augmentation.crop or data.size, "test": data.test_size}
    check_own_module(settings.method, settings.evaluation.task, settings.adaptive_backbones is not None)
    rounds = rounds if settings.module_counts_from == "run" else 1
    tried = own_module(
        source, data.federated.clients, settings.client, sizes, settings.module_batch or PairBatch(),
        seed=settings.training_seed, options=options, rounds=rounds,
    )  # fmt: skip
    if "losses" in settings.method.requires and not tried.blueprint.first.automatic_optimization:
        raise ConfigError(
            f"model.method: {type(settings.method).__name__} changes losses, and {tried.blueprint.name} optimizes "
            "manually; choose another"
        )
    for name, override in settings.overrides.items():
        tried.check_override(name, override)
    if logs and tried.idle_hooks:
        log.info(
            "model.module: fedsim has images, scores and checkpoints of its own, and does not call %s of %s",
            ", ".join(tried.idle_hooks), tried.blueprint.name,
        )  # fmt: skip
    return tried


def _build_models(
    settings: Settings, clients: Sequence[ClientData], device: torch.device, tried: OwnModule | None
) -> tuple[dict[str, FlatModel], dict[str, str]]:
    """Build one model per architecture: return architecture -> model, client -> architecture.

    Clients whose backbones have the same layout share a model, with the initial weights of the first client's backbone.
    Every backbone on the ladder gets a model, with room for the largest head.
    """
    if tried is not None:
        method, private = settings.method, settings.private or ()
        model = tried.model(method.shared_groups, private, settings.bn_stats, device, method.shared_tensors)
        return {model.arch: model}, {client.name: model.arch for client in clients}
    assert settings.backbone is not None, "settings have one or the other"
    groups: dict[tuple[str, ...], tuple[nn.Module, list[ClientData]]] = {}
    common = layout_of(settings.backbone)
    ladder = settings.adaptive_backbones.ladder if settings.adaptive_backbones else ()
    for data in clients:
        override = settings.overrides[data.name].backbone if data.name in settings.overrides else None
        backbone, layout = (settings.backbone, common) if override is None else (override, layout_of(override))
        groups.setdefault(layout, (backbone, []))[1].append(data)
    for backbone in ladder:
        groups.setdefault(layout_of(backbone), (backbone, []))
    models: dict[str, FlatModel] = {}
    archs: dict[str, str] = {}
    for layout, (backbone, group) in groups.items():
        name = arch_name(layout[0])
        if name in models:
            name = next(new for i in itertools.count(2) if (new := f"{name}{i}") not in models)
        max_classes = max(c.num_classes for c in (clients if ladder else group))
        shared_head = max_classes if Group.HEAD in settings.method.shared_groups and max_classes else None
        with seeded_host(settings.training_seed):  # the neck's initial weights depend only on the seed
            network = ReIDModel(
                copy.deepcopy(backbone), settings.neck, shared_head, settings.objective.head_std, settings.head
            )
            if (causality := settings.objective.causality) is not None:
                network.keep_separated(len(causality.weights), max_classes if causality.has_heads else None)
        network = network.to(device)
        group_of = group_names(network)
        method = settings.method
        shared = shared_names(group_of, method.shared_groups, settings.bn_stats, choose=method.shared_tensors)
        models[name] = FlatModel(name, network, shared, group_of, max_classes)
        archs |= {c.name: name for c in group}
    return models, archs
