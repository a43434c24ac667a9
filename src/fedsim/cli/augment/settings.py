"""Files of settings: those of ``--settings``, and ``settings.yaml`` in a folder of generators.

The latter holds the settings of the generators, so that a folder does not mix two kinds. Also the chosen clients, and
checks before a call starts: of faults that would stop it after hours.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from torch import nn

from fedsim.cli.data.configs import data_of
from fedsim.core.errors import ConfigError, DataError
from fedsim.core.files import replacing
from fedsim.core.readable import has_file
from fedsim.data.datamodule import FederatedDataModule
from fedsim.data.federated import ClientData
from fedsim.data.images import Size
from fedsim.generation.fitting import check_client
from fedsim.generation.networks import Networks, check_backbone, check_size
from fedsim.generation.saved import check_trained, is_begun, is_finished
from fedsim.parsing.config_files import read_config

SETTINGS = "settings.yaml"
_SECTIONS = ("appearance", "networks", "losses", "training")


def check_settings_files(args: Sequence[str]) -> None:
    """Read the files of ``--settings``, since errors of the parser do not name the fault.

    Raises:
        DataError: if one cannot be read, or is empty.
        ConfigError: if it is a config of a run.
    """
    parser = ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--settings", action="append", default=[])
    for path in parser.parse_known_args(args)[0].settings:
        if Path(path).is_file() and not Path(path).read_bytes().strip():
            raise DataError(f"{path}: is empty; --settings takes options of fedsim augment fit, see configs/generators")
        if {"data", "model", "trainer"} & read_config(path).keys():
            raise ConfigError(
                f"--settings: {path} is the config of a run; give it to --config, and --settings a file of options of "
                "fedsim augment fit, see configs/generators"
            )


def keep_settings(root: Path, settings: Mapping[str, Any]) -> Path:
    """Write the settings of a folder's generators, or compare them with the file there; return the file.

    Of several calls that start at the same time, one writes and the others compare. ``settings`` are plain values.

    Raises:
        ConfigError: if the folder was begun with other settings.
        DataError: if the file is missing, but there are generators.
    """
    path = root / SETTINGS
    if not has_file(path):
        if root.is_dir() and any(is_begun(folder) for folder in root.iterdir()):
            raise DataError(f"{path}: is missing, but there are generators in its folder; give another --output")
        if _write_new(path, settings):
            return path
    written, requested = _flat(read_settings(root, settings)), _flat(settings)
    if changed := [name for name in {**requested, **written} if written.get(name) != requested.get(name)]:
        raise ConfigError(
            f"--{changed[0]}: the generators of {path} have {written.get(changed[0])}; give another --output, or "
            "remove that folder"
        )
    return path


def read_settings(root: Path, names: Collection[str]) -> dict[str, Any]:
    """Read the settings of a folder's generators; raise DataError if the file is missing, or has not these names."""
    path = root / SETTINGS
    if not has_file(path):
        raise DataError(f"{path}: is not there; give --generators the folder that fedsim augment fit has written")
    settings = read_config(str(path))
    if set(settings) != set(names) or not all(isinstance(settings[name], dict) for name in _SECTIONS):
        raise DataError(f"{path}: is no settings file of fedsim augment fit; give another folder")
    return settings


def _write_new(path: Path, settings: Mapping[str, Any]) -> bool:
    """Write a file; return False if another process has just written it."""
    try:
        with replacing(path, new=True) as partial:
            partial.write_text(yaml.safe_dump(dict(settings), sort_keys=False))
    except FileExistsError:
        return False
    return True


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings as options with dotted names.

    >>> _flat({"appearance": {"class_path": "SmallCNN", "init_args": {"width": 16}}, "seed": 0})
    {'appearance.class_path': 'SmallCNN', 'appearance.width': 16, 'seed': 0}
    """
    options: dict[str, Any] = {}
    for name, value in settings.items():
        name = "" if name == "init_args" else f".{name}"
        options |= _flat(value, prefix + name) if isinstance(value, Mapping) else {(prefix + name).lstrip("."): value}
    return options


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
