"""CPU time of sessions of a user's module over those of the same network and loss in fedsim's own parts.

Both train the same clients on the same batches, on one thread. Runs of a few rounds alternate, and each run's first
round, which warms up, does not count. The trial before a run and the evaluations are no part of the time.

    python benchmarks/own_module_cost.py --case small
    python benchmarks/own_module_cost.py --case resnet
    python benchmarks/own_module_cost.py --case small --profile module.prof
"""

from __future__ import annotations

import argparse
import cProfile
import functools
import logging
import statistics
import time
import warnings
from collections.abc import Callable
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
    rounds: int
    """of a run, with the one that warms up"""
    logs: bool = False
    """whether the module logs its loss and its accuracy, as fedsim's parts do"""


CASES = {
    "small": Case(
        "SmallCNN(width=24), 64 x 32, batches of 16: configs/quickstart.yaml", functools.partial(SmallCNN, width=24),
        (64, 32), 16, 6, 1.0, functools.partial(torch.optim.Adam, lr=0.001, weight_decay=5e-4), 4,
    ),
    "resnet": Case(
        "ResNet-18, 128 x 64, batches of 32", functools.partial(ResNet, 18), (128, 64), 32, 2,
        0.4, functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9), 2,
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


class Clock(Callback):
    """Notes the CPU time of each round after the first one."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start."""
        self._start = time.process_time()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop."""
        if trainer.current_epoch > 0:
            self.seconds.append(time.process_time() - self._start)


def run(case: Case, kind: str) -> list[float]:
    """Train as ``module`` or ``built in``; return CPU-seconds of each round but the first."""
    client = LocalTraining(batch_size=case.batch_size, optimizer=case.optimizer, optimizer_state="reset")
    common: dict[str, Any] = {"client": client, "evaluation": Evaluation(test_during_fit=False)}
    if kind == "module":
        model = Federation(FedPav(), functools.partial(Parts, case), **common)
    else:
        objective = Objective(label_smoothing=SMOOTHING)
        model = Federation(FedPav(), case.backbone(), NECK, objective=objective, **common)
    source = SyntheticReID(clients=case.clients, unseen=1, scale=case.scale)
    augmentation = Augmentation(pad=4, flip=0.5, erase=0.5)
    data = FederatedDataModule(source, val="none", size=case.size, augmentation=augmentation)
    clock = Clock()
    trainer = FederatedTrainer(
        accelerator="cpu", devices=1, strategy=FederatedStrategy(), max_epochs=case.rounds, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        use_distributed_sampler=False, limit_val_batches=0, callbacks=[clock],
    )  # fmt: skip
    trainer.fit(model, datamodule=data)
    return clock.seconds


def compare(case: Case, repeats: int) -> list[str]:
    """Return a row of the table: runs of both kinds in turn."""
    seconds: dict[str, list[list[float]]] = {"built in": [], "module": []}
    for number in range(repeats):
        kinds = [*seconds] if number % 2 == 0 else [*reversed(seconds)]
        for kind in kinds:
            seconds[kind].append(run(case, kind))
    built_in, module = ([number for one in runs for number in one] for runs in seconds.values())
    pairs = [sum(b) / sum(a) for a, b in zip(*seconds.values(), strict=True)]
    return [
        case.name, str(repeats), f"{statistics.median(built_in):.3f}", f"{statistics.median(module):.3f}",
        f"{statistics.median(module) / statistics.median(built_in):.3f}", f"{min(module) / min(built_in):.3f}",
        f"{min(pairs):.2f} to {max(pairs):.2f}",
    ]  # fmt: skip


def main() -> None:
    """Print a table, or write a profile of a run of the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=[*CASES], default="small")
    parser.add_argument("--logs", action="store_true", help="the module logs its loss and its accuracy")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--profile", type=Path, help="profile a run of the module into this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in ("lightning.pytorch", "fedsim"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    case = replace(CASES[args.case], logs=args.logs)
    if args.profile is not None:
        profile = cProfile.Profile(time.process_time)
        profile.runcall(run, case, "module")
        profile.dump_stats(args.profile)
        return
    headers = ["work", "repeats", "built in, s / round", "module", "medians", "fastest", "single repeats"]
    print(tabulate([compare(case, args.repeats)], headers, tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
