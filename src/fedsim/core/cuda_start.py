"""CUDA starts when a rank has its GPU, and never for a run on the CPU.

Two libraries start it earlier where NVIDIA's driver counts a GPU. From torch 2.15 on, a step of Adam and its kin asks
whether a CUDA graph is being captured, also for tensors on the CPU: each rank's trial step takes memory on GPU 0. And
Lightning saves the random states of all GPUs, also for a run on the CPU. Both fail if the driver is too old.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps

import torch
from lightning.pytorch.trainer import trainer
from lightning.pytorch.utilities.seed import isolate_rng
from torch.optim import Optimizer

_CHECKS = ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check")
"""methods of Optimizer that ask; the second is the name before torch 2.12, which optimizers of others may still call"""


@cache
def leave_cuda_alone() -> None:
    """Let optimizers ask CUDA only for tensors on a GPU, and Lightning only where CUDA has started; once a process."""
    for name in _CHECKS:
        if hasattr(Optimizer, name):
            setattr(Optimizer, name, _on_gpus_only(getattr(Optimizer, name)))
    vars(trainer)["isolate_rng"] = lambda: isolate_rng(include_cuda=torch.cuda.is_initialized())


def _on_gpus_only(check: Callable[[Optimizer], None]) -> Callable[[Optimizer], None]:
    @wraps(check)
    def checked(optimizer: Optimizer) -> None:
        if any(p.device.type != "cpu" for group in optimizer.param_groups for p in group["params"]):
            return check(optimizer)
        for group in optimizer.param_groups:  # torch refuses capturable steps of the CPU, which have no meaning there
            group["capturable"] = False
        return None

    return checked
