"""Ranks that share a large client: two ranks against one, and nine data sets on two to eight GPUs by calculation.

The first table trains ten clients on drawn people, one of which holds 80 % of the images, all clients in every round,
batches of 64 in micro-batches of 16. Runs on one and on two ranks take turns; both give the same bits. Without
micro-batches no schedule could be faster than 1 / 0.8 = 1.25 times one rank.

The second has the proportions of paper 003's nine data sets, and one pass of each over its images: the plan for the
ranks of one machine. The host launches kernels, the device computes, and the sums of a batch take their time among
ranks. Gains are those over one rank without micro-batches, which has fewer launches. All numbers are assumptions, which
are printed; the launches are those of ResNet-50 on the simulated GPU (tests/device/test_device_budgets.py).

    python benchmarks/rank_groups.py                          # both tables
    python benchmarks/rank_groups.py --simulate --launch 5 --images-per-second 2500 --bandwidth 200
    python benchmarks/rank_groups.py --simulate --measure     # this machine's CPU in place of a GPU
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate

from fedsim.cli.describe import FederatedTrainer
from fedsim.data import Augmentation, FederatedDataModule, SyntheticReID
from fedsim.data.images import Domain, ReIDSource, Split
from fedsim.evaluation.settings import Evaluation
from fedsim.federation.federation import Federation
from fedsim.federation.scheduling.plan import Task, make_plan
from fedsim.methods import FedPav
from fedsim.models import Neck, ResNet, SmallCNN
from fedsim.strategy.strategy import FederatedStrategy
from fedsim.training.settings import LocalTraining
from overhead import Clock

IMAGES = {
    "MSMT17": 32_621, "DukeMTMC-reID": 16_522, "Market-1501": 12_936, "CUHK03-NP": 7_365, "PRID2011": 3_744,
    "CUHK01": 1_940, "VIPeR": 632, "3DPeS": 450, "iLIDS-VID": 248,
}  # fmt: skip
"""Training images of paper 003's data sets (its Table 1)."""

RESNET50 = 23_508_032  # parameters of the backbone: what a step sums
SUMS = 2
"""of a batch in a rank group: its gradients, and its running statistics"""


class Skewed(ReIDSource):
    """Ten clients with drawn people: 512 images of the first, and 14 or 15 of each other."""

    def domains(self) -> list[Domain]:
        """Return the largest town, and parts of others."""
        [largest] = SyntheticReID(clients=1, unseen=0, scale=1.2).domains()
        assert largest.train is not None
        first = replace(largest, train=_some(largest.train, 512))
        return [first, *(self._small(i) for i in range(1, 10))]

    @staticmethod
    def _small(number: int) -> Domain:
        town = SyntheticReID(clients=1, unseen=0, scale=0.5, seed=number).domains()[0]
        assert town.train is not None
        return replace(town, name=f"town{number}", train=_some(town.train, 14 + (number < 3)))


def _some(split: Split, count: int) -> Split:
    return split.take(torch.arange(count).numpy())


