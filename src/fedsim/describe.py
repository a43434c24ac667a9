"""``fedsim describe``: what is shared, who holds what, and what a run will cost. Nothing is trained."""

from __future__ import annotations

from collections import Counter

import torch
from tabulate import tabulate

from fedsim.data.datamodule import FederatedDataModule
from fedsim.federation import Federation
from fedsim.models.groups import Group
from fedsim.resident import Resident

__all__ = ["describe_federation", "group_table"]


def describe_federation(model: Federation, data: FederatedDataModule, world_size: int, rounds: int) -> str:
    """Return a report on a federation that has not been set up.

    Args:
        model: as configured.
        data: as configured; files are listed, not read.
        world_size: number of ranks.
        rounds: of the run.
    """
    model.assemble(data, 0, world_size, torch.device("cpu"))
    parts = [f"{type(model.method).__name__}, {rounds} rounds, {world_size} rank{'s' * (world_size > 1)}"]
    for arch, resident in model.residents.items():
        parts += [f"\nWhat is shared: {arch}, bn_stats {model.bn_stats}", group_table(resident)]
        if not resident.is_complete:
            parts.append("The server has no complete model: unseen domains are scored by the clients' own models.")
    parts += ["\nWho holds what", _client_table(model), "\nWhat a run costs", _cost_table(model, data, rounds)]
    return "\n".join(parts)


def group_table(resident: Resident) -> str:
    """Return one line per parameter group of an architecture: tensors, elements, bytes, shared or private."""
    shared = {entry.name for entry in resident.flat.shared_entries}
    state = resident.model.state_dict()
    rows = []
    for group in Group:
        names = [name for name, g in resident.groups.items() if g is group]
        if names:
            where = Counter("shared" if name in shared else "private" for name in names)
            elements = sum(state[name].numel() for name in names)
            size = sum(state[name].numel() * state[name].element_size() for name in names)
            rows.append([group.value, len(names), elements, size, " + ".join(sorted(where))])
    if resident.model.head is None:
        rows.append([Group.HEAD.value, 2, "per client", "per client", "private"])
    return tabulate(rows, headers=["group", "tensors", "elements", "bytes", "where"], intfmt=",")


def _client_table(model: Federation) -> str:
    placement, federated = model.placement, model.federated
    rows = []
    for c in federated.clients:
        counts = [c.num_images, c.num_classes, c.num_cameras, len(c.val.query) if c.val else 0]
        rows.append([c.name, placement.ranks[c.name], model.archs[c.name], *counts])
    headers = ["client", "rank", "architecture", "images", "identities", "cameras", "val queries"]
    tests = [
        [name, len(sets.query), len(sets.gallery), "unseen" if name in federated.unseen else ""]
        for name, sets in federated.tests.items()
    ]
    tables = [tabulate(rows, headers, intfmt=","), tabulate(tests, ["test set", "queries", "gallery", ""], intfmt=",")]
    return "\n\n".join(tables)


def _cost_table(model: Federation, data: FederatedDataModule, rounds: int) -> str:
    placement, clients = model.placement, model.federated.clients
    per_client = {c.name: model.residents[model.archs[c.name]].shared_bytes for c in clients}
    selected = [model.selection.select(t, list(per_client), model.seed) for t in range(rounds)]
    run_bytes = 2 * sum(per_client[name] for chosen in selected for name in chosen)
    hosted = [placement.hosted_by(rank) for rank in range(len(placement.loads))]
    num_images = {c.name: c.num_images for c in clients}
    pixels = 3 * data.size[0] * data.size[1] * max(sum(num_images[name] for name in names) for names in hosted)
    model_bytes = 4 * sum(resident.flat.buffer.numel() for resident in model.residents.values())
    waits = model.method.measures or model.on_bad_update == "skip_client"
    waiting = max(sum(per_client[name] for name in names) for names in hosted) if waits else 0
    each_way = f"{sum(per_client.values()):,}"
    rows = [
        ["bytes down per round, all clients", each_way],
        ["bytes up per round, all clients", each_way],
        [f"bytes of {rounds} round{'s' * (rounds != 1)}, both ways, without drop-outs", f"{run_bytes:,}"],
        [
            "predicted speed-up over one rank",
            f"{placement.speedup:.2f}x ({100 * placement.efficiency:.0f} % efficiency)",
        ],
        ["host memory: training images of the busiest rank", _mib(pixels)],
        ["device memory: model, gradient, two optimizer moments", _mib(4 * model_bytes)],
        ["host memory: uploads waiting on the busiest rank", _mib(waiting)],
    ]
    return tabulate(rows, tablefmt="plain", disable_numparse=True)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"
