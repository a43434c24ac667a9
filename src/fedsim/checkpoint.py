"""What fedsim adds to a Lightning checkpoint, and whether a checkpoint fits a federation.

Lightning's ``state_dict`` holds the global vectors; here come their layouts, so that the file can be read without the
config, and every client's private state. Only tensors and plain types: files are loaded with ``weights_only=True``.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from fedsim.client import Client, Resident
from fedsim.core.errors import ConfigError
from fedsim.method import Method

__all__ = ["CONTENT_KEY", "FORMAT", "check_content", "describe_content"]

CONTENT_KEY = "fedsim"
FORMAT = 1


def describe_content(
    method: Method, residents: Mapping[str, Resident], states: Mapping[str, Mapping[str, Tensor]], threads: int
) -> dict[str, Any]:
    """Return fedsim's part of a checkpoint.

    Args:
        method: of the run.
        residents: architecture -> model.
        states: client -> private state, of all clients.
        threads: CPU threads per rank.
    """
    return {
        "format": FORMAT,
        "method": type(method).__name__,
        "layouts": {arch: _layout(resident) for arch, resident in residents.items()},
        "complete": {arch: resident.is_complete for arch, resident in residents.items()},
        "clients": states,
        "threads": threads,
    }


def check_content(
    checkpoint: Mapping[str, Any],
    method: Method,
    residents: Mapping[str, Resident],
    hosted: Mapping[str, Client],
    clients: Sequence[str],
) -> Mapping[str, Any]:
    """Return fedsim's part of a checkpoint that fits.

    Args:
        checkpoint: as Lightning loaded it.
        method: of this run.
        residents: architecture -> model.
        hosted: the clients of this rank, whose private states are compared.
        clients: names of all clients.

    Raises:
        ConfigError: naming what differs: format, method, clients, or the first tensor.
    """
    content = checkpoint.get(CONTENT_KEY)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ConfigError(f"ckpt_path: not a fedsim checkpoint of format {FORMAT}")
    name = type(method).__name__
    if content["method"] != name:
        raise ConfigError(f"ckpt_path: the checkpoint is of method {content['method']}, model.method is {name}")
    if sorted(clients) != sorted(content["clients"]):
        here, there = ", ".join(clients), ", ".join(content["clients"])
        raise ConfigError(f"ckpt_path: the checkpoint's clients are {there}; this federation's are {here}")
    for arch in sorted({*residents, *content["layouts"]}):
        mine = _layout(residents[arch]) if arch in residents else []
        for ours, theirs in itertools.zip_longest(mine, content["layouts"].get(arch, [])):
            if ours != theirs:
                raise ConfigError(
                    f"ckpt_path: of {arch}, the checkpoint shares {_name(theirs)} where this config shares "
                    f"{_name(ours)}; use the config of the run that wrote it"
                )
    for name, client in hosted.items():
        _compare_private(name, client.state_dict(), content["clients"][name])
    return content


def _compare_private(client: str, mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    for key, tensor in mine.items():
        shape = list(theirs[key].shape) if key in theirs else None
        if shape != list(tensor.shape):
            raise ConfigError(
                f"ckpt_path: client {client} has {key} of shape {shape} in the checkpoint, {list(tensor.shape)} here; "
                "use the config of the run that wrote it (data and data.val decide the number of identities)"
            )


def _layout(resident: Resident) -> list[dict[str, Any]]:
    """Say where each shared tensor lies in the global vector, in plain types."""
    entries = resident.flat.shared_entries
    return [{"name": e.name, "shape": list(e.shape), "offset": e.offset} for e in entries]


def _name(entry: Mapping[str, Any] | None) -> str:
    return "nothing" if entry is None else f"{entry['name']} {entry['shape']}"