def train(devices: int, rounds: int, micro_batch: int | None) -> dict[str, Any]:
    """Train on this process's rank; return seconds of a round and the last loss."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    client = LocalTraining(batch_size=64, micro_batch=micro_batch)
    evaluation = Evaluation(test_during_fit=False)
    model = Federation(
        FedPav(), SmallCNN(width=32), Neck(kind="bnneck", dropout=0.0), client=client, evaluation=evaluation
    )
    augmentation = Augmentation(pad=4, flip=0.5)
    data = FederatedDataModule(Skewed(), size=(64, 32), val="none", augmentation=augmentation)
    clock = Clock()
    trainer = FederatedTrainer(
        accelerator="cpu", devices=devices, strategy=FederatedStrategy(), max_epochs=rounds, limit_val_batches=0,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        use_distributed_sampler=False, logger=False, callbacks=[clock],
    )  # fmt: skip
    trainer.fit(model, datamodule=data)
    return {"seconds": clock.median(), "loss": model.round_metrics["train/loss"]}


def in_a_process(devices: int, rounds: int, micro_batch: int | None) -> dict[str, Any]:
    """Train in new processes; return the numbers of rank 0."""
    args = ["--alone", str(devices), "--rounds", str(rounds), "--micro_batch", str(micro_batch or 0)]
    output = subprocess.run([sys.executable, __file__, *args], check=True, capture_output=True, text=True).stdout
    result: dict[str, Any] = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
    return result


def compare(rounds: int, repeats: int) -> str:
    """Return the table of one and two ranks, with and without micro-batches."""
    cases = {"whole batches": None, "micro-batches of 16": 16}
    runs: dict[tuple[str, int], list[dict[str, Any]]] = {(case, n): [] for case in cases for n in (1, 2)}
    for _ in range(repeats):
        for case, devices in runs:
            runs[case, devices].append(in_a_process(devices, rounds, cases[case]))
    rows = []
    for case in cases:
        on_one, on_two = (statistics.median(run["seconds"] for run in runs[case, n]) for n in (1, 2))
        equal = len({run["loss"] for n in (1, 2) for run in runs[case, n]}) == 1
        rows.append(
            [case, f"{1e3 * on_one:.0f}", f"{1e3 * on_two:.0f}", f"{on_one / on_two:.2f}x", "yes" if equal else "no"]
        )
    headers = ["batches of 64", "1 rank, ms per round", "2 ranks, ms per round", "faster", "same loss to the last bit"]
    return tabulate(rows, headers, tablefmt="github")


def step_seconds(batch: int, micro_batch: int, repeats: int) -> float:
    """Return the median seconds of forward and backward of ResNet-50 over a batch's micro-batches, on one thread."""
    torch.set_num_threads(1)
    network, images = ResNet(depth=50, weights=None), torch.randn(micro_batch, 3, 256, 128)
    times = []
    for _ in range(1 + repeats):
        start = time.perf_counter()
        network(images).mean().backward()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:]) * batch / micro_batch


def sum_on_two(rank: int, port: int, repeats: int, queue: Any) -> None:
    """Sum float64 gradients over two ranks; put the seconds of each sum into ``queue``."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    gradients = torch.ones(RESNET50, dtype=torch.float64)
    for _ in range(repeats):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(gradients)
        if rank == 0:
            queue.put(time.perf_counter() - start)
    dist.destroy_process_group()


def bandwidth_of_two(repeats: int) -> float:
    """Return GB/s between two ranks of this machine by gloo: a ring of two sends each rank's 8 bytes per entry once."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = torch.multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    ranks = [context.Process(target=sum_on_two, args=(rank, port, repeats, queue)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    seconds: float = statistics.median(queue.get() for _ in range(repeats))
    for rank in ranks:
        rank.join()
    return 8 * RESNET50 / seconds / 1e9


