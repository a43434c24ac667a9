"""Paper 002's Table 7, generated images in local training, looked for on drawn people: declared here before a run.

The paper's orders: mAP rises from 80.3 to 88.7 (Market-1501) and from 47.5 to 59.3 (GRID). Images can only help where
something is missing, so the setting is scarce: each of six clients has 12 people with two random images each, in at
most two of its cameras. Generated images come beside the real ones: half of a batch is generated and there are twice as
many local epochs, so that every real image is seen as often as without. 3 seeds, of generators and federations alike.

    none              real images alone
    none, equal work  the same with as many steps as the rows below
    copies            exact copies of the client's real images: what the machinery itself costs
    oracle            what a perfect generator makes: the renderer draws each person in the cameras of others
    teacher           images swapped by a generator of the client's images alone, labelled by its teacher
    appearance        the same images, labelled as whose appearance they have

Only the rows above say what a row below them can: if the oracle gains nothing, no generator can be judged here; if
copies cost, images do harm by being there. Scores are those of the global model, and of the clients' own models after
their last training, which generated images reach first.

Everything else is unlike the paper: configs/quickstart.yaml's drawn people of 64 x 32 pixels (two unseen domains),
FedPav, a small network from nothing, 12 rounds of 8 (16) local epochs; generators of configs/generators/small.yaml with
1,500 steps. One image per real one, 24 a client.

    python benchmarks/generation.py

Generators and runs go below --runs, and those that are there already are not repeated: over an hour on a CPU core.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import numpy as np
import yaml
from numpy.typing import NDArray
from tabulate import tabulate

from fedsim.cli.augment.settings import open_data
from fedsim.data import write_generated
from fedsim.data.federated import ClientData
from fedsim.data.images import Images
from fedsim.data.synthetic import SyntheticImages
from fedsim.generation.swaps import sample_pairs
from fedsim.report import Run
from seeded_runs import ROOT, SEEDS, fedsim, fit, score, show

CONFIG = ROOT / "configs" / "quickstart.yaml"
SETTINGS = ROOT / "configs" / "generators" / "small.yaml"
SCARCE = {"data": {"val": "none", "max_identities": 12, "max_images": 24}}
EPOCHS = 8
METRICS = ("mAP", "rank1")
WHERE = {
    "own domains, global": ("global", "seen"),
    "own domains, local": ("local", "seen"),
    "unseen domains": ("global", "unseen"),
}
"""name -> model and data sets"""
ROWS: dict[str, int] = {
    "none": EPOCHS, "none, equal work": 2 * EPOCHS, "copies": 2 * EPOCHS, "oracle": 2 * EPOCHS, "teacher": 2 * EPOCHS,
    "appearance": 2 * EPOCHS,
}  # fmt: skip
"""name -> local epochs; half of each batch is generated where the name is that of generated images"""
GENERATORS = ("teacher", "appearance")
_NEW_SHOT = 1000  # of the oracle's pictures, beyond those of the data set


def scarce(folder: Path) -> Path:
    """Write the config that cuts the data, and return its path."""
    path = folder / "scarce.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(SCARCE))
    return path


def generate(folder: Path, seed: int, steps: int) -> str:
    """Write the generated images of one seed, of all rows; return the table of its generators."""
    configs = ("--config", str(CONFIG), "--config", str(scarce(folder)))
    for name in ("copies", "oracle"):
        if not generated(folder, name, seed).is_dir():
            draw(folder, name, seed)
    generators = folder / f"generators-{seed}"
    table = fedsim(
        "augment", "fit", *configs, "--settings", str(SETTINGS), "--training.steps", str(steps), "--seed", str(seed),
        "--device", "cpu", "--output", str(generators),
    )  # fmt: skip
    for labels in GENERATORS:
        images = generated(folder, labels, seed)
        if not images.is_dir():
            partial = images.with_name(f"{images.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)  # of an interrupted call
            fedsim(
                "augment", "write", *configs, "--generators", str(generators), "--labels", labels, "--seed", str(seed),
                "--device", "cpu", "--output", str(partial),
            )  # fmt: skip
            partial.rename(images)
    return table


def draw(folder: Path, name: str, seed: int) -> None:
    """Write copies of each client's images, or perfect swaps of them."""
    data, root = open_data([str(CONFIG), str(scarce(folder))]), generated(folder, name, seed)
    for client in data.federated.clients:
        images, pids = (client.train.images, client.train.pids) if name == "copies" else perfect_swaps(client, seed)
        write_generated(root / client.name, images.decode(data.size), [{int(pid): 1.0} for pid in pids])


