"""Attacks against rules: one seed was read before the size of the patch was set, all else was declared before.

Eleven clients of drawn people (configs/quickstart.yaml's network and optimizer, half of its images, batches of 8), one
unseen data set, 8 rounds of one epoch, all clients in every round, FedPav with equal weights. town3 and town8 attack:

- ``none``: never, the figures without an attack;
- ``backdoor``: by a square of 4 of 64 x 32 pixels, updates boosted by 5;
- ``flip``: by the sign of their update, ten times as long.

Rules: the mean, the median, norms of at most 1, the geometric median, and Bulyan for two bad clients. Scores are of the
global model after the last round: mAP over the data sets of the nine honest clients, and the backdoor's success over
those of all eleven and over the unseen one.

    python benchmarks/attacks.py --runs runs/attacks
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from tabulate import tabulate

from fedsim.report import Run
from seeded_runs import ROOT, SEEDS, fit, show

TRIGGER = ("Backdoor", "--model.attack.patch", "4")
ATTACKS = {
    "none": (*TRIGGER, "--model.attack.start", "1000000"),
    "backdoor": (*TRIGGER, "--model.attack.boost", "5"),
    "flip": ("SignFlip", "--model.attack.scale", "10"),
}
RULES = {
    "mean": (),
    "median": ("--model.aggregation", "Median"),
    "clip": ("--model.aggregation", "NormClipping", "--model.aggregation.bound", "1.0"),
    "geomed": ("--model.aggregation", "GeometricMedian"),
    "bulyan": ("--model.aggregation", "Bulyan", "--model.aggregation.bad", "2"),
}
COMMON = (
    "--config", str(ROOT / "configs" / "quickstart.yaml"), "--trainer.max_epochs", "8", "--trainer.devices", "1",
    "--trainer.check_val_every_n_epoch", "8", "--trainer.enable_progress_bar", "false", "--data.val", "none",
    "--data.source.clients", "11", "--data.source.unseen", "1", "--data.source.scale", "0.5",
    "--model.client.batch_size", "8", "--model.on_bad_update", "skip_client",
    "--model.method", "FedPav", "--model.method.weighting", "uniform",
)  # fmt: skip


def figures(runs: list[Run], *names: str) -> list[str]:
    """Return mean and deviation over seeds of figures of the last evaluation, percent; empty where there is none."""
    metrics = [run.summary["final"]["metrics"] for run in runs]
    return [show(100 * np.array([m[name] for m in metrics])) if name in metrics[0] else "" for name in names]


def main() -> None:
    """Run what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=Path, default=Path("runs/attacks"))
    args = parser.parse_args()
    rows = []
    for rule, of_rule in RULES.items():
        row = [rule]
        for attack, of_attack in ATTACKS.items():
            options = (*COMMON, "--model.attack", *of_attack, "--model.attack.attackers", "[town3, town8]", *of_rule)
            runs = [
                fit(args.runs / f"{attack}-{rule}-{seed}", *options, "--seed_everything", str(seed)) for seed in SEEDS
            ]
            row += figures(runs, "attack/test/honest/mAP")
            if attack != "flip":
                row += figures(runs, "attack/test/success", "attack/test/global/unseen/success")
        rows.append(row)
    success = ("success", "unseen")
    print(tabulate(rows, ["rule", "none: mAP", *success, "backdoor: mAP", *success, "flip: mAP"]))


if __name__ == "__main__":
    main()
