"""fedsim's part of a checkpoint: written, compared with a federation, and loaded."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedsim.core.errors import ConfigError
from fedsim.core.flat import Entry
from fedsim.methods.base import Method
from fedsim.strategy.checkpoint_files import FORMAT, read_states
from fedsim.training.client import Client
from fedsim.training.flat_model import Resident

__all__ = ["check_content", "describe_content", "load_states"]


def describe_content(
    method: Method,
    residents: Mapping[str, Resident],
    classes: Mapping[str, int],
    hosts: Mapping[str, int],
    threads: int,
) -> dict[str, Any]:
    """Return fedsim's part of a checkpoint, in plain types.

    Args:
        method: of the run.
        residents: architecture -> model.
        classes: client -> number of identities, for all clients.
        hosts: client -> rank in whose files its private state is.
        threads: CPU threads per rank.
    """
    return {
        "format": FORMAT,
        "method": type(method).__name__,
        "layouts": {arch: _layout(resident.flat.shared_entries) for arch, resident in residents.items()},
        "private_layouts": {arch: _layout(_private_entries(resident)) for arch, resident in residents.items()},
        "complete": {arch: resident.is_complete for arch, resident in residents.items()},
        "clients": dict(classes),
        "hosts": dict(hosts),
        "threads": threads,
    }


def check_content(
    content: Mapping[str, Any],
    method: Method,
    residents: Mapping[str, Resident],
    classes: Mapping[str, int],
) -> None:
    """See whether a checkpoint fits a federation.

    Args:
        content: fedsim's part of it.
        method: of this run.
        residents: architecture -> model.
        classes: client -> number of identities, for all clients.

    Raises:
        ConfigError: naming what differs: method, clients, or the first tensor.
    """
    name = type(method).__name__
    if content["method"] != name:
        raise ConfigError(f"ckpt_path: the checkpoint is of method {content['method']}, model.method is {name}")
    if classes.keys() != content["clients"].keys():
        here, there = ", ".join(classes), ", ".join(content["clients"])
        raise ConfigError(f"ckpt_path: the checkpoint's clients are {there}; this federation's are {here}")
    for arch in sorted({*residents, *content["layouts"]}):
        resident = residents.get(arch)
        _compare(arch, "shares", resident.flat.shared_entries if resident else [], content["layouts"].get(arch, []))
        private = _private_entries(resident) if resident else []
        _compare(arch, "keeps private", private, content["private_layouts"].get(arch, []))
    for client, number in content["clients"].items():
        if number != classes[client]:
            raise ConfigError(
                f"ckpt_path: client {client} has {number} identities in the checkpoint, {classes[client]} here; "
                "use the config of the run that wrote it (data and data.val decide the number of identities)"
            )


def load_states(path: Path, content: Mapping[str, Any], clients: Mapping[str, Client]) -> None:
    """Give the clients that this rank hosts their private states."""
    for name, state in read_states(path, content, list(clients)).items():
        clients[name].load_private_state(state)


def _compare(arch: str, does: str, mine: Sequence[Entry], theirs: list[dict[str, Any]]) -> None:
    for ours, other in itertools.zip_longest(_layout(mine), theirs):
        if ours != other:
            raise ConfigError(
                f"ckpt_path: of {arch}, the checkpoint {does} {_name(other)} where this config {does} {_name(ours)}; "
                "use the config of the run that wrote it"
            )


def _private_entries(resident: Resident) -> list[Entry]:
    return [entry for entry in resident.flat.entries if not entry.shared]


def _layout(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """Say where each tensor lies in the flat buffer, in plain types."""
    return [{"name": e.name, "shape": list(e.shape), "offset": e.offset} for e in entries]


def _name(entry: Mapping[str, Any] | None) -> str:
    return "nothing" if entry is None else f"{entry['name']} {entry['shape']}"
