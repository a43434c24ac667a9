"""The models in a checkpoint, as named tensors: the global one, a client's personalised one, the clients' mean."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedsim.core.errors import ConfigError
from fedsim.strategy.checkpoint_content import INITIAL_KEY, SERVED_KEY
from fedsim.strategy.checkpoint_files import CONTENT_KEY, SERVER_KEY, read_states


def chosen_tensors(
    checkpoint: dict[str, Any], source: Path, arch: str | None, client: str | None, mean: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the tensors of a model of a checkpoint by name, and its masks; no masks if it is not pruned.

    The names are torchvision's, with ``neck.`` before those of the neck; the identity head is left out.

    Args:
        checkpoint: its content, without private states.
        source: its path.
        arch: the architecture, if there are several.
        client: the client whose personalised model is meant; None: the global model.
        mean: the mean of the models of all clients instead.

    Raises:
        ConfigError: if there is no such model; the message begins with the option of ``fedsim export``.
        DataError: if a file of private states cannot be read.
    """
    if mean:
        return _mean_tensors(checkpoint, source, arch), {}
    if client is None:
        return global_tensors(checkpoint, arch), _global_masks(checkpoint, arch)
    return _client_tensors(checkpoint, source, arch, client)


def global_tensors(checkpoint: dict[str, Any], arch: str | None) -> dict[str, Tensor]:
    """Cut the global vector of one architecture into named tensors; the identity head is left out."""
    content, arch = checkpoint[CONTENT_KEY], _chosen(checkpoint, arch)
    served: Mapping[str, Tensor] = checkpoint.get(SERVED_KEY, {}).get(arch, {})
    if not content["complete"][arch] and not served:
        raise ConfigError(
            f"ckpt_path: {content['method']} keeps part of the backbone on the clients, and this checkpoint has no "
            f"global model to export; give --client one of {', '.join(content['clients'])}"
        )
    tensors = _cut(checkpoint["state_dict"][f"server.vectors.{arch}"], content["layouts"][arch])
    return tensors | {name: tensor.clone() for n, tensor in served.items() if (name := _exported(n))}


def _global_masks(checkpoint: dict[str, Any], arch: str | None) -> dict[str, Tensor]:
    """Cut the server's mask into named ones; empty if the server does not prune."""
    arch = _chosen(checkpoint, arch)
    mask = checkpoint.get(SERVER_KEY, {}).get(arch, {}).get("mask")
    return {} if mask is None else _cut(mask, checkpoint[CONTENT_KEY]["layouts"][arch])


_ASSEMBLED = frozenset(f"kept.{n}" for n in ("alpha", "backbone", "cluster", "norms", "tuned", "weights"))
"""kept tensors from which APFL, SKA, IFCA, FedBABU and FedALA assemble a client's model"""


def _client_tensors(
    checkpoint: dict[str, Any], path: Path, arch: str | None, client: str
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the tensors of a client's personalised model by name, and its masks if it prunes."""
    content = checkpoint[CONTENT_KEY]
    if client not in content["clients"]:
        raise ConfigError(f"--client: there is no client {client}; choose from {', '.join(content['clients'])}")
    state = _private_states(checkpoint, path, arch, [client])[client]
    if _ASSEMBLED & state.keys():
        raise ConfigError(
            f"--client: {content['method']} assembles a client's model in a way of its own; score it with fedsim "
            "test, or leave --client out for the global model"
        )
    arch = _chosen(checkpoint, arch)
    vector, layout = checkpoint["state_dict"][f"server.vectors.{arch}"], content["layouts"][arch]
    whole, mask = [*layout, *content["private_layouts"][arch]], state.get("kept.mask")
    if mask is None:
        personal = state.get("kept.personal", torch.cat([vector, state["state"]]))
        return _cut(personal, whole), {}
    if len(mask) not in {len(vector), *(entry["offset"] for entry in layout)}:
        raise ConfigError(f"--arch: client {client} does not have the architecture {arch}; choose its own one")
    model = torch.cat([vector[: len(mask)].masked_fill(~mask, 0.0), vector[len(mask) :], state["state"]])
    return _cut(model, whole), _cut(mask, layout)


def _mean_tensors(checkpoint: dict[str, Any], path: Path, arch: str | None) -> dict[str, Tensor]:
    content, arch = checkpoint[CONTENT_KEY], _chosen(checkpoint, arch)
    shared, private = content["layouts"][arch], content["private_layouts"][arch]
    if len(content["layouts"]) > 1:
        raise ConfigError("--mean: the clients have several architectures, which cannot be averaged")
    vector = checkpoint["state_dict"][f"server.vectors.{arch}"]
    end = max((entry["offset"] + math.prod(entry["shape"]) for entry in private), default=len(vector))
    states = _private_states(checkpoint, path, arch, list(content["clients"])).values()
    private_states = [state["state"][: end - len(vector)] for state in states]  # the client's head follows
    mean = torch.stack(private_states).to(torch.float64).mean(dim=0).to(vector.dtype)
    return _cut(torch.cat([vector, mean]), [*shared, *private])


def _private_states(
    checkpoint: dict[str, Any], path: Path, arch: str | None, clients: Sequence[str]
) -> dict[str, dict[str, Tensor]]:
    """Return client -> its private state; without the head, which no export has, if the client has not trained."""
    states = read_states(path, checkpoint[CONTENT_KEY], clients)
    return {name: states.get(name) or checkpoint[INITIAL_KEY][_chosen(checkpoint, arch)] for name in clients}


def _chosen(checkpoint: dict[str, Any], arch: str | None) -> str:
    """Return the architecture ``arch``; None: the only one of the checkpoint."""
    layouts = checkpoint[CONTENT_KEY]["layouts"]
    if arch is None and len(layouts) == 1:
        arch = next(iter(layouts))
    if arch is None or arch not in layouts:
        problem = "the checkpoint has several architectures" if arch is None else f"there is no architecture {arch}"
        raise ConfigError(f"--arch: {problem}; choose from {', '.join(layouts)}")
    return arch


def _cut(vector: Tensor, layout: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Cut a vector of the buffer's layout into the named tensors that it contains; the identity head is left out."""
    tensors = {}
    for entry in layout:
        name, shape = _exported(entry["name"]), torch.Size(entry["shape"])
        part = vector[entry["offset"] : entry["offset"] + shape.numel()]
        if name and len(part) == shape.numel():
            tensors[name] = part.view(shape).clone()  # of a view, the whole vector would be written
    return tensors


def _exported(name: str) -> str:
    """Return the name of a tensor in files: torchvision's, timm's or that of a user's module; "" of a head's."""
    for part_of_network in ("backbone.timm.", "backbone.", "module."):
        if name.startswith(part_of_network):
            return name.removeprefix(part_of_network)
    return "" if name.startswith("head.") else name
