"""BlazeFL 3: its FedAvg, with one worker in a loop, with several in threads (Python 3.14 without GIL)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from blazefl.contrib import FedAvgBaseClientTrainer, FedAvgBaseServerHandler, FedAvgThreadPoolClientTrainer
from common import BATCH, CLIENTS, IMAGES, LR, SELECTED, Clock, Job, Work, load_work, network, parse_job
from torch import Tensor, nn


class Loader:
    """The batches of one session, in place of a ``DataLoader``."""

    def __init__(self, work: Work, round_: int, client: int) -> None:
        self.dataset = range(IMAGES)
        self.work, self.round, self.client = work, round_, client

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Return the batches, and begin the session's stream for dropout."""
        self.work.seed_dropout(self.round, self.client)
        return self.work.batches(self.round, self.client)


class Replay:
    """The work as BlazeFL's partitioned data set and as its choice of models."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.round = 0

    def get_dataloader(self, type_: Any, cid: int, batch_size: int, generator: torch.Generator) -> Loader:
        """Return the batches of the client's session in this round."""
        return Loader(self.work, self.round, cid)

    def select_model(self, model_name: str) -> nn.Sequential:
        """Return a new network with the initial weights."""
        return self.work.start(model_name)


class Server(FedAvgBaseServerHandler):
    """BlazeFL's FedAvg server with the work's selection."""

    def sample_clients(self) -> list[int]:
        """Return the round's clients."""
        return self.dataset.work.selected[self.round]


def make_trainer(job: Job, replay: Replay) -> Any:
    """Return the trainer of all clients."""
    settings = {
        "model_selector": replay, "model_name": job.model, "dataset": replay, "device": "cpu",
        "num_clients": CLIENTS[job.model], "epochs": 1, "batch_size": BATCH, "lr": LR[job.model], "seed": 0,
    }  # fmt: skip
    if job.workers == 1:
        return FedAvgBaseClientTrainer(**settings)
    return FedAvgThreadPoolClientTrainer(**settings, num_parallels=job.workers)


def main() -> None:
    """Run the job."""
    job, clock = parse_job(), Clock()
    if job.model == "cifar" and job.workers > 1:
        sys.exit("its threads share torch's random stream, so dropout cannot be equal")
    work = load_work(job.work)
    replay = Replay(work)
    server = Server(
        replay, job.model, replay, global_round=job.rounds, num_clients=CLIENTS[job.model],
        sample_ratio=SELECTED[job.model] / CLIENTS[job.model], device="cpu", batch_size=BATCH, seed=0,
    )  # fmt: skip
    trainer = make_trainer(job, replay)
    names = list(network(job.model).state_dict())
    while not server.is_stopped():
        replay.round = server.round
        trainer.local_process(server.downlink_package(), server.sample_clients())
        for package in trainer.uplink_package():
            server.load(package)
        weights = server.model.state_dict()
        clock.tick({name: weights[name] for name in names})
    clock.report(job, "blazefl")


if __name__ == "__main__":
    main()
