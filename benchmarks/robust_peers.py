"""Robust rules and attacks beside byzfl's functions, on the same drawn uploads: the largest relative differences.

    pip install --target FOLDER byzfl
    PYTHONPATH=FOLDER python benchmarks/robust_peers.py

byzfl computes in float64, of fedsim's float32 uploads. Both get what the other draws or states otherwise: byzfl's
buckets are those that fedsim draws; its ALIE has a factor for its other standard deviation, and minus for plus. Krum is
left out, as byzfl counts a neighbour more than the paper. It has neither Bulyan nor min-max nor min-sum.
"""

from __future__ import annotations

import argparse
import importlib
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from tabulate import tabulate
from torch import Tensor

from fedsim.federation.components import collusion, robust
from fedsim.training.uploads import Uploads

byzfl = importlib.import_module("byzfl")
Vector = Any  # an array of numpy, of float64
ORDERED = SimpleNamespace(permutation=lambda vectors: vectors)
"""random numbers with which byzfl leaves the order of vectors as it is"""


class Drawn:
    """Uploads of 5 to 15 clients, of which up to a third are far away, and a global model."""

    def __init__(self, number: int) -> None:
        generator = np.random.default_rng(number)
        count, size = generator.integers(5, 16), 200
        self.bad = int(generator.integers(0, (count - 1) // 3 + 1))
        self.start = generator.normal(size=size).astype(np.float32)
        rows = self.start + generator.normal(0.1, 1.0, (count, size))
        rows[: self.bad] += generator.normal(0, 30.0, (self.bad, 1))
        self.rows = rows.astype(np.float32)
        self.generator, self.count = generator, int(count)

    @property
    def uploads(self) -> Uploads:
        """The same for fedsim."""
        rows = torch.from_numpy(self.rows)
        return Uploads([str(i) for i in range(self.count)], rows.shape[1], lambda span: rows[:, span])

    def rule(self, rule: robust.Aggregation) -> Tensor:
        """Return the result of fedsim's rule."""
        server: Any = SimpleNamespace(vector=lambda _: torch.from_numpy(self.start), seed=0, round=0)
        return rule.aggregate(server, "arch", self.uploads, {})

    def lie(self, attack: collusion.Collusion) -> Tensor:
        """Return the lie of fedsim's attack."""
        return attack.lie(self.uploads, torch.from_numpy(self.start), collusion.Numbers(self.count, 1))


def median(drawn: Drawn, rows: Vector) -> tuple[Tensor, Vector]:
    """Compare medians."""
    return drawn.rule(robust.Median()), byzfl.Median()(rows)


def trimmed(drawn: Drawn, rows: Vector) -> tuple[Tensor, Vector]:
    """Compare trimmed means."""
    return drawn.rule(robust.TrimmedMean(drawn.bad / drawn.count)), byzfl.TrMean(drawn.bad)(rows)


def centre(drawn: Drawn, rows: Vector) -> tuple[Tensor, Vector]:
    """Compare clipped centres."""
    bound, steps = float(drawn.generator.uniform(1, 30)), int(drawn.generator.integers(1, 10))
    rule = byzfl.CenteredClipping(L=steps, tau=bound)
    rule.m = drawn.start.astype(np.float64)  # its constructor refuses every array
    return drawn.rule(robust.CentredClipping(bound, steps)), rule(rows)


def mixed(drawn: Drawn, rows: Vector) -> tuple[Tensor, Vector]:
    """Compare medians behind nearest-neighbour mixing."""
    rule = robust.NearestNeighbourMixing(robust.Median(), drawn.bad)
    return drawn.rule(rule), byzfl.Median()(byzfl.NNM(drawn.bad)(rows))


def buckets(drawn: Drawn, rows: Vector) -> tuple[Tensor, Vector]:
    """Compare medians of the same buckets."""
    seen: list[str] = []

    class Looks(robust.Median):
        def aggregate(self, server: Any, arch: str, uploads: Uploads, reports: Any) -> Tensor:
            seen.extend("+".join(uploads.clients).split("+"))
            return super().aggregate(server, arch, uploads, reports)

    size = int(drawn.generator.integers(1, 5))
    vector = drawn.rule(robust.Bucketing(Looks(), size))
    with mock.patch("byzfl.aggregators.preaggregators.random_tool", return_value=ORDERED):
        return vector, byzfl.Median()(byzfl.Bucketing(size)(rows[[int(name) for name in seen]]))


def alie(drawn: Drawn, rows: Vector) -> tuple[Tensor, Vector]:
    """Compare lies within the spread."""
    z = float(drawn.generator.uniform(0.1, 5))
    attack = byzfl.ALittleIsEnough(-z * math.sqrt((drawn.count - 1) / drawn.count))
    return drawn.lie(collusion.ALIE(z=z)), attack(rows)


def inner_product(drawn: Drawn, rows: Vector) -> tuple[Tensor, Vector]:
    """Compare turned updates."""
    epsilon = float(drawn.generator.uniform(0.1, 5))
    lie = drawn.start + byzfl.InnerProductManipulation(epsilon)(rows - drawn.start)
    return drawn.lie(collusion.InnerProduct(epsilon=epsilon)), lie


COMPARED: tuple[Callable[[Drawn, Vector], tuple[Tensor, Vector]], ...] = (
    median, trimmed, centre, mixed, buckets, alie, inner_product,
)  # fmt: skip


def main() -> None:
    """Compare, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--draws", type=int, default=200)
    args = parser.parse_args()
    table = []
    for compared in COMPARED:
        largest = 0.0
        for number in range(args.draws):
            drawn = Drawn(number)
            vector, expected = compared(drawn, drawn.rows.astype(np.float64))
            difference = np.abs(vector.double().numpy() - expected).max() / np.abs(expected).max()
            largest = max(largest, float(difference))
        table.append((compared.__name__, largest))
    print(tabulate(table, ["", f"largest relative difference of {args.draws}"], floatfmt=".1e"))


if __name__ == "__main__":
    main()
