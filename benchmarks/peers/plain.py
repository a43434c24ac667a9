"""The yardstick: federated averaging as a hand-written PyTorch loop; with torchrun, over several processes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from common import LR, Clock, load_work, parse_job, train
from torch import Tensor, nn


@torch.no_grad()
def load(net: nn.Module, weights: list[Tensor]) -> None:
    """Copy ``weights`` into the network."""
    for parameter, value in zip(net.parameters(), weights, strict=True):
        parameter.copy_(value)


@torch.no_grad()
def accumulate(total: list[Tensor], net: nn.Module, weight: float) -> None:
    """Add one client's weighted model."""
    for value, parameter in zip(total, net.parameters(), strict=True):
        value.add_(parameter, alpha=weight)


def all_reduce(tensors: list[Tensor]) -> list[Tensor]:
    """Sum over the processes, as one message."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat)
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]


def main() -> None:
    """Run the job."""
    job, clock = parse_job(), Clock()
    work, rank = load_work(job.work), 0
    if job.workers > 1:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
    net = work.start(job.model)
    names = [name for name, _ in net.named_parameters()]
    model = [parameter.detach().clone() for parameter in net.parameters()]
    for round_, clients in enumerate(work.selected[: job.rounds]):
        total = [torch.zeros_like(value) for value in model]
        for client in clients[rank :: job.workers]:
            load(net, model)
            work.seed_dropout(round_, client)
            train(net, work.batches(round_, client), LR[job.model])
            accumulate(total, net, 1 / len(clients))  # n_k / n: all clients have as many images
        model = total if job.workers == 1 else all_reduce(total)
        clock.tick(dict(zip(names, model, strict=True)))
    if rank == 0:
        clock.report(job, "torch")
    if job.workers > 1:
        dist.barrier()  # rank 0 reports first: a process that leaves early can abort in torch's clean-up
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
