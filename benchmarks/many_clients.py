"""Ten thousand virtual clients on one machine: seconds and memory per round, against a federation of one hundred.

Every client has images, a head of its own and batch-norm statistics of its own; a hundred train in each round. Memory
is the process's resident set after each round, its slope a least-squares line over all rounds after the first fifth.

    python benchmarks/many_clients.py                     # host memory
    python benchmarks/many_clients.py --store disk
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
from fedsim.evaluation.settings import Evaluation
from fedsim.federation.components.selection import RandomFraction
from fedsim.federation.federation import Federation
from fedsim.methods import FedPav
from fedsim.models import Neck, SmallCNN
from fedsim.training.settings import LocalTraining
from overhead import Case, RandomClients, run_federation

PER_ROUND = 100


class Memory(Callback):
    """Notes seconds and resident megabytes after each round."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.megabytes: list[float] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self.mark = time.perf_counter()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Read clock and memory."""
        now = time.perf_counter()
        self.seconds.append(now - self.mark)
        self.megabytes.append(resident_megabytes())
        self.mark = now


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
    data = FederatedDataModule(
        RandomClients(case), val="none", size=case.size, augmentation=Augmentation(pad=0, flip=0.0)
    )
    memory = Memory()
    run_federation(model, data, rounds, [memory])
    skip = rounds // 5
    slope = float(np.polyfit(np.arange(skip, rounds), memory.megabytes[skip:], 1)[0])
    return {"seconds": float(np.median(memory.seconds[skip:])), "megabytes": memory.megabytes[-1], "slope": slope}


def main() -> None:
    """Print the table; each federation has a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[100, 10_000])
    parser.add_argument("--rounds", type=int, default=200)
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
        [f"{n:,}", f"{1e3 * r['seconds']:.1f}", f"{r['seconds'] / results[0]['seconds']:.2f}",
         f"{r['megabytes']:.0f}", f"{r['slope']:+.3f}"]
        for n, r in zip(args.clients, results, strict=True)
    ]  # fmt: skip
    headers = ["clients", "ms / round", "ratio", "MB at the end", "MB / round"]
    print(tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
