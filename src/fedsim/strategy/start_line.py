"""The first line of a fit: where it runs."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

import torch
from lightning import Trainer

from fedsim.strategy.strategy import FederatedStrategy

log = logging.getLogger(__name__)


def start_line(strategy: FederatedStrategy, trainer: Trainer) -> str:
    """Return devices, ranks, precision and build of torch: ``on 1 x cpu, 2 ranks, 32-true, torch 2.15.0+cu132``."""
    device, ranks = strategy.root_device, trainer.world_size
    places = f"{trainer.num_nodes} x cpu"  # all ranks of a machine share its CPUs
    if device.type == "cuda":
        places = _gpus(strategy.parallel_devices or [device], max(ranks // strategy.ranks_per_device, 1))
    machines = f" of {trainer.num_nodes} machines" * (trainer.num_nodes > 1)
    many = f"{ranks} rank{'s' * (ranks > 1)}"
    return f"on {places}{machines}, {many}, {trainer.precision}, torch {torch.__version__}"


def _gpus(devices: Sequence[torch.device], count: int) -> str:
    """Return ``count`` GPUs with their names: of this machine's ranks are ``devices``, and other machines are alike.

    If ranks see only their own GPU, as with some launchers, its name stands for all.
    """
    names = Counter(torch.cuda.get_device_name(device) for device in dict.fromkeys(devices))
    machines = max(count // names.total(), 1)
    if len(names) == 1:
        return f"{count} x {next(iter(names))}"
    log.warning(
        "GPUs of different models draw different numbers in random layers such as dropout, so weights depend on the "
        "rank that trains a client; choose GPUs of one model with trainer.devices"
    )
    return ", ".join(f"{machines * number} x {name}" for name, number in names.items())
