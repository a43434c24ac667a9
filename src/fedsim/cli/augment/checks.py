"""What ``fedsim augment`` finds out before it works: whose images there are, and what would stop a call after hours."""

from __future__ import annotations

from collections.abc import Sequence
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
    """Return the data of configs, without images that cannot be read, if they say so."""
    data = data_of(config)
    data.generated = None  # what is to be made may not be there yet
    if data.on_corrupt == "skip":
        data.prepare_data()
    return data


def choose_clients(data: FederatedDataModule, names: Sequence[str] | None) -> list[ClientData]:
    """Return the clients of a call."""
    there = {client.name: client for client in data.federated.clients}
    if names is not None and not names:
        raise ConfigError("--clients: names nobody; leave it out for all")
    for name in names or ():
        if name not in there:
            raise ConfigError(f"--clients: there is no client {name}; choose from {', '.join(there)}")
    return [client for name, client in there.items() if names is None or name in names]


def check_fit(chosen: Sequence[ClientData], size: Size, appearance: nn.Module, networks: Networks) -> None:
    """See whether generators of these clients can be made."""
    check_size(size, networks)
    check_backbone(appearance, networks.parts, size)
    for client in chosen:
        check_client(client)


def check_pretrain(
    pretrain: str, data: FederatedDataModule, chosen: Sequence[ClientData], root: Path, size: Size
) -> None:
    """See whether the client whose encoder the others get has one, or will, of the images that it trains on now."""
    there = {client.name: client for client in data.federated.clients}
    if pretrain not in there:
        raise ConfigError(f"--pretrain: there is no client {pretrain}; choose from {', '.join(there)}")
    if is_finished(root / pretrain):
        check_trained(root / pretrain, there[pretrain], size)
    elif pretrain not in [client.name for client in chosen]:
        raise ConfigError(f"--pretrain: the generator of {pretrain} comes first; add it to --clients")
