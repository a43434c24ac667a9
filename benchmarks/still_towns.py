"""A federation in which Cosine Distance Weight has to be ahead of weights by size: 5 seeds, declared here.

Four drawn towns. The three with the most images stand still: in each round they take one step at a hundredth of the
rate. The smallest, town3, trains as usual, and has 11 % of the images. So the mean by size takes a ninth of each step
of the only client that moves, where CDW gives it nearly all of the weight (paper 003, Section 5.2). Uniform weights are
the control. The claim: the global model's mAP on town3 is more than 10 points higher with CDW than with weights by
size, over the means of the seeds.

    python benchmarks/still_towns.py

Runs go below --runs, and those that are there already are not repeated.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from tabulate import tabulate

from seeded_runs import fit, score, show

SEEDS = range(5)
MOVER = "town3"
STILL = {
    "local_steps": 1,
    "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 5e-4, "momentum": 0.9}},
}
COMMON = (
    "--data.source", "SyntheticReID", "--data.source.clients", "4", "--data.source.unseen", "0", "--data.val", "none",
    "--data.size", "[64,32]", "--data.augmentation", "{pad: 4, flip: 0.5}",
    "--model.backbone", "SmallCNN", "--model.backbone.width", "16", "--model.neck", "{kind: bnneck, dropout: 0.0}",
    "--model.client.batch_size", "16", "--model.client.optimizer",
    "{class_path: torch.optim.SGD, init_args: {lr: 0.05, momentum: 0.9, nesterov: true, weight_decay: 5.0e-4}}",
    "--model.clients", json.dumps({f"town{i}": STILL for i in range(3)}), "--trainer.max_epochs", "16",
    "--trainer.check_val_every_n_epoch", "16", "--trainer.devices", "1", "--trainer.accelerator", "cpu",
)  # fmt: skip
WEIGHTINGS: dict[str, tuple[str, ...]] = {
    "by size": ("--model.method.weighting", "size"),
    "uniform": ("--model.method.weighting", "uniform"),
    "CDW, as in the code": ("--model.method.weighting", "cdw"),
    "CDW, as in an evaluation": ("--model.method.weighting", "cdw", "--model.method.cdw_mode", "eval"),
}


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=Path, default=Path("runs/still_towns"))
    parser.add_argument("--rounds", type=int, help="fewer, to try this file")
    args = parser.parse_args()
    short = ("--trainer.max_epochs", str(args.rounds), "--trainer.check_val_every_n_epoch", str(args.rounds))
    rows, means = [], {}
    for name, options in WEIGHTINGS.items():
        every = (*COMMON, "--model.method", "FedPav", *options, *(short if args.rounds else ()))
        runs = [fit(args.runs / f"{name}-{s}", *every, "--seed_everything", str(s)) for s in SEEDS]
        mover, seen = (np.array([score(run, "global", domain) for run in runs]) for domain in (MOVER, "seen"))
        weights = np.array([run.log[max(run.log)].get(f"train/{MOVER}/weight", np.nan) for run in runs])
        rows.append([name, show(mover), show(seen), show(100 * weights)])
        means[name] = mover.mean()
    print(tabulate(rows, headers=["weights", f"mAP, {MOVER}", "mAP, all towns", f"last weight of {MOVER}, %"]))
    print(
        f"\nCDW - by size, {MOVER}: {means['CDW, as in the code'] - means['by size']:+.1f}; the claim is +10.0 or more"
    )


if __name__ == "__main__":
    main()
