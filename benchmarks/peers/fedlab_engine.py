"""FedLab: its StandalonePipeline; with several workers, its server and client managers in processes."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import torch
from common import BATCH, CLIENTS, IMAGES, LR, SELECTED, Clock, Job, Work, load_work, network, parse_job
from fedlab.contrib.algorithm.fedavg import FedAvgSerialClientTrainer, FedAvgServerHandler
from fedlab.contrib.dataset.basic_dataset import FedDataset
from fedlab.core.client.manager import PassiveClientManager
from fedlab.core.network import DistNetwork
from fedlab.core.server.manager import SynchronousServerManager
from fedlab.core.standalone import StandalonePipeline
from torch import Tensor


class Replay(FedDataset):
    """Batches of the work. FedLab names a client but no round, so this counts the client's sessions.

    Args:
        work: the work.
        first: the client that this process calls 0.
    """

    def __init__(self, work: Work, first: int) -> None:
        self.work = work
        self.first = first
        clients = range(len(work.labels) // IMAGES)
        self.rounds = {k: iter([r for r, who in enumerate(work.selected) if k in who]) for k in clients}

    def get_dataloader(
        self,
        id: int,
        batch_size: int,
        type: str = "train",
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Return the batches of the client's next session."""
        client = self.first + id
        return self.work.batches(next(self.rounds[client]), client)


class Server(FedAvgServerHandler):
    """FedLab's FedAvg server with the work's selection, and the clock."""

    def __init__(self, job: Job, work: Work, clock: Clock) -> None:
        share = SELECTED[job.model] / CLIENTS[job.model]
        super().__init__(work.start(job.model), global_round=job.rounds, sample_ratio=share)
        self.selected = work.selected
        self.clock = clock

    def sample_clients(self) -> list[int]:
        """Return the round's clients."""
        return self.selected[self.round]

    def global_update(self, buffer: list[Any]) -> None:
        """Average, and tick."""
        super().global_update(buffer)
        self.clock.tick(dict(self.model.named_parameters()))


class Pipeline(StandalonePipeline):
    """FedLab's loop without its reminder to implement an evaluation."""

    def evaluate(self) -> None:
        """Evaluate nothing."""


def make_trainer(job: Job, work: Work, first: int = 0) -> FedAvgSerialClientTrainer:
    """Return the trainer of one process: of all clients, or of its share from ``first`` on."""
    trainer = FedAvgSerialClientTrainer(network(job.model), CLIENTS[job.model] // job.workers)
    trainer.setup_dataset(Replay(work, first))
    trainer.setup_optim(epochs=1, batch_size=BATCH, lr=LR[job.model])
    return trainer


def run_distributed(job: Job, work: Work, server: Server) -> None:
    """Run the server here and each worker in a process of its own (FedLab's managers are processes)."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = ("127.0.0.1", str(probe.getsockname()[1]))
    size, share = job.workers + 1, CLIENTS[job.model] // job.workers
    networks = [DistNetwork(address, world_size=size, rank=rank) for rank in range(size)]
    managers = [PassiveClientManager(n, make_trainer(job, work, i * share)) for i, n in enumerate(networks[1:])]
    for manager in managers:
        manager.start()
    SynchronousServerManager(networks[0], server).run()
    for manager in managers:
        manager.join()


def main() -> None:
    """Run the job."""
    job, clock = parse_job(), Clock()
    work = load_work(job.work)
    torch.manual_seed(0)
    server = Server(job, work, clock)
    if job.workers == 1:
        Pipeline(server, make_trainer(job, work)).main()
    else:
        run_distributed(job, work, server)
    clock.report(job, "fedlab")


if __name__ == "__main__":
    main()
