"""Checks of ``fedsim augment`` before it starts: the chosen clients, and faults that would stop a call after hours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import nn

from fedsim.cli.data.configs import data_of
from fedsim.core.errors import ConfigError
from fedsim.data.datamodule import FederatedDataModule
from fedsim.data.federated import ClientData
from fedsim.data.images import Size
from fedsim.generation.fitting import check_client
from fedsim.generation.networks import Networks, check_backbone, check_size
from fedsim.generation.saved import check_trained, is_finished


def open_data(config: str | list[str]) -> FederatedDataModule:
    """Return the data module of configs; with data.on_corrupt skip, images that cannot be read are left out."""
    data = data_of(config)
    data.generated = None  # the generated images may not exist yet
    if data.on_corrupt == "skip":
        data.prepare_data()
    return data


def choose_clients(data: FederatedDataModule, names: Sequence[str] | None) -> list[ClientData]:
    """Return the clients with these names; None: all."""
    clients = {client.name: client for client in data.federated.clients}
    if names is not None and not names:
        raise ConfigError("--clients: the list is empty; leave the option out for all clients")
    for name in names or ():
        if name not in clients:
            raise ConfigError(f"--clients: there is no client {name}; choose from {', '.join(clients)}")
    return [client for name, client in clients.items() if names is None or name in names]


def check_fit(chosen: Sequence[ClientData], size: Size, appearance: nn.Module, networks: Networks) -> None:
    """Check that a generator can be trained for each of these clients."""
    check_size(size, networks)
    check_backbone(appearance, networks.parts, size)
    for client in chosen:
        check_client(client)


def check_pretrain(
    pretrain: str, data: FederatedDataModule, chosen: Sequence[ClientData], folders: Mapping[str, Path], size: Size
) -> None:
    """Check that the client ``pretrain`` has a generator of its present images, or gets one in this call."""
    clients = {client.name: client for client in data.federated.clients}
    if pretrain not in clients:
        raise ConfigError(f"--pretrain: there is no client {pretrain}; choose from {', '.join(clients)}")
    if is_finished(folders[pretrain]):
        check_trained(folders[pretrain], clients[pretrain], size)
    elif pretrain not in [client.name for client in chosen]:
        raise ConfigError(f"--pretrain: {pretrain} must have a generator before the others; add it to --clients")
