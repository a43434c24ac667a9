"""What every engine shares: the work files, the three networks, the clock and the report. Needs torch and NumPy only.

A network takes raw images, uint8 [B, 3, 32, 32], so that every engine moves the same bytes and normalises in the same
place. Shapes: N images, R rounds, S clients a round, n images of a client, B images of a batch.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLIENTS = {"cnn": 100, "linear": 100, "cifar": 1000}
SELECTED = {"cnn": 10, "linear": 10, "cifar": 50}
"""clients of a round"""
IMAGES = 50
CLASSES = 10
BATCH = 10
LR = {"cnn": 0.05, "linear": 0.05, "cifar": 0.1}
ROUNDS = {"cnn": 13, "linear": 61, "cifar": 30}
"""communication rounds of a run; the first is a warm-up"""
COLOURS_LAST = ("cifar",)
"""models whose images have the colours last in memory, as pfl-research's script has them"""
CHECKED = 3
"""rounds after which the losses of all engines are compared"""
COMPARED = 5000
"""images on which they are compared, the first ones"""
WIDTH = {"cnn": 128, "linear": 3072, "cifar": 128}
"""features that enter the last layer"""


# -- networks ----------------------------------------------------------------------------------------------------------


class Normalise(nn.Module):
    """ImageNet's mean and standard deviation, with the arithmetic of ``fedsim.data.augmentation``.

    Args:
        channels_last: the order of the result in memory.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, channels_last: bool = False) -> None:
        super().__init__()
        self.order = torch.channels_last if channels_last else torch.contiguous_format
        mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
        self.register_buffer("mean", mean.view(1, 3, 1, 1), persistent=False)  # so that no engine sends it
        self.register_buffer("std", std.view(1, 3, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Map uint8 [B, 3, H, W] to float32."""
        normalised: Tensor = (images.to(torch.float32) / 255.0 - self.mean) / self.std
        return normalised.contiguous(memory_format=self.order)


def body(model: str) -> nn.Sequential:
    """Return the layers before the last: normalised images [B, 3, 32, 32] to features [B, WIDTH[model]]."""
    if model == "linear":
        return nn.Sequential(nn.Flatten())
    if model == "cifar":  # as pfl-research's benchmark has it, without its change of the order of dimensions
        return nn.Sequential(
            nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25),
            nn.Flatten(), nn.Linear(12544, 128), nn.ReLU(), nn.Dropout(0.5),
        )  # fmt: skip
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(4096, 128), nn.ReLU(),
    )  # fmt: skip


def network(model: str) -> nn.Sequential:
    """Return a whole network: ``cnn`` with 545,098 parameters, ``linear`` with 30,730, ``cifar`` with 1,626,442."""
    last = nn.Linear(WIDTH[model], CLASSES)
    return nn.Sequential(OrderedDict(normalise=Normalise(model in COLOURS_LAST), backbone=body(model), head=last))


@lru_cache
def shared_network(model: str) -> nn.Sequential:
    """Return this process's only network of a kind, for engines whose clients would otherwise build one per session."""
    return network(model)


