"""The first line of a fit: where it runs."""

from __future__ import annotations

import torch
from lightning import Trainer

from fedsim.strategy.strategy import FederatedStrategy


def start_line(strategy: FederatedStrategy, trainer: Trainer) -> str:
    """Return devices, ranks, precision and build of torch: ``on 1 x cpu, 2 ranks, 32-true, torch 2.15.0+cu132``."""
    device, ranks = strategy.root_device, trainer.world_size
    count, name = trainer.num_nodes, "cpu"  # all ranks of a machine share its CPUs
    if device.type == "cuda":
        count, name = max(ranks // strategy.ranks_per_device, 1), torch.cuda.get_device_name(device)
    machines = f" of {trainer.num_nodes} machines" * (trainer.num_nodes > 1)
    many = f"{ranks} rank{'s' * (ranks > 1)}"
    return f"on {count} x {name}{machines}, {many}, {trainer.precision}, torch {torch.__version__}"
