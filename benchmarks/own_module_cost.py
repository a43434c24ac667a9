"""CPU time of sessions of a user's module over those of the same network and loss in fedsim's own parts.

Both train the same clients on batches of the same sizes, on one thread, each in a process of its own. They take turns,
round by round; the first round, which warms up, does not count. The trial before a run and the evaluations are no part
of the time.

    python benchmarks/own_module_cost.py --case small
    python benchmarks/own_module_cost.py --case resnet
    python benchmarks/own_module_cost.py --case small --profile module.prof
"""

from __future__ import annotations

import argparse
import cProfile
import functools
import gc
import logging
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from tabulate import tabulate
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedsim.cli.describe import FederatedTrainer
from fedsim.data import Augmentation, FederatedDataModule, SyntheticReID
from fedsim.evaluation.settings import Evaluation
from fedsim.federation.federation import Federation
from fedsim.methods import FedPav
from fedsim.models import Neck, ResNet, SmallCNN
from fedsim.models.reid import ReIDModel
from fedsim.strategy.strategy import FederatedStrategy
from fedsim.training.objective import Objective
from fedsim.training.settings import LocalTraining

NECK = Neck(kind="bnneck", dropout=0.0)
SMOOTHING = 0.1
KINDS = ("built in", "module")
MARK = "CPU-seconds"
"""begins the lines of a worker that count"""


@dataclass(frozen=True)
class Case:
    """A network, its images and its batches."""

    name: str
    backbone: Callable[[], nn.Module]
    size: tuple[int, int]
    batch_size: int
    clients: int
    scale: float
    """of the numbers of people and images"""
    optimizer: Callable[[Any], torch.optim.Optimizer]
    logs: bool = False
    """whether the module logs its loss and its accuracy, as fedsim's parts do"""


CASES = {
    "small": Case(
        "SmallCNN(width=24), 64 x 32, batches of 16: configs/quickstart.yaml", functools.partial(SmallCNN, width=24),
        (64, 32), 16, 6, 1.0, functools.partial(torch.optim.Adam, lr=0.001, weight_decay=5e-4),
    ),
    "resnet": Case(
        "ResNet-18, 128 x 64, batches of 32", functools.partial(ResNet, 18), (128, 64), 32, 2,
        0.4, functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    ),
}  # fmt: skip


class Parts(LightningModule):
    """fedsim's own network and loss, written as a module.

    Args:
        case: the workload.
        num_classes: identities of the client.
    """

    def __init__(self, case: Case, num_classes: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["case"])
        self.net = ReIDModel(case.backbone(), NECK)
        self.classifier = nn.Linear(self.net.num_features, num_classes)
        self.case = case

    def embed(self, images: Tensor) -> Tensor:
        """Return features [B, D] of images [B, 3, H, W]."""
        features: Tensor = self.net(images).neck
        return features

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss."""
        images, labels = batch
        logits = self.classifier(self.embed(images))
        loss = cross_entropy(logits, labels, label_smoothing=SMOOTHING)
        if self.case.logs:
            self.log("loss", loss)
            self.log("accuracy", (logits.argmax(1) == labels).float().mean())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the case's optimizer."""
        return self.case.optimizer(self.parameters())


class Turns(Callback):
    """Begins each round when a line comes in, and prints its CPU time."""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wait, and start the clock."""
        trainer.should_stop = not sys.stdin.readline()
        self._start = time.process_time()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the clock."""
        print(MARK, time.process_time() - self._start, flush=True)


def train(case: Case, kind: str, callbacks: list[Callback], rounds: int = -1) -> None:
    """Train as ``module`` or as ``built in``."""
    client = LocalTraining(batch_size=case.batch_size, optimizer=case.optimizer, optimizer_state="reset")
    common: dict[str, Any] = {"client": client, "evaluation": Evaluation(test_during_fit=False)}
    if kind == "module":
        model = Federation(FedPav(), module=functools.partial(Parts, case), **common)
    else:
        objective = Objective(label_smoothing=SMOOTHING)
        model = Federation(FedPav(), case.backbone(), NECK, objective=objective, **common)
    source = SyntheticReID(clients=case.clients, unseen=1, scale=case.scale)
    augmentation = Augmentation(pad=4, flip=0.5, erase=0.5)
    data = FederatedDataModule(source, val="none", size=case.size, augmentation=augmentation)
    trainer = FederatedTrainer(
        accelerator="cpu", devices=1, strategy=FederatedStrategy(), max_epochs=rounds, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        use_distributed_sampler=False, limit_val_batches=0, callbacks=callbacks,
    )  # fmt: skip
    trainer.fit(model, datamodule=data)


class Worker:
    """A process that trains a round at a time.

    Args:
        kind: ``module`` or ``built in``.
        options: of this script.
    """

    def __init__(self, kind: str, options: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, *options, "--worker", kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def round(self) -> float:
        """Return the CPU-seconds of a round."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        line = next(line for line in self._process.stdout if line.startswith(MARK))
        return float(line.split()[1])

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


def compare(case: Case, rounds: int, options: Sequence[str]) -> list[str]:
    """Return a row of the table: both kinds train round by round, in turn."""
    workers = [Worker(kind, options) for kind in KINDS]
    try:
        pairs = [tuple(worker.round() for worker in workers) for _ in range(rounds + 1)][1:]
    finally:
        for worker in workers:
            worker.end()
    built_in, module = zip(*pairs, strict=True)
    ratios = sorted(b / a for a, b in pairs)
    numbers = (
        statistics.median(built_in), statistics.median(module), statistics.median(ratios), min(module) / min(built_in),
    )  # fmt: skip
    return [case.name, str(rounds), *(f"{number:.3f}" for number in numbers), f"{ratios[0]:.2f} to {ratios[-1]:.2f}"]


def main() -> None:
    """Print a table, or write a profile of a run of the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=[*CASES], default="small")
    parser.add_argument("--logs", action="store_true", help="the module logs its loss and its accuracy")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--profile", type=Path, help="profile three rounds of the module into this file")
    parser.add_argument("--worker", choices=KINDS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in ("lightning.pytorch", "fedsim"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    case = replace(CASES[args.case], logs=args.logs)
    if args.profile is not None:
        profile = cProfile.Profile(time.process_time)
        profile.runcall(train, case, "module", [], 3)
        profile.dump_stats(args.profile)
    elif args.worker is not None:
        gc.freeze()  # as fedsim fit does
        train(case, args.worker, [Turns()])
    else:
        options = ["--case", args.case, *(["--logs"] if args.logs else [])]
        headers = ["work", "rounds", "built in, s / round", "module", "median ratio", "fastest", "single rounds"]
        row = compare(case, args.rounds, options)
        print(tabulate([row], headers, tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
