"""CPU-seconds of robust rules on one rank, and on each of two, which are processes that sum by gloo.

Twenty clients have sent vectors of random numbers. Each rank holds those of half of the clients. A process has one
thread. The results of all ranks must have the bits of the single rank.

    python benchmarks/rules_on_ranks.py --numbers 6400000
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tabulate import tabulate
from torch import Tensor

from fedsim.core.seeding import torch_generator
from fedsim.federation.aggregation.gathered import gather
from fedsim.federation.components.robust import Aggregation, GeometricMedian, Krum, Median, TrimmedMean
from fedsim.training.messages import Report, Upload

CLIENTS = [f"client{number}" for number in range(20)]
RULES: dict[str, Aggregation] = {
    "median": Median(), "trimmed mean": TrimmedMean(), "Krum": Krum(bad=4), "geometric median": GeometricMedian(),
}  # fmt: skip


@dataclass(frozen=True)
class Ranks:
    """A strategy, and a server, as far as a rule knows them."""

    global_rank: int
    world_size: int
    start: Tensor

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sum over all ranks in place."""
        dist.all_reduce(tensor)
        return tensor

    def vector(self, _: str) -> Tensor:
        """Return the global model."""
        return self.start


def on_a_rank(rank: int, ranks: int, folder: str, numbers: int) -> None:
    """Write, for each rule, CPU-seconds and a hash of the result."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    strategy: Any = Ranks(rank, ranks, torch.zeros(numbers))
    names = CLIENTS[rank::ranks]
    waiting = {name: Upload(torch.randn(numbers, generator=torch_generator(0, name))) for name in names}
    reports, lines = {name: Report(1, {}) for name in CLIENTS}, []
    for name, rule in RULES.items():
        dist.barrier()
        before = time.process_time()
        uploads = gather(waiting, CLIENTS, numbers, torch.device("cpu"), strategy)
        result = rule.aggregate(strategy, "", uploads, reports)
        seconds = time.process_time() - before
        lines.append(f"{name}\t{seconds:.1f}\t{hashlib.sha256(result.numpy().tobytes()).hexdigest()}")
    Path(folder, f"{rank}.txt").write_text("\n".join(lines))
    dist.destroy_process_group()


def main() -> None:
    """Run one rank, then two, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--numbers", type=int, default=6_400_000, help="in each upload")
    args = parser.parse_args()
    columns: list[list[list[str]]] = []
    for ranks in (1, 2):
        with tempfile.TemporaryDirectory(prefix="fedsim-rules-") as folder:
            mp.spawn(on_a_rank, args=(ranks, folder, args.numbers), nprocs=ranks)
            for rank in range(ranks):
                lines = Path(folder, f"{rank}.txt").read_text().splitlines()
                columns.append([line.split("\t") for line in lines])
    rows = [
        [name, *(column[row][1] for column in columns), len({column[row][2] for column in columns}) == 1]
        for row, name in enumerate(RULES)
    ]
    headers = ["rule", "one rank", "rank 0 of two", "rank 1 of two", "equal bits"]
    print(tabulate(rows, headers, tablefmt="github"))


if __name__ == "__main__":
    main()