@dataclass(frozen=True)
class Assumptions:
    """The machine and the work of the second table."""

    batch: int
    """images in a batch"""
    micro_batch: int
    """images in a micro-batch"""
    launch: float
    """microseconds of the host for a launch"""
    images_per_second: float
    """that a device trains, if its host is not in the way"""
    bandwidth: float
    """GB/s between ranks, each way"""
    latency: float = 30.0
    """microseconds of a sum among ranks besides its bytes"""
    micro_batch_launches: int = 515
    """of ResNet-50, SGD, bf16"""
    plain_launches: int = 502
    """of a batch that is not cut: what one rank does without micro-batches"""
    batch_launches: int = 26
    """that sums and statistics of a batch add"""

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a batch."""
        return self.batch // self.micro_batch

    def seconds(self, images: int, ranks: int) -> float:
        """Return the seconds of a pass over a data set on several ranks."""
        most = math.ceil(self.micro_batches / ranks)
        host = 1e-6 * self.launch * (most * self.micro_batch_launches + self.batch_launches)
        device = most * self.micro_batch / self.images_per_second
        sums = 2 * (ranks - 1) / ranks * 8 * RESNET50 / (self.bandwidth * 1e9)  # a ring of float64 gradients
        sums += 1e-6 * self.latency * SUMS * (ranks > 1)
        return images / self.batch * (max(host, device) + sums)

    def plain_seconds(self, images: int) -> float:
        """Return the seconds of a pass on one rank in whole batches, as without ``micro_batch``."""
        host = 1e-6 * self.launch * self.plain_launches * images / self.batch
        return max(host, images / self.images_per_second)

    def table(self) -> str:
        """Return the assumptions as a table."""
        rows = [
            ["images in a batch, in a micro-batch", f"{self.batch}, {self.micro_batch}"],
            ["host, microseconds for a launch", self.launch],
            ["launches of a micro-batch; of a batch besides", f"{self.micro_batch_launches}; {self.batch_launches}"],
            ["launches of a batch that is not cut", self.plain_launches],
            ["device, images per second", self.images_per_second],
            ["among ranks, GB/s each way", self.bandwidth],
            ["among ranks, microseconds of a sum besides", self.latency],
            ["sums of a batch in a rank group", SUMS],
            ["gradients that a batch sums, MB (float64)", f"{8 * RESNET50 / 1e6:.0f}"],
        ]
        return tabulate(rows, ["assumed", ""], tablefmt="github")


def simulate(assumed: Assumptions) -> str:
    """Return the tables of assumptions, and of predicted speed-ups for nine data sets."""
    rows = []
    total = sum(assumed.plain_seconds(images) for images in IMAGES.values())
    cut = sum(assumed.seconds(images, 1) for images in IMAGES.values())
    for ranks in (1, 2, 4, 8):
        sizes = range(1, min(ranks, assumed.micro_batches) + 1)
        tasks = [
            Task(name, assumed.seconds(n, 1), assumed.micro_batches, {k: assumed.seconds(n, k) for k in sizes})
            for name, n in IMAGES.items()
        ]
        plan = make_plan(tasks, ranks)  # with the true seconds on each number of ranks, as after some rounds
        bound = max(assumed.plain_seconds(IMAGES["MSMT17"]), total / ranks)
        rank_groups = ", ".join(f"{client} on {len(rank_group)}" for client, rank_group in plan.rank_groups) or "none"
        faster, without = f"{total / plan.seconds:.2f}x", f"{total / bound:.2f}x"
        rows.append([ranks, rank_groups, f"{total:.1f}", f"{cut:.1f}", f"{plan.seconds:.1f}", faster, without])
    headers = ["ranks", "rank groups", "seconds on one, whole batches", "in micro-batches", "seconds", "faster",
               "bound without rank groups"]  # fmt: skip
    return f"{assumed.table()}\n\n{tabulate(rows, headers, tablefmt='github')}"


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--simulate", action="store_true", help="the calculation only")
    parser.add_argument("--launch", type=float, default=10.0, help="microseconds of the host for a launch")
    parser.add_argument("--images-per-second", type=float, default=2500.0, help="that a device trains")
    parser.add_argument("--bandwidth", type=float, default=200.0, help="GB/s between ranks, each way")
    parser.add_argument("--latency", type=float, default=30.0, help="microseconds of a sum besides its bytes")
    parser.add_argument("--measure", action="store_true", help="measure images per second and bandwidth on this CPU")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--micro-batch", type=int, default=16)
    parser.add_argument("--alone", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--micro_batch", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.alone:
        numbers = train(args.alone, args.rounds, args.micro_batch or None)
        if int(os.environ.get("LOCAL_RANK", "0")) == 0:
            print(json.dumps(numbers))
        return
    if not args.simulate:
        print(f"load of the machine before: {os.getloadavg()[0]:.1f}\n")
        print(compare(args.rounds, args.repeats), "\n")
    assumed = Assumptions(
        args.batch, args.micro_batch, args.launch, args.images_per_second, args.bandwidth, args.latency
    )
    if args.measure:
        rate = args.batch / step_seconds(args.batch, args.micro_batch, args.repeats)
        assumed = replace(assumed, launch=0.0, images_per_second=rate, bandwidth=bandwidth_of_two(args.repeats))
    print(simulate(assumed))


if __name__ == "__main__":
    main()
