"""A million virtual clients on one machine: assembly, rounds and memory, against a federation of one hundred.

Every client has a head and batch-norm statistics of its own; a hundred train in each round. A client has labels of its
own, and the images of one of a hundred arrays, so that memory is that of fedsim. The assembly is what happens before
the first round, without imports. KB per client are the resident memory that it adds. A round is the median over all
rounds after the first fifth; the memory's slope is a least-squares line over these.

    python benchmarks/many_clients.py                                      # 100 to 1,000,000 clients, host memory
    python benchmarks/many_clients.py --store disk --clients 100 100000
    python benchmarks/many_clients.py --clients 100 10000 --rounds 200     # memory over many rounds
    python benchmarks/many_clients.py --rounds 12 --repeats 3 --python pfl=PATH   # beside pfl-research

With a Python that has pfl-research (``benchmarks/peers`` makes one), the same network, images and steps run there, too
(``many_clients_pfl.py``), in turns with fedsim. pfl's federated averaging keeps nothing of a user, so fedsim also runs
with everything averaged (``fedsim, shared``). pfl's users are made by a function of their number (``pfl``), or their
labels are held from the start, as those of fedsim's clients (``pfl, held``).
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import math
import statistics
import subprocess
import sys
import warnings
from collections.abc import Sequence
from itertools import product
from pathlib import Path
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
from fedsim.methods import FedAvg, FedPav
from fedsim.models import Neck, SmallCNN
from fedsim.training.settings import LocalTraining
from overhead import CLASSES, Case, Pixels, run_federation
from round_clock import RoundClock

HERE = Path(__file__).parent
PER_ROUND = 100
FEDSIM = ("fedsim", "fedsim, shared")
PFL = {"pfl": "function", "pfl, held": "held"}
"""engine -> how its users have their labels"""
RATIOS = {"assembly, CPU": "assembly", "assembly": "assembly_seconds", "round, CPU": "cpu", "round": "seconds",
          "peak memory": "peak"}  # fmt: skip
"""column -> figure"""
Result = dict[str, float]
Results = dict[tuple[str, int], list[Result]]
"""(engine, clients) -> one result per repeat"""


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


class Ticks(Callback):
    """Reports to a clock when rounds begin and end."""

    def __init__(self, clock: RoundClock) -> None:
        self.clock = clock

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The assembly is over."""
        self.clock.begin_rounds()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A round is over."""
        self.clock.end_round()


def measure(clients: int, rounds: int, store: StorePlace, is_shared: bool) -> dict[str, float]:
    """Train, and return the medians."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    case = Case("", (), (16, 8), 10, clients=clients, batches=2)
    training = LocalTraining(batch_size=10, optimizer=functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9))
    model = Federation(
        FedAvg() if is_shared else FedPav(), SmallCNN(width=4), Neck(kind="bnneck", dropout=0.0), client=training,
        bn_stats="mean" if is_shared else "local", selection=RandomFraction(PER_ROUND / clients), client_store=store,
        evaluation=Evaluation(test_during_fit=False),
    )  # fmt: skip
    clock = RoundClock()
    data = FederatedDataModule(Pool(case), val="none", size=case.size, augmentation=Augmentation(pad=0, flip=0.0))
    run_federation(model, data, rounds, [Ticks(clock)])
    [treatment] = model.parts.statistics.values()
    sizes = [math.prod(entry.shape) for entry in treatment.parameters]
    return clock.result(clients) | {"parameters": sum(sizes)}


# -- all runs ----------------------------------------------------------------------------------------------------------


def command(engine: str, clients: int, args: argparse.Namespace) -> list[str]:
    """Return the command of one run."""
    size = ["--clients", str(clients), "--rounds", str(args.rounds)]
    if engine in PFL:
        return [args.python["pfl"], str(HERE / "many_clients_pfl.py"), *size, "--users", PFL[engine]]
    return [sys.executable, __file__, "--child", engine, *size, "--store", args.store]


