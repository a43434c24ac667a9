"""A test sum over ranks that run only for it: whether NCCL, or gloo on CPUs, works on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

_NUMBERS = 1 << 20  # 8 MiB: NCCL uses another protocol for a few bytes


def try_sum(rank: int, devices: Sequence[torch.device], store: Path, *, seconds: float) -> None:
    """Sum numbers over ranks, one process per device; each process calls this with its ``rank``.

    Args:
        rank: of this process, from 0.
        devices: one per rank, all CPUs (gloo) or GPUs of this machine (NCCL).
        store: a path that all processes can access, without a file so far: they meet by this file.
        seconds: longest wait for the others.

    Raises:
        RuntimeError: if the sum fails or is wrong.
    """
    device = devices[rank]
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=f"file://{store.absolute()}", rank=rank, world_size=len(devices),
        timeout=timedelta(seconds=seconds),
    )  # fmt: skip
    try:
        numbers = torch.arange(_NUMBERS, dtype=torch.float64, device=device)
        total = numbers * (rank + 1)
        dist.all_reduce(total)
        ranks = len(devices)
        if not torch.equal(total, numbers * (ranks * (ranks + 1) // 2)):  # whole numbers: sums are exact
            raise RuntimeError(f"rank {rank} on {device} has a wrong sum")
    finally:
        dist.destroy_process_group()
