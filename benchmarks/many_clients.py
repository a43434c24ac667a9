"""A million virtual clients on one machine: assembly, rounds and memory, against a federation of one hundred.

Every client has a head and batch-norm statistics of its own; a hundred train in each round. A client has labels of its
own, and the images of one of a hundred arrays, so that memory is that of fedsim. CPU-seconds of the assembly are those
before the first round. Memory is the process's resident set, its slope a least-squares line over all rounds after the
first fifth.

    python benchmarks/many_clients.py                                      # 100 to 1,000,000 clients, host memory
    python benchmarks/many_clients.py --store disk --clients 100 100000
    python benchmarks/many_clients.py --clients 100 10000 --rounds 200     # memory over many rounds
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import os
import subprocess
import sys
import time
import warnings
from typing import get_args

import numpy as np
import torch
from lightning import Callback, LightningModule, Trainer
from tabulate import tabulate

from fedsim.core.store import StorePlace
from fedsim.data.augmentation import Augmentation
from fedsim.data.datamodule import FederatedDataModule
from fedsim.data.images import Domain, ReIDSource, Split
from fedsim.evaluation.settings import Evaluation
from fedsim.federation.components.selection import RandomFraction
from fedsim.federation.federation import Federation
from fedsim.methods import FedPav
from fedsim.models import Neck, SmallCNN
from fedsim.training.settings import LocalTraining
from overhead import CLASSES, Case, Pixels, run_federation

PER_ROUND = 100


class Pool(ReIDSource):
    """Clients with labels of their own, and the images of one of a hundred arrays; one test-only data set.

    Args:
        case: says how many clients, and how many images of which size.
    """

    def __init__(self, case: Case) -> None:
        self.case = case

    def domains(self) -> list[Domain]:
        """One domain per client."""
        n = self.case.batch_size * self.case.batches
        pool = [Pixels(torch.randint(0, 256, (n, 3, *self.case.size), dtype=torch.uint8)) for _ in range(100)]
        labels, cameras = np.arange(n, dtype=np.int64) % CLASSES, np.zeros(n, dtype=np.int64)
        none = np.zeros(0, dtype=np.int64)
        empty, tested = Split(pool[0].take(none), none, none), Split(pool[0], labels, cameras)
        of_clients = (Split(pool[k % 100], labels.copy(), cameras) for k in range(self.case.clients))
        clients = [Domain(f"client{k}", split, empty, empty) for k, split in enumerate(of_clients)]
        return [*clients, Domain("unseen0", None, tested, tested)]


class Memory(Callback):
    """Notes seconds, CPU-seconds and resident megabytes, at the start and after each round."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        self.megabytes: list[float] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clocks."""
        self.start_megabytes, self.start_cpu = resident_megabytes(), time.process_time()
        self.mark, self.cpu_mark = time.perf_counter(), self.start_cpu

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Read clocks and memory."""
        now, cpu = time.perf_counter(), time.process_time()
        self.seconds.append(now - self.mark)
        self.cpu_seconds.append(cpu - self.cpu_mark)
        self.megabytes.append(resident_megabytes())
        self.mark, self.cpu_mark = now, cpu


def resident_megabytes() -> float:
    """Memory of this process that is in RAM."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def measure(clients: int, rounds: int, store: StorePlace) -> dict[str, float]:
    """Train, and return the medians."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    case = Case("", (), (16, 8), 10, clients=clients, batches=2)
    training = LocalTraining(batch_size=10, optimizer=functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9))
    model = Federation(
        FedPav(), SmallCNN(width=4), Neck(kind="bnneck", dropout=0.0), client=training, bn_stats="local",
        selection=RandomFraction(PER_ROUND / clients), client_store=store,
        evaluation=Evaluation(test_during_fit=False),
    )  # fmt: skip
    before, begun = resident_megabytes(), time.process_time()
    data = FederatedDataModule(Pool(case), val="none", size=case.size, augmentation=Augmentation(pad=0, flip=0.0))
    memory = Memory()
    run_federation(model, data, rounds, [memory])
    skip = rounds // 5
    slope = float(np.polyfit(np.arange(skip, rounds), memory.megabytes[skip:], 1)[0])
    return {
        "assembly": memory.start_cpu - begun,
        "kb": 1024 * (memory.start_megabytes - before) / clients,
        "cpu": float(np.median(memory.cpu_seconds[skip:])),
        "seconds": float(np.median(memory.seconds[skip:])),
        "megabytes": memory.megabytes[-1],
        "slope": slope,
    }


def main() -> None:
    """Print the table; each federation has a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[100, 10_000, 100_000, 1_000_000])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--store", choices=get_args(StorePlace), default="host")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(args.clients[0], args.rounds, args.store)))
        return
    results = []
    for clients in args.clients:
        command = [sys.executable, __file__, "--child", "--clients", str(clients), "--rounds", str(args.rounds),
                   "--store", args.store]  # fmt: skip
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        results.append(json.loads(output.splitlines()[-1]))
    rows = [
        [f"{n:,}", f"{r['assembly']:.1f}", f"{r['kb']:.1f}", f"{1e3 * r['cpu']:.0f}",
         f"{r['cpu'] / results[0]['cpu']:.2f}", f"{1e3 * r['seconds']:.0f}", f"{r['megabytes']:.0f}",
         f"{r['slope']:+.3f}"]
        for n, r in zip(args.clients, results, strict=True)
    ]  # fmt: skip
    headers = ["clients", "assembly CPU-s", "KB / client", "CPU-ms / round", "ratio", "ms / round", "MB at the end",
               "MB / round"]  # fmt: skip
    print(tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
