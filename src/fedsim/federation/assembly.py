"""Building what a rank needs from settings and data: the server, the models and the clients that it hosts."""

from __future__ import annotations

import torch

from fedsim.core.placement import place
from fedsim.core.store import make_store
from fedsim.data.datamodule import FederatedDataModule
from fedsim.federation.blueprint import Blueprint, build_models
from fedsim.federation.ledger import Ledger
from fedsim.federation.parts import Parts
from fedsim.federation.requirements import check_image_sizes, check_settings, settings_of
from fedsim.federation.settings import Settings
from fedsim.training.client import Client
from fedsim.training.server import Server
from fedsim.training.statistics import BatchNormStatistics


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
    models, archs = build_models(blueprint, federated.clients, how.clients, device)
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
        )
        for mine in federated.clients if mine.name in hosted
    }  # fmt: skip
    return Parts(
        method=how.method, federated=federated, models=models, archs=archs, costs=costs, placement=placement,
        statistics={arch: BatchNormStatistics(how.bn_stats, model) for arch, model in models.items()},
        server=server, ledger=Ledger(how.method, server, archs, how.hardware, how.accounting),
        store=store, clients=clients,
    )  # fmt: skip
