"""Robust aggregation when a fifth of the clients lie: 3 seeds, all declared here before a run.

Ten clients of drawn people (configs/quickstart.yaml's network and optimizer, half of its images, batches of 8), two
unseen data sets, 8 rounds of one epoch, all clients in every round. Two clients, town3 and town8, send

- ``flipped``: the received model minus their update times SIZE;
- ``noise``: the received model plus Gaussian noise, SIZE times as large as their update is on average;
- ``none``: their update, for the price of a rule where no client lies.

SIZE is 10. A second declaration, after the first had been read, has 100 (``--size 100``): noise of size 10 is averaged
away. A client whose numbers leave the range of exact sums is left out of the round.

Running statistics are sent as they are. Rules: the mean with equal weights, the coordinate-wise median, the trimmed
mean with a fifth cut at either end, Krum and Multi-Krum (5 of 10) for two bad clients. The score is the global model's
mAP after the last round, mean over the data sets of the eight honest clients, and over the unseen ones.

    python benchmarks/robust.py --runs runs/robust
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from tabulate import tabulate

from fedsim.__main__ import main as fedsim
from fedsim.core.seeding import torch_generator
from fedsim.methods.base import Method, weigh
from fedsim.models import BODY
from fedsim.report import read_run
from fedsim.training.client import Client
from fedsim.training.messages import Upload
from seeded_runs import ROOT, SEEDS, score, show

LIARS = ("town3", "town8")
HONEST = [f"town{i}" for i in range(10) if f"town{i}" not in LIARS]
UNSEEN = ("new0", "new1")
ATTACKS = ("none", "flipped", "noise")
RULES = {
    "mean": (),
    "median": ("--model.aggregation", "Median"),
    "trimmed mean": ("--model.aggregation", "TrimmedMean", "--model.aggregation.trim", "0.2"),
    "Krum": ("--model.aggregation", "Krum", "--model.aggregation.bad", "2"),
    "Multi-Krum": ("--model.aggregation", "Krum", "--model.aggregation.bad", "2", "--model.aggregation.keep", "5"),
}
COMMON = (
    "--config", str(ROOT / "configs" / "quickstart.yaml"), "--trainer.max_epochs", "8", "--trainer.devices", "1",
    "--trainer.check_val_every_n_epoch", "8", "--trainer.enable_progress_bar", "false", "--data.val", "none",
    "--data.source.clients", "10", "--data.source.unseen", "2", "--data.source.scale", "0.5",
    "--model.client.batch_size", "8", "--model.on_bad_update", "skip_client",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Lying(Method):
    """FedPav with equal weights, and clients that lie."""

    attack: Literal["none", "flipped", "noise"] = "none"
    """lie"""
    size: float = 10.0
    """of the lie, relative to the update"""
    shared_groups = BODY

    def upload(self, client: Client) -> Upload:
        """Return the update, or a lie about its parameters."""
        count = client.model.flat.num_shared_parameters
        vector, received = client.model.shared.clone(), client.received.vector[:count]
        change = vector[:count] - received
        if client.client_name in LIARS and self.attack == "flipped":
            vector[:count] = received - self.size * change
        elif client.client_name in LIARS and self.attack == "noise":
            noise = torch.randn(count, generator=torch_generator(client.seed, client.round, client.client_name, "lie"))
            vector[:count] = received + self.size * change.square().mean().sqrt() * noise
        return Upload(vector)

    def weights(self, reports):  # noqa: ANN001, ANN201 - as in Method
        """Return 1 / K."""
        return weigh("uniform", reports)


def fit(folder: Path, attack: str, size: float, rule: tuple[str, ...], seed: int) -> None:
    """Train, unless it has been done."""
    if (folder / "summary.json").is_file() and read_run(folder).summary["finished"]:
        return
    method = ("--model.method", "robust.Lying", "--model.method.attack", attack, "--model.method.size", str(size))
    options = [*COMMON, *method, *rule, "--seed_everything", str(seed), "--run_dir", str(folder), "--overwrite", "true"]
    if fedsim(["fit", *options]):
        sys.exit(f"{folder}: failed")


def main() -> None:
    """Run what is missing, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=Path, default=Path("runs/robust"))
    parser.add_argument("--size", type=float, default=10.0)
    args = parser.parse_args()
    rows = []
    for name, rule in RULES.items():
        row = [name]
        for attack in ATTACKS:
            runs = []
            for seed in SEEDS:
                folder = args.runs / f"{args.size:g}" / f"{name.replace(' ', '_')}-{attack}-{seed}"
                fit(folder, attack, args.size, rule, seed)
                runs.append(read_run(folder))
            row += [
                show(np.array([np.mean([score(run, "global", d) for d in domains]) for run in runs]))
                for domains in (HONEST, UNSEEN)
            ]
        rows.append(row)
    headers = ["rule", *(f"{attack}: {kind}" for attack in ATTACKS for kind in ("seen", "unseen"))]
    print(tabulate(rows, headers))


if __name__ == "__main__":
    main()