# -- work --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """Everything that decides the numbers of a model's runs, as ``make_work.py`` wrote it."""

    images: Tensor
    """[N, 3, 32, 32] uint8; client k holds images k * n to (k + 1) * n - 1"""
    labels: Tensor
    """[N] int64"""
    selected: list[list[int]]
    """[R][S] clients of each round"""
    orders: Tensor
    """[R, S, n] int64: each selected client's images in the order in which it trains on them"""
    seeds: list[list[int]]
    """[R][S] seeds of torch's global random stream, for the dropout of each session"""
    weights: dict[str, Tensor]
    """tensor name -> initial value"""

    def session(self, round_: int, client: int) -> tuple[Tensor, Tensor]:
        """Return a client's images [n, 3, 32, 32] and labels [n] in the order of its batches."""
        index = self.index(round_, client)
        return self.images[index], self.labels[index]

    def index(self, round_: int, client: int) -> Tensor:
        """Return the places [n] of a client's images in the order of its batches."""
        return client * IMAGES + self.orders[round_, self.selected[round_].index(client)]

    def seed_dropout(self, round_: int, client: int) -> None:
        """Begin a session's stream of random numbers, of which only dropout takes some."""
        torch.default_generator.manual_seed(self.seeds[round_][self.selected[round_].index(client)])

    def batches(self, round_: int, client: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Return the batches of one session: images [B, 3, 32, 32] and labels [B]."""
        images, labels = self.session(round_, client)
        return zip(images.split(BATCH), labels.split(BATCH), strict=True)

    def start(self, model: str) -> nn.Sequential:
        """Return a network with the initial weights."""
        net = network(model)
        net.load_state_dict(self.weights)
        return net


@lru_cache
def load_work(path: Path) -> Work:
    """Read the work file, once per process."""
    with np.load(path) as file:
        arrays = {name: torch.from_numpy(file[name]) for name in file.files}
    weights = {key.partition("/")[2]: arrays.pop(key) for key in list(arrays) if "/" in key}
    selected, seeds = arrays["selected"].tolist(), arrays["seeds"].tolist()
    return Work(arrays["images"], arrays["labels"].long(), selected, arrays["orders"].long(), seeds, weights)


def train(net: nn.Module, batches: Iterator[tuple[Tensor, Tensor]], lr: float) -> None:
    """One local epoch, for engines that leave this loop to their users."""
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    for images, labels in batches:
        optimizer.zero_grad()
        F.cross_entropy(net(images), labels).backward()
        optimizer.step()


@torch.no_grad()
def mean_loss(work: Work, model: str, weights: Mapping[str, Tensor]) -> float:
    """Return the mean cross-entropy over the first COMPARED images."""
    net = network(model).eval()
    net.load_state_dict(weights)
    images, labels = work.images[:COMPARED], work.labels[:COMPARED]
    parts = zip(images.split(IMAGES), labels.split(IMAGES), strict=True)
    total = sum(F.cross_entropy(net(x), y, reduction="sum").double() for x, y in parts)
    return float(total) / len(labels)


# -- runs --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """What ``run.py`` asks an engine to do."""

    work: Path
    model: str
    workers: int
    result: Path

    @property
    def rounds(self) -> int:
        """Number of communication rounds."""
        return ROUNDS[self.model]


def parse_job() -> Job:
    """Read the command line that all engines have in common, and limit torch to one thread."""
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=Path, required=True, help="the model's file, written by make_work.py")
    parser.add_argument("--model", choices=list(ROUNDS), required=True)
    parser.add_argument("--workers", type=int, default=1, help="processes that train clients")
    parser.add_argument("--result", type=Path, required=True, help="JSON file to write")
    return Job(**vars(parser.parse_args()))


@dataclass
class Clock:
    """Times of the rounds, and the global model after round CHECKED. Costs one copy of the weights in the whole run."""

    ends: list[float] = field(default_factory=list)
    """end of each round, seconds of the machine's monotonic clock"""
    weights: dict[str, Tensor] | None = None

    def tick(self, weights: Mapping[str, Tensor]) -> None:
        """Note that a round has ended with this global model."""
        self.ends.append(time.monotonic())
        if len(self.ends) == CHECKED:
            self.weights = copy.deepcopy({name: tensor.detach() for name, tensor in weights.items()})

    def report(self, job: Job, package: str) -> None:
        """Write the result file.

        Args:
            job: what was asked for.
            package: the distribution whose version is reported.
        """
        assert self.weights is not None, "fewer rounds than CHECKED"
        loss = mean_loss(load_work(job.work), job.model, self.weights)
        result = {"ends": self.ends, "loss": loss, "version": version(package), "torch": torch.__version__}
        job.result.write_text(json.dumps(result))
