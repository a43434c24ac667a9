"""What the engine costs: fedsim against a hand-written loop that does the same work, round by round in one process.

Federated averaging of a whole network over ten clients, one local epoch each. The hand-written loop keeps one model and
one dictionary of tensors, as most papers' code does: load the state, make an optimizer, train, add up tensor by tensor.
Rounds of the two alternate, so both see the same machine; a round of fedsim is everything between two rounds of the
loop, Lightning's part included. With plain float32 sums both must end in the same bits.

    python benchmarks/overhead.py                # the table
    python benchmarks/overhead.py --ranks        # two ranks against one
    python benchmarks/overhead.py --memory       # peak memory, each in a process of its own
    python benchmarks/overhead.py --floor        # the linear model without any engine: what no engine can go below
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import os
import resource
import statistics
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from lightning import Callback, LightningModule, Trainer
from numpy.typing import NDArray
from tabulate import tabulate
from torch import Tensor, nn

from fedsim.cli.describe import FederatedTrainer
from fedsim.core.seeding import torch_generator
from fedsim.data.augmentation import Augmentation
from fedsim.data.batches import shuffled_batches
from fedsim.data.datamodule import FederatedDataModule
from fedsim.data.images import Domain, Images, ReIDSource, Split
from fedsim.evaluation.settings import Evaluation
from fedsim.federation.federation import Federation
from fedsim.functional.normalise import normalise_images
from fedsim.methods import FedAvg
from fedsim.models import Neck
from fedsim.strategy.strategy import FederatedStrategy
from fedsim.training.settings import LocalTraining

LR = 0.05
CLASSES = 10


@dataclass(frozen=True)
class Case:
    """A workload."""

    name: str
    hidden: tuple[str, ...]
    """layers before the classifier: ``cnn``, ``mlp`` or nothing"""
    size: tuple[int, int]
    batch_size: int
    clients: int = 10
    batches: int = 5


CASES = {
    "mlp": Case("tiny MLP, batches of 4", ("mlp",), (4, 4), 4, batches=20),
    "cnn": Case("CNN, 545k parameters, batches of 10", ("cnn",), (32, 32), 10),
    "linear": Case("linear, 31k parameters, batches of 10", (), (32, 32), 10),
}


class Body(nn.Sequential):
    """Everything before the classifier."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        inputs = 3 * case.size[0] * case.size[1]
        if case.hidden == ("cnn",):
            super().__init__(
                nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
                nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
                nn.Flatten(), nn.Linear(4096, 128), nn.ReLU(),
            )  # fmt: skip
            self.out_channels = 128
        elif case.hidden == ("mlp",):
            super().__init__(nn.Flatten(), nn.Linear(inputs, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
            self.out_channels = 32
        else:
            super().__init__(nn.Flatten())
            self.out_channels = inputs


class Pixels(Images):
    """Random images in memory."""

    def __init__(self, pixels: Tensor) -> None:
        self.pixels = pixels

    def __len__(self) -> int:
        """Return their number."""
        return len(self.pixels)

    def take(self, index: NDArray[np.int64]) -> Images:
        """Return some of them."""
        return Pixels(self.pixels[torch.from_numpy(index)])

    def is_decoded(self, size: tuple[int, int]) -> bool:
        """They are in memory."""
        return True

    def decode(self, size: tuple[int, int]) -> Tensor:
        """Return them as they are."""
        return self.pixels


class RandomClients(ReIDSource):
    """Clients with random images of ten classes.

    Args:
        case: says how many of which size.
    """

    def __init__(self, case: Case) -> None:
        self.case = case

    def domains(self) -> list[Domain]:
        """One domain per client, no test sets."""
        n = self.case.batch_size * self.case.batches
        return [self._domain(f"client{k}", n, torch.Generator().manual_seed(k)) for k in range(self.case.clients)]

    def _domain(self, name: str, n: int, generator: torch.Generator) -> Domain:
        pixels = torch.randint(0, 256, (n, 3, *self.case.size), generator=generator, dtype=torch.uint8)
        pids = np.arange(n, dtype=np.int64) % CLASSES
        split = Split(Pixels(pixels), pids, np.zeros(n, dtype=np.int64))
        return Domain(name, split, split, split)


def make_federation(case: Case, reduction: str = "fp32") -> tuple[Federation, Any]:
    """Return fedsim's side of the comparison."""
    training = LocalTraining(batch_size=case.batch_size, optimizer=functools.partial(torch.optim.SGD, lr=LR))
    model = Federation(
        FedAvg(share_head=True),
        Body(case),
        Neck(kind="none", dropout=0.0),
        client=training,
        reduction=reduction,  # type: ignore[arg-type] # one of the choices of the option
        evaluation=Evaluation(test_during_fit=False),
    )
    augmentation = Augmentation(pad=0, flip=0.0)
    data = FederatedDataModule(RandomClients(case), val="none", size=case.size, augmentation=augmentation)
    return model, data


def run_federation(model: Federation, data: Any, rounds: int, callbacks: list[Callback], devices: int = 1) -> None:
    """Train without evaluation, loggers and checkpoints."""
    trainer = FederatedTrainer(
        accelerator="cpu", devices=devices, strategy=FederatedStrategy(), max_epochs=rounds, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        use_distributed_sampler=False, limit_val_batches=0, callbacks=callbacks,
    )  # fmt: skip
    trainer.fit(model, datamodule=data)


class Net(nn.Module):
    """The same network, written down plainly."""

    def __init__(self, body: nn.Module, features: int) -> None:
        super().__init__()
        self.body = body
        self.head = nn.Linear(features, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits."""
        logits: Tensor = self.head(self.body(images))
        return logits


class PlainLoop:
    """Federated averaging by hand.

    Args:
        case: the workload.
        start: initial weights by name.
    """

    def __init__(self, case: Case, start: dict[str, Tensor]) -> None:
        self.case = case
        self.net = Net(Body(case), Body(case).out_channels)
        self.net.load_state_dict(start)
        self.weights = {name: tensor.clone() for name, tensor in self.net.state_dict().items()}
        self.clients = []
        for domain in RandomClients(case).domains():
            assert domain.train is not None
            images, labels = domain.train.images.decode(case.size), torch.from_numpy(domain.train.pids)
            self.clients.append((domain.name, images, labels))
        self.loss = 0.0

    def round(self, t: int) -> None:
        """One communication round."""
        total = {name: torch.zeros_like(tensor) for name, tensor in self.weights.items()}
        n = sum(len(labels) for _, _, labels in self.clients)
        losses = correct = 0.0
        for name, images, labels in self.clients:
            self.net.load_state_dict(self.weights)
            optimizer = torch.optim.SGD(self.net.parameters(), lr=LR)
            self.net.train()
            for index in shuffled_batches(len(labels), self.case.batch_size, torch_generator(0, t, name, "batches")):
                x, y = normalise_images(images[index]), labels[index]
                logits = self.net(x)
                loss = F.cross_entropy(logits, y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses += loss.item() * len(y)
                correct += (logits.argmax(1) == y).sum().item()
            for key, tensor in self.net.state_dict().items():
                total[key].add_(tensor, alpha=len(labels) / n)
        self.weights = total
        self.loss = losses / n


class FlatLoop(PlainLoop):
    """The linear model in as few calls as possible: flat weights and gradients, no module, no optimizer, no waiting.

    Nothing is left that an engine could leave out, so its time is the least that the plain loop can be brought down to.

    Args:
        case: a workload without hidden layers.
        start: initial weights by name.
    """

    def __init__(self, case: Case, start: dict[str, Tensor]) -> None:
        super().__init__(case, start)
        self.vector = torch.cat([tensor.flatten() for tensor in start.values()])
        self.local, self.gradient = self.vector.clone(), torch.zeros_like(self.vector)
        self.head = self.net.head
        sizes = [p.numel() for p in self.head.parameters()]
        parts = zip(self.head.parameters(), self.local.split(sizes), self.gradient.split(sizes), strict=True)
        for parameter, values, gradient in parts:
            parameter.data, parameter.grad = values.view_as(parameter), gradient.view_as(parameter)

    def round(self, t: int) -> None:
        """One communication round."""
        total = torch.zeros_like(self.vector)
        n = sum(len(labels) for _, _, labels in self.clients)
        losses, hits = [], []
        for name, images, labels in self.clients:
            self.local.copy_(self.vector)
            for index in shuffled_batches(len(labels), self.case.batch_size, torch_generator(0, t, name, "batches")):
                x, y = normalise_images(images[index]), labels[index]
                logits = F.linear(x.flatten(1), self.head.weight, self.head.bias)
                loss = F.cross_entropy(logits, y)
                loss.backward()
                self.local.add_(self.gradient, alpha=-LR)
                self.gradient.zero_()
                losses.append(loss.detach() * len(y))
                hits.append((logits.detach().argmax(1) == y).sum())
            total.add_(self.local, alpha=len(labels) / n)
        self.vector = total
        self.loss = torch.stack(losses).sum().item() / n
        torch.stack(hits).sum().item()


class Alternate(Callback):
    """Runs a round of the plain loop after each of fedsim's, and times both.

    Args:
        loop: the plain loop.
        warm_up: rounds that do not count.
    """

    def __init__(self, loop: PlainLoop, warm_up: int = 3) -> None:
        self.loop = loop
        self.warm_up = warm_up
        self.times: list[tuple[float, ...]] = []  # wall and CPU of fedsim, of the loop

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self.mark = _now()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop it, run the other round, start it again."""
        ours = _now()
        self.loop.round(trainer.current_epoch)
        theirs = _now()
        if trainer.current_epoch >= self.warm_up:
            self.times.append(
                (ours[0] - self.mark[0], ours[1] - self.mark[1], theirs[0] - ours[0], theirs[1] - ours[1])
            )
        self.mark = _now()

    def medians(self) -> tuple[float, float, float, float]:
        """Seconds of a round: fedsim wall, fedsim CPU, loop wall, loop CPU."""
        wall, cpu, loop_wall, loop_cpu = (statistics.median(column) for column in zip(*self.times, strict=True))
        return wall, cpu, loop_wall, loop_cpu


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def start_weights(model: Federation) -> dict[str, Tensor]:
    """Return the initial global model by the names of :class:`Net`."""
    (flat_model,) = model.parts.models.values()
    vector = model.state_dict()[f"server.vectors.{flat_model.arch}"]
    names = {e.name: vector[e.span].view(e.shape).clone() for e in flat_model.flat.shared_entries}
    return {name.replace("backbone.", "body."): tensor for name, tensor in names.items()}


def compare(case: Case, rounds: int, reduction: str) -> list[Any]:
    """Return one line of the table."""
    torch.set_num_threads(1)
    model, data = make_federation(case, reduction)
    model.assemble(data, 0, 1, torch.device("cpu"))
    alternate = Alternate(PlainLoop(case, start_weights(model)))
    run_federation(model, data, rounds, [alternate])
    equal = all(torch.equal(tensor, alternate.loop.weights[name]) for name, tensor in start_weights(model).items())
    wall, cpu, loop_wall, loop_cpu = alternate.medians()
    per_batch = 1e6 * (cpu - loop_cpu) / (case.clients * case.batches)
    return [case.name, reduction, f"{1e3 * wall:.2f}", f"{1e3 * loop_wall:.2f}", f"{wall / loop_wall:.3f}",
            f"{cpu / loop_cpu:.3f}", f"{per_batch:+.1f}", "yes" if equal else "no"]  # fmt: skip


def compare_floor(rounds: int) -> str:
    """Alternate the plain loop and the flat one on the linear model; both end in the same bits."""
    torch.set_num_threads(1)
    model, data = make_federation(CASES["linear"])
    model.assemble(data, 0, 1, torch.device("cpu"))
    start = start_weights(model)
    loops = (PlainLoop(CASES["linear"], start), FlatLoop(CASES["linear"], start))
    times: tuple[list[float], list[float]] = ([], [])
    for t in range(rounds):
        for loop, seconds in zip(loops, times, strict=True):
            begin = time.perf_counter()
            loop.round(t)
            seconds.append(time.perf_counter() - begin)
    plain, flat = (statistics.median(seconds[3:]) for seconds in times)
    equal = torch.equal(torch.cat([w.flatten() for w in loops[0].weights.values()]), loops[1].vector)
    return tabulate([[CASES["linear"].name, f"{1e3 * flat:.2f}", f"{1e3 * plain:.2f}", f"{flat / plain:.3f}",
                      "yes" if equal else "no"]],
                    headers=["work", "no engine, ms", "by hand, ms", "ratio", "same bits"],
                    tablefmt="github")  # fmt: skip


class Clock(Callback):
    """Notes when rounds end."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look at the clock."""
        self.ends.append(time.perf_counter())

    def median(self) -> float:
        """Seconds of a round, without the first five."""
        return float(np.median(np.diff(self.ends[5:])))


def run_alone(case: Case, engine: str, rounds: int, devices: int) -> None:
    """Run fedsim or the plain loop by itself; print seconds of a round and peak megabytes."""
    torch.set_num_threads(1)
    clock = Clock()
    model, data = make_federation(case)
    if engine == "fedsim":
        run_federation(model, data, rounds, [clock], devices)
    else:
        model.assemble(data, 0, 1, torch.device("cpu"))
        loop = PlainLoop(case, start_weights(model))
        del model, data
        for t in range(rounds):
            loop.round(t)
            clock.ends.append(time.perf_counter())
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        megabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
        print(json.dumps({"seconds": clock.median(), "megabytes": megabytes}))


def in_a_process(*args: str) -> dict[str, float]:
    """Call this script again and return what :func:`run_alone` printed."""
    command = [sys.executable, __file__, *args]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    result: dict[str, float] = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
    return result


def compare_ranks(rounds: int, repeats: int) -> str:
    """Time the CNN on one rank and on two, in turns."""
    seconds: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(repeats):
        for devices, values in seconds.items():
            values.append(in_a_process("--alone", "fedsim", "--case", "cnn", "--rounds", str(rounds),
                                       "--devices", str(devices))["seconds"])  # fmt: skip
    on_one, on_two = (statistics.median(values) for values in seconds.values())
    return tabulate([[CASES["cnn"].name, f"{1e3 * on_one:.1f}", f"{1e3 * on_two:.1f}", f"{on_two / on_one:.3f}"]],
                    headers=["work", "1 rank, ms", "2 ranks, ms", "ratio"], tablefmt="github")  # fmt: skip


def compare_memory(rounds: int) -> str:
    """Peak memory of fedsim and of the plain loop, each in a process with the same imports."""
    rows = []
    for key, case in CASES.items():
        measured = {w: in_a_process("--alone", w, "--case", key, "--rounds", str(rounds)) for w in ("fedsim", "loop")}
        ours, theirs = (measured[engine]["megabytes"] for engine in ("fedsim", "loop"))
        rows.append([case.name, f"{ours:.0f}", f"{theirs:.0f}", f"{ours / theirs:.3f}"])
    return tabulate(rows, headers=["work", "fedsim MB", "by hand MB", "ratio"], tablefmt="github")


def main() -> None:
    """Print tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=33)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--case", choices=[*CASES, "all"], default="all")
    parser.add_argument("--ranks", action="store_true")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--floor", action="store_true")
    parser.add_argument("--alone", choices=["fedsim", "loop"], help=argparse.SUPPRESS)
    parser.add_argument("--devices", type=int, default=1, help=argparse.SUPPRESS)
    args = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    if args.alone:
        run_alone(CASES[args.case], args.alone, args.rounds, args.devices)
    elif args.ranks:
        print(compare_ranks(args.rounds, args.repeats))
    elif args.floor:
        print(compare_floor(args.rounds))
    elif args.memory:
        print(compare_memory(args.rounds))
    else:
        rows = [
            compare(case, args.rounds, reduction)
            for key, case in CASES.items()
            if args.case in ("all", key)
            for reduction in ("fp32", "exact")
        ]
        headers = ["work", "fedsim", "ms / round", "by hand", "wall", "CPU", "us / batch", "same bits"]
        print(tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
