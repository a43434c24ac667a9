"""What the server does by itself after a round's mean: trains or runs models on public images, and tells all ranks."""

from __future__ import annotations

import torch

from fedsim.core.seeding import derive_seed
from fedsim.methods.base import Method, has_server_step
from fedsim.strategy.strategy import FederatedStrategy
from fedsim.training.server import Server


def work_on_server(strategy: FederatedStrategy, server: Server, method: Method, recalibrate: int | None) -> None:
    """Let rank 0 work as the server, and give everybody the result: replicas would drift apart.

    ``recalibrate`` is the batch size of new running statistics from public images; None: they stay.
    """
    with strategy.together():
        if strategy.global_rank == 0:
            torch.manual_seed(derive_seed(server.seed, server.round, "server"))
            if recalibrate is not None:
                server.recalibrate(recalibrate)
            if has_server_step(method, server.round):
                method.server_step(server)
    broadcast_server(strategy, server)


def broadcast_server(strategy: FederatedStrategy, server: Server) -> None:
    """Give every rank what rank 0's server holds: the global models, and what the method keeps."""
    for arch in sorted(server.vectors):
        strategy.broadcast_(server.vector(arch))
    kept = {(arch, name): tensor for arch, tensors in server.kept.items() for name, tensor in tensors.items()}
    layout = {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in kept.items()}
    for (arch, name), (shape, dtype) in strategy.broadcast(layout).items():
        if strategy.global_rank != 0:
            server.kept[arch][name] = torch.empty(shape, dtype=dtype, device=server.models[arch].device)
        strategy.broadcast_(server.kept[arch][name])