def run(engine: str, clients: int, args: argparse.Namespace) -> Result:
    """Run one federation in a process of its own."""
    done = subprocess.run(command(engine, clients, args), capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{engine}, {clients} clients: exit {done.returncode}\n{done.stderr}")
    result: Result = json.loads(done.stdout.splitlines()[-1])
    print(f"{engine}, {clients}: {result['assembly']:.1f} CPU-s, {1e3 * result['cpu']:.0f} ms", file=sys.stderr)
    return result


def cell(repeats: Sequence[Result], key: str, scale: float = 1.0, form: str = ".0f") -> str:
    """Return the median, and with several repeats the smallest and the largest."""
    return spread([scale * result[key] for result in repeats], form)


def spread(values: Sequence[float], form: str) -> str:
    """Return median, smallest and largest."""
    middle = format(statistics.median(values), form)
    return middle if len(values) == 1 else f"{middle} [{min(values):{form}}, {max(values):{form}}]"


def ratio(above: Sequence[Result], below: Sequence[Result], key: str) -> str:
    """Return the ratio of two runs of the same repeat; what takes less than a hundredth of a second has none."""
    pairs = list(zip(above, below, strict=True))
    if min(b[key] for _, b in pairs) < 0.01:
        return "-"
    return spread([a[key] / b[key] for a, b in pairs], ".2f")


def table(results: Results, engines: Sequence[str], numbers: Sequence[int]) -> str:
    """Return a row per engine and number of clients."""
    rows = [
        [engine, f"{n:,}", cell(repeats, "assembly", form=".1f"), cell(repeats, "assembly_seconds", form=".1f"),
         cell(repeats, "kb", form=".1f"), cell(repeats, "cpu", 1e3), ratio(repeats, results[engine, numbers[0]], "cpu"),
         cell(repeats, "seconds", 1e3), cell(repeats, "peak"), cell(repeats, "slope", form="+.3f")]
        for engine, n in product(engines, numbers) for repeats in [results[engine, n]]
    ]  # fmt: skip
    headers = ["engine", "clients", "assembly CPU-s", "assembly s", "KB / client", "CPU-ms / round", "ratio",
               "ms / round", "peak MB", "MB / round"]  # fmt: skip
    return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)


def comparison(results: Results, numbers: Sequence[int]) -> str:
    """Return fedsim's figures over pfl's, of the same repeat."""
    rows = [
        [f"{above} / {below}", f"{n:,}", *(ratio(results[above, n], results[below, n], key) for key in RATIOS.values())]
        for above, below in (("fedsim", "pfl"), ("fedsim, shared", "pfl"), ("fedsim, shared", "pfl, held"))
        for n in numbers
    ]
    return tabulate(rows, headers=["engines", "clients", *RATIOS], tablefmt="github", disable_numparse=True)


def main() -> None:
    """Print the table; each federation has a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[100, 10_000, 100_000, 1_000_000])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--store", choices=get_args(StorePlace), default="host")
    parser.add_argument("--python", type=named, metavar="pfl=PATH", help="a Python that has pfl-research 0.6")
    parser.add_argument("--child", choices=FEDSIM, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(args.clients[0], args.rounds, args.store, args.child != FEDSIM[0])))
        return
    engines = [*FEDSIM, *PFL] if args.python else FEDSIM[:1]
    results: Results = {}
    for _, clients, engine in product(range(args.repeats), args.clients, engines):
        results.setdefault((engine, clients), []).append(run(engine, clients, args))
    print(table(results, engines, args.clients))
    if args.python:
        print(f"\n{comparison(results, args.clients)}")
        sizes = {repeats[0]["parameters"] for (engine, _), repeats in results.items() if engine != FEDSIM[0]}
        if len(sizes) > 1:
            sys.exit(f"the engines averaged networks of different sizes: {sorted(sizes)} parameters")


def named(text: str) -> dict[str, str]:
    """Read ``pfl=PATH``."""
    engine, _, path = text.partition("=")
    if engine != "pfl" or not Path(path).is_file():
        raise argparse.ArgumentTypeError(f"{text!r} is not pfl=PATH, with the path of a Python")
    return {engine: path}


if __name__ == "__main__":
    main()
