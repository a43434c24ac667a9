"""Test sums over ranks that run only for them: whether NCCL, or gloo on CPUs, works on this machine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fedsim.strategy.sharing import unbind_group_of_all

MULTI_RANK = "NCCL_MULTI_RANK_GPU_ENABLE"
"""with 1 in it, NCCL takes several ranks of a GPU, from 2.30 on"""
_NUMBERS = 1 << 20  # 8 MiB: NCCL uses another protocol for a few bytes


def try_sum(rank: int, devices: Sequence[torch.device], store: Path, *, seconds: float) -> None:
    """Sum numbers over all ranks, and over two of them, one process per device; each calls this with its ``rank``.

    Groups are opened as in a fit: all ranks by NCCL, bound to their GPUs, and then smaller groups by gloo and by NCCL.

    Args:
        rank: of this process, from 0.
        devices: one per rank, all CPUs (gloo) or GPUs of this machine (NCCL).
        store: a path that all processes can access, without a file so far: they meet by this file.
        seconds: longest wait for the others.

    Raises:
        RuntimeError: if a sum fails or is wrong.
    """
    device, timeout = devices[rank], timedelta(seconds=seconds)
    backend = "gloo" if device.type == "cpu" else "nccl"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if len(set(devices)) < len(devices):
            os.environ.setdefault(MULTI_RANK, "1")
    dist.init_process_group(
        backend, init_method=f"file://{store.absolute()}", rank=rank, world_size=len(devices), timeout=timeout,
        device_id=None if device.type == "cpu" else device,
    )  # fmt: skip
    try:
        unbind_group_of_all()
        _sum(rank, range(len(devices)), device, None)
        for group_backend in dict.fromkeys(("gloo", backend)):
            for first in range(0, len(devices) - 1, 2):  # pairs, as the smallest rank groups
                ranks = range(first, first + 2)
                group = dist.new_group(list(ranks), timeout=timeout, backend=group_backend)
                if rank in ranks:
                    _sum(rank, ranks, device if group_backend == "nccl" else torch.device("cpu"), group)
    finally:
        dist.destroy_process_group()


def _sum(rank: int, ranks: range, device: torch.device, group: Any) -> None:
    numbers = torch.arange(_NUMBERS, dtype=torch.float64, device=device)
    total = numbers * (rank + 1)
    dist.all_reduce(total, group=group)
    if not torch.equal(total, numbers * sum(number + 1 for number in ranks)):  # whole numbers: sums are exact
        of_ranks = f"of ranks {ranks.start} to {ranks.stop - 1} "
        raise RuntimeError(f"rank {rank} on {device} has a wrong sum {of_ranks if group else ''}".rstrip())
