"""Flower: a ServerApp and a ClientApp in its Simulation Runtime, one Ray actor per worker."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from common import CLIENTS, IMAGES, LR, Clock, Job, load_work, parse_job, shared_network, train
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

client_app = ClientApp()


@client_app.train()
def train_client(message: Message, context: Context) -> Message:  # noqa: ARG001 - Flower's signature
    """Train one client in an actor. Data and network stay in the actor; building them per session would cost more."""
    torch.set_num_threads(1)
    content, config = message.content, message.content["config"]
    net = shared_network(config["model"])
    net.load_state_dict(content["arrays"].to_torch_state_dict())
    work = load_work(Path(config["work"]))
    train(net, work.batches(config["round"], config["client"]), LR[config["model"]])
    metrics = MetricRecord({"num-examples": IMAGES})
    return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=message)


class Replay(FedAvg):
    """Flower's FedAvg with the work's selection.

    Args:
        job: what was asked for.
    """

    def __init__(self, job: Job) -> None:
        super().__init__(fraction_train=0.1, fraction_evaluate=0.0, min_available_nodes=CLIENTS[job.model])
        self.job = job

    def configure_train(
        self,
        server_round: int,
        arrays: ArrayRecord,
        config: ConfigRecord,
        grid: Grid,
    ) -> Iterable[Message]:
        """Return a message to each selected client; virtual node k is client k."""
        nodes, round_ = sorted(grid.get_node_ids()), server_round - 1
        job = self.job
        for client in load_work(job.work).selected[round_]:
            settings = {"model": job.model, "work": str(job.work), "round": round_, "client": client}
            record = RecordDict({"arrays": arrays, "config": ConfigRecord(settings)})
            yield Message(record, dst_node_id=nodes[client], message_type=MessageType.TRAIN)


def make_server(job: Job, clock: Clock) -> ServerApp:
    """Return the server, which ticks after each round."""
    app = ServerApp()

    def tick(server_round: int, arrays: ArrayRecord) -> None:
        if server_round > 0:  # Flower evaluates the initial model, too
            clock.tick(arrays.to_torch_state_dict())

    @app.main()
    def main(grid: Grid, context: Context) -> None:  # noqa: ARG001 - Flower's signature
        start = ArrayRecord(load_work(job.work).start(job.model).state_dict())
        Replay(job).start(grid, start, num_rounds=job.rounds, evaluate_fn=tick)

    return app


def main() -> None:
    """Run the job."""
    job, clock = parse_job(), Clock()
    resources = {"init_args": {"num_cpus": job.workers}, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(make_server(job, clock), client_app, num_supernodes=CLIENTS[job.model], backend_config=resources)
    clock.report(job, "flwr")


if __name__ == "__main__":
    main()
