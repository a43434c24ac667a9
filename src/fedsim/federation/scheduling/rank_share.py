"""Placement of clients on this rank, and the state shared with its machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fedsim.core.placement import Placement, place
from fedsim.core.store import ClientStore, FileStore, MemoryStore, StorePlace, make_store
from fedsim.federation.scheduling.scheduler import RoundScheduler
from fedsim.strategy.machine import Machine
from fedsim.training.old_models import OldModels
from fedsim.training.snapshots import Snapshots


@dataclass(frozen=True, kw_only=True)
class RankShare:
    """The clients of a rank, and the stores that it shares with the ranks of its machine."""

    placement: Placement
    """client -> the rank that owns it"""
    machine: Machine | None
    """the ranks that share clients with this one; None: there are none"""
    owned_clients: list[str]
    """clients that this rank owns: it creates and saves their states"""
    trainable_clients: list[str]
    """clients that this rank may train: those that it owns, or all of its machine"""
    states: ClientStore
    """private states between sessions"""
    snapshots: Snapshots
    """local models of the last round, if an evaluation follows it"""
    old_models: OldModels
    """global models of earlier rounds, on which clients under way train"""
    scheduler: RoundScheduler
    """assigns the clients of a round to ranks"""


def make_rank_share(
    costs: Mapping[str, float],
    micro_batches: Mapping[str, int],
    rank: int,
    world_size: int,
    machine: Machine | None,
    store: StorePlace,
    device: torch.device,
    largest: int,
    places: int = 0,
) -> RankShare:
    """Divide the clients among ranks; with a machine, all ranks of the run call this together.

    ``costs``: client -> predicted work; ``micro_batches``: client -> micro-batches of a batch. ``store`` is the place
    of private states, ``device`` the device of the models. The largest model has ``largest`` bytes. When a round ends,
    ``places`` clients may be under way.
    """
    placement = place(costs, world_size, len(machine.ranks) if machine else 1)
    owned_clients = trainable_clients = placement.clients_of(rank)
    old_models = OldModels(MemoryStore(torch.device("cpu")), saves=rank == 0)
    if machine is None:
        states, snapshots = make_store(store, device, trainable_clients), Snapshots(MemoryStore(torch.device("cpu")))
    else:
        trainable_clients = placement.shared_by(machine.ranks)
        num_bytes = largest * (2 * len(trainable_clients) + len(OldModels.slots(places)))
        with machine.folder(num_bytes, in_memory=store != "disk") as folder:
            states = FileStore(folder / "states", trainable_clients)
            snapshots = Snapshots(FileStore(folder / "snapshots", Snapshots.places(len(trainable_clients))))
            if places:
                slots = FileStore(folder / "old models", OldModels.slots(places))
                old_models = OldModels(slots, writes=machine.place == 0, saves=rank == 0)
    clients = [trainable_clients] if machine is None else [placement.shared_by(ranks) for ranks in placement.groups]
    scheduler = RoundScheduler(costs, micro_batches, clients, machine)
    return RankShare(
        placement=placement,
        machine=machine,
        owned_clients=owned_clients,
        trainable_clients=trainable_clients,
        states=states,
        snapshots=snapshots,
        old_models=old_models,
        scheduler=scheduler,
    )
