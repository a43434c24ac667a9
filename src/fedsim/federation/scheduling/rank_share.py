"""Who may be trained where: the clients of a rank, and the memory that it shares with the ranks of its machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fedsim.core.placement import Placement, place
from fedsim.core.store import ClientStore, FileStore, MemoryStore, StorePlace, make_store
from fedsim.federation.scheduling.plan import blocks
from fedsim.federation.scheduling.scheduler import RoundScheduler
from fedsim.strategy.machine import Machine
from fedsim.training.snapshots import Snapshots


@dataclass(frozen=True, kw_only=True)
class RankShare:
    """A rank's place among the others."""

    placement: Placement
    """which rank hosts which client"""
    machine: Machine | None
    """the ranks that share clients with this one; None: there are none"""
    own: list[str]
    """clients that this rank hosts: it makes and saves their states"""
    near: list[str]
    """clients that it may train: its own, or all of its machine"""
    states: ClientStore
    """where private states wait"""
    snapshots: Snapshots
    """local models of the last round, if an evaluation follows"""
    scheduler: RoundScheduler
    """who trains whom in a round"""


def make_rank_share(
    costs: Mapping[str, float],
    micro_batches: Mapping[str, int],
    rank: int,
    world_size: int,
    machine: Machine | None,
    store: StorePlace,
    device: torch.device,
    largest: int,
) -> RankShare:
    """Divide the clients among ranks; with a machine, all ranks of the run together.

    ``costs``: client -> predicted work; ``micro_batches``: client -> micro-batches. ``store`` is where private states
    wait, ``device`` that of the models, of which the largest has ``largest`` bytes.
    """
    placement = place(costs, world_size, len(machine.ranks) if machine else 1)
    own = near = placement.clients_of(rank)
    if machine is None:
        states, snapshots = make_store(store, device, near), Snapshots(MemoryStore(torch.device("cpu")))
    else:
        near, size = placement.shared_by(machine.ranks), len(machine.ranks)
        if any(number > 1 for number in micro_batches.values()):
            machine.open_rank_groups([block for ranks in range(2, size + 1) for block in blocks(size, ranks)])
        with machine.folder(2 * largest * len(near), in_memory=store != "disk") as folder:
            states = FileStore(folder / "states", near)
            snapshots = Snapshots(FileStore(folder / "snapshots", Snapshots.places(len(near))))
    scheduler = RoundScheduler(costs, micro_batches, near, machine)
    return RankShare(
        placement=placement,
        machine=machine,
        own=own,
        near=near,
        states=states,
        snapshots=snapshots,
        scheduler=scheduler,
    )
