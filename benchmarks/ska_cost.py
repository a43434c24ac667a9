"""What SKA's second model costs: CPU-seconds of a round against FedAvg with private necks and heads.

Both train the same clients on the same augmented batches in one process, in turn, so both see the same machine. SKA
does everything twice but drawing and augmenting the batches. A round's CPU-seconds are those between its callbacks, of
one thread; a fit's first round, which makes buffers, does not count. The least of all rounds is compared: whatever else
runs on the machine only adds to them.

    python benchmarks/ska_cost.py                # exits with 1 if a second model costs more than 2.05 times
"""

from __future__ import annotations

import argparse
import functools
import logging
import sys
import time
import warnings
from collections.abc import Callable

import torch
from lightning import Callback, LightningModule, Trainer
from tabulate import tabulate
from torch import nn

from fedsim.data import Augmentation, FederatedDataModule, SyntheticReID
from fedsim.evaluation.settings import Evaluation
from fedsim.federation.federation import Federation
from fedsim.methods import SKA, FedAvg
from fedsim.methods.base import Method
from fedsim.models import Neck, ResNet, SmallCNN
from fedsim.training.settings import LocalTraining
from overhead import run_federation

LIMIT = 2.05
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "SmallCNN": SmallCNN,
    "ResNet-18": functools.partial(ResNet, depth=18),
}
METHODS: dict[str, Method] = {
    "FedAvg+D": FedAvg(share_head=False, share_neck=False, weighting="uniform"),
    "LSN": SKA(dual=False, unseen="concat"),
    "LSN+Dual": SKA(),
}


class RoundClock(Callback):
    """Notes the CPU-seconds of each round."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self.start = time.process_time()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Read the clock."""
        self.seconds.append(time.process_time() - self.start)


def seconds_of(method: Method, backbone: nn.Module, rounds: int) -> float:
    """CPU-seconds of a round: the least of a fit."""
    optimizer = functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9, nesterov=True, weight_decay=5e-4)
    model = Federation(
        method, backbone, Neck(dim=512, activation="leaky_relu"),
        client=LocalTraining(batch_size=32, optimizer=optimizer, head_lr=0.1),
        evaluation=Evaluation(test_during_fit=False),
    )  # fmt: skip
    data = FederatedDataModule(
        SyntheticReID(clients=2, unseen=0), val="none", size=(64, 32), augmentation=Augmentation(pad=4, flip=0.5)
    )
    clock = RoundClock()
    run_federation(model, data, rounds + 1, [clock])
    return min(clock.seconds[1:])


def main() -> int:
    """Print a line for each network and method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fits", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    args = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows, worst = [], 0.0
    for name in args.networks:
        seconds: dict[str, list[float]] = {method: [] for method in METHODS}
        for _ in range(args.fits):
            for method, settings in METHODS.items():
                torch.manual_seed(0)
                seconds[method].append(seconds_of(settings, NETWORKS[name](), args.rounds))
        for method, of_method in seconds.items():
            ratio = min(of_method) / min(seconds["FedAvg+D"])
            rows.append([name, method, f"{min(of_method):.2f}", f"{ratio:.2f}"])
            worst = max(worst, ratio)
    headers = ["network", "method", "CPU-s / round", "ratio"]
    print(tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True))
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
