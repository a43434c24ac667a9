"""Scaffold with fedsim's default client optimizer, which has momentum, beside FedPav: 3 seeds, declared here.

Scaffold divides what clients have moved by how often their steps count a gradient. Divided by the number of steps, its
controls diverge under momentum. The claim: its own mAP is within 3 points of FedPav's, over the means of the seeds.

    python benchmarks/scaffold.py

Runs go below --runs, and those that are there already are not repeated.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from tabulate import tabulate

from seeded_runs import SEEDS, fit, score, show

COMMON = (
    "--data.source", "SyntheticReID", "--data.source.clients", "4", "--data.source.unseen", "1", "--data.val", "none",
    "--data.size", "[64,32]", "--data.augmentation", "{pad: 4, flip: 0.5, erase: 0.5}",
    "--model.backbone", "SmallCNN", "--model.backbone.width", "24", "--model.neck", "{kind: bnneck, dropout: 0.0}",
    "--model.client.batch_size", "16", "--model.client.head_lr", "0.05", "--trainer.max_epochs", "20",
    "--trainer.check_val_every_n_epoch", "20", "--trainer.devices", "2", "--trainer.accelerator", "cpu",
)  # fmt: skip
"""the client's optimizer is the default: SGD, rate 0.005, Nesterov momentum 0.9, weight decay 5e-4"""
PLAIN = ("--model.client.optimizer", "{class_path: torch.optim.SGD, init_args: {lr: 0.05, weight_decay: 5.0e-4}}",
         "--model.client.head_lr", "0.5")  # fmt: skip
"""as far in the long run, without momentum"""
METHODS: dict[str, tuple[str, ...]] = {
    "FedPav, uniform": ("--model.method", "FedPav", "--model.method.weighting", "uniform"),
    "Scaffold": ("--model.method", "Scaffold"),
    "FedPav, uniform, no momentum": ("--model.method", "FedPav", "--model.method.weighting", "uniform", *PLAIN),
    "Scaffold, no momentum": ("--model.method", "Scaffold", *PLAIN),
}


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=Path, default=Path("runs/scaffold"))
    parser.add_argument("--rounds", type=int, help="fewer, to try this file")
    args = parser.parse_args()
    short = ("--trainer.max_epochs", str(args.rounds), "--trainer.check_val_every_n_epoch", str(args.rounds))
    rows, means = [], {}
    for name, options in METHODS.items():
        every = (*COMMON, *options, *(short if args.rounds else ()))
        runs = [fit(args.runs / f"{name}-{s}", *every, "--seed_everything", str(s)) for s in SEEDS]
        seen, unseen = (np.array([score(run, "global", domain) for run in runs]) for domain in ("seen", "unseen"))
        rows.append([name, show(seen), show(unseen)])
        means[name] = seen.mean()
    print(tabulate(rows, headers=["mAP, global model", "own", "unseen"]))
    print(f"\nScaffold - FedPav, own: {means['Scaffold'] - means['FedPav, uniform']:+.1f}; the claim is -3.0 or more")


if __name__ == "__main__":
    main()