def perfect_swaps(client: ClientData, seed: int) -> tuple[Images, NDArray[np.int64]]:
    """Return a picture per real image, of another person at its place, and who that is."""
    real = client.train.images
    assert isinstance(real, SyntheticImages)
    pairs = sample_pairs(client.name, client.labels, len(real), seed)
    lent, worn = real.take(pairs.structure), real.take(pairs.appearance)
    made = SyntheticImages(real.seed, real.domain, worn.identities, lent.cameras, lent.shots + _NEW_SHOT)
    return made, client.train.pids[pairs.appearance]


def generated(folder: Path, name: str, seed: int) -> Path:
    """Return where the generated images of a row and seed are."""
    return folder / f"generated-{name}-{seed}"


def run_all(folder: Path, rounds: int) -> dict[str, list[Run]]:
    """Return the runs of each row, one per seed."""
    runs: dict[str, list[Run]] = {name: [] for name in ROWS}
    for seed in SEEDS:
        for name, epochs in ROWS.items():
            options = ["--config", str(CONFIG), "--config", str(scarce(folder)), "--seed_everything", str(seed)]
            options += ["--model.client.local_epochs", str(epochs), "--trainer.devices", "1"]
            options += ["--trainer.max_epochs", str(rounds), "--trainer.check_val_every_n_epoch", str(rounds)]
            if not name.startswith("none"):
                options += ["--data.generated.root", str(generated(folder, name, seed))]
                options += ["--data.generated.share", "0.5"]
            runs[name].append(fit(folder / f"{name.replace(', ', '-').replace(' ', '-')}-{seed}", *options))
    return runs


def scores(runs: list[Run], domain: str, metric: str = "mAP") -> NDArray[np.float64]:
    """Return a score, percent, for each seed."""
    return np.array([score(run, *WHERE[domain], metric) for run in runs])


def score_table(runs_of: dict[str, list[Run]]) -> str:
    """Return ``mAP / rank-1`` of each row over seeds."""
    table = [
        [name, *(" / ".join(show(scores(runs, domain, metric)) for metric in METRICS) for domain in WHERE)]
        for name, runs in runs_of.items()
    ]
    return tabulate(table, headers=["generated images", *(f"{domain}, mAP / rank-1" for domain in WHERE)])


def change_table(runs_of: dict[str, list[Run]]) -> str:
    """Return what generated images change against as much work without them, in mAP, seed by seed."""
    table = []
    for name in [name for name in ROWS if name != "none, equal work"]:
        gains = [scores(runs_of[name], domain) - scores(runs_of["none, equal work"], domain) for domain in WHERE]
        table.append([name, *(", ".join(f"{gain:+.1f}" for gain in of_seeds) for of_seeds in gains)])
    return tabulate(table, headers=["change in mAP, by seed", *WHERE], disable_numparse=True)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/generation"))
    parser.add_argument("--rounds", type=int, default=12, help="fewer to try the file")
    parser.add_argument("--steps", type=int, default=1500, help="of the generators; fewer to try the file")
    args = parser.parse_args()
    for seed in SEEDS:
        print(generate(args.runs, seed, args.steps), flush=True)
    runs_of = run_all(args.runs, args.rounds)
    print(score_table(runs_of), change_table(runs_of), sep="\n\n", flush=True)


if __name__ == "__main__":
    main()
