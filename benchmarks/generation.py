"""Paper 002's Table 7, generated images in local training, looked for on drawn people: declared here before a run.

With and without images whose appearance is swapped between a client's people, by a generator that was trained on that
client's images alone; 3 seeds, of generators and federations alike. The paper's orders: mAP rises from 80.3 to 88.7
(Market-1501) and from 47.5 to 59.3 (GRID).

    none         real images alone
    teacher      a quarter of the places in a batch go to swapped images, labelled by the teacher (the defaults)
    teacher, 1/2 half of the places
    appearance   a quarter, labelled as whose appearance they have

Everything else is unlike the paper: configs/quickstart.yaml's drawn people of 64 x 32 pixels (six clients, two unseen
domains), FedPav, a small network from nothing, 12 rounds; generators of configs/generators/small.yaml with 1,500 steps,
cut from 3,000 for time before any score was read. One swapped image per real one.

    python benchmarks/generation.py

Generators and runs go below --runs, and those that are there already are not repeated: an hour on two CPU cores.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tabulate import tabulate

from fedsim.cli.report import Run
from seeded_runs import ROOT, SEEDS, fedsim, fit, score, show

CONFIG = ROOT / "configs" / "quickstart.yaml"
SETTINGS = ROOT / "configs" / "generators" / "small.yaml"
STEPS = 1500
METRICS = ("mAP", "rank1")
WHERE = {"clients' own domains": ("global", "seen"), "unseen domains": ("global", "unseen")}
"""name -> model and data sets; with FedPav a personalised model is the global one"""

ROWS: dict[str, tuple[str, float] | None] = {
    "none": None,
    "teacher": ("teacher", 0.25),
    "teacher, 1/2": ("teacher", 0.5),
    "appearance": ("appearance", 0.25),
}
"""name -> labels and share of generated images"""


def generate(folder: Path, seed: int) -> str:
    """Train the generators of one seed, and write their images with both kinds of labels; return their table."""
    generators = folder / f"generators-{seed}"
    of = ("--config", str(CONFIG))
    said = fedsim(
        "augment", "fit", *of, "--settings", str(SETTINGS), "--training.steps", str(STEPS), "--seed", str(seed),
        "--processes", "2", "--device", "cpu", "--output", str(generators),
    )  # fmt: skip
    for labels in {row[0] for row in ROWS.values() if row}:
        images = generated(folder, labels, seed)
        if not images.is_dir():
            partial = images.with_name(f"{images.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)  # of an interrupted call
            fedsim(
                "augment", "write", *of, "--generators", str(generators), "--labels", labels, "--seed", str(seed),
                "--device", "cpu", "--output", str(partial),
            )  # fmt: skip
            partial.rename(images)
    return said


def generated(folder: Path, labels: str, seed: int) -> Path:
    """Return where the swapped images of one seed are."""
    return folder / f"generated-{labels}-{seed}"


def run_all(folder: Path) -> dict[str, list[Run]]:
    """Return the runs of each row, one per seed."""
    found: dict[str, list[Run]] = {name: [] for name in ROWS}
    for seed in SEEDS:
        for name, row in ROWS.items():
            options = ["--config", str(CONFIG), "--seed_everything", str(seed)]
            if row:
                labels, share = row
                options += ["--data.generated.root", str(generated(folder, labels, seed))]
                options += ["--data.generated.share", str(share)]
            found[name].append(fit(folder / f"{name.replace(', 1/', '-')}-{seed}", *options))
    return found


def scores(runs: list[Run], where: str, metric: str = "mAP") -> NDArray[np.float64]:
    """Return a score, percent, for each seed."""
    return np.array([score(run, *WHERE[where], metric) for run in runs])


def score_table(found: dict[str, list[Run]]) -> str:
    """Return ``mAP / rank-1`` of each row over seeds."""
    table = [
        [name, *(" / ".join(show(scores(runs, where, metric)) for metric in METRICS) for where in WHERE)]
        for name, runs in found.items()
    ]
    return tabulate(table, headers=["generated images", *(f"{where}, mAP / rank-1" for where in WHERE)])


def change_table(found: dict[str, list[Run]]) -> str:
    """Return what generated images change, in mAP, seed by seed."""
    table = []
    for name in [name for name, row in ROWS.items() if row]:
        gains = [scores(found[name], where) - scores(found["none"], where) for where in WHERE]
        table.append([name, *(", ".join(f"{gain:+.1f}" for gain in of_seeds) for of_seeds in gains)])
    return tabulate(table, headers=["change in mAP, by seed", *WHERE], disable_numparse=True)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/generation"))
    args = parser.parse_args()
    for seed in SEEDS:
        print(generate(args.runs, seed), flush=True)
    found = run_all(args.runs)
    print(score_table(found), change_table(found), sep="\n\n", flush=True)


if __name__ == "__main__":
    main()
