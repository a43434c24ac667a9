"""Do the papers' effects appear once networks are pretrained? 3 seeds, all declared here before a run.

All five papers start from ImageNet's weights. Most other comparisons of this folder start a small network from nothing.
Here one network, MobileNetV2 of width 1.0, starts from ImageNet's weights and from nothing, and is trained by FedPav,
LSN (private normalisation layers: paper 000's, and FedBN's), FedReID (paper 001), the clients alone (Local), and on all
data in one place (union). LSN and FedReID average with equal weights, so FedPav does, too; there is no neck. So FedPav
is both papers' baseline: LSN differs by its private normalisation layers alone, FedReID by its expert alone.

Each claim is a difference in mAP, seed by seed. Verdicts are those of verdicts.py over the claims of a table (the
record of 2026-11-25 has them without Holm's method). All claims, with the model that is scored, are in CLAIMS. Below
them are the differences on each client's own domain: paper 003 has small clients ahead of training alone, and large
ones behind.

People   four towns of configs/quickstart.yaml at half their people (240, 192, 135 and 72 images), and the two new
         towns; 128 x 64.
Grocery  packages and vegetables train, 300 images each; fruit is unseen; 64 x 64: half the pixels, a matter of time.

Both: 4 rounds of one epoch, batches of 16, cross-entropy with label smoothing, the augmentation of
configs/quickstart.yaml, pooled features, Euclidean distance, scores of the last round. The optimizer was chosen in
trials of clients alone (Local) with seed 9, which is none of the study's: RATE. FedReID takes twice the steps of the
others, as in the paper. "Not trained" are the networks as they start.

    python benchmarks/pretrained.py --weights mobilenet_v2_imagenet_features.pth --people
    python benchmarks/pretrained.py --weights FILE --grocery FOLDER    # in Market-1501's layout

Runs go below --runs, and those that are there already are not repeated.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tabulate import tabulate

from fedsim.report import Run
from seeded_runs import ROOT, SEEDS, fit, score, show
from verdicts import paired, verdicts

Options = tuple[str, ...]
Runs = dict[str, list[Run]]
"""method -> a run per seed"""

ROUNDS = 4
METRICS = ("mAP", "rank1")
COMMON: Options = (
    "--config", str(ROOT / "configs" / "quickstart.yaml"), "--trainer.devices", "1", "--data.val", "none",
    "--trainer.max_epochs", str(ROUNDS), "--trainer.check_val_every_n_epoch", str(ROUNDS),
    "--model.backbone", "MobileNetV2", "--model.backbone.width", "1.0", "--model.neck.kind", "none",
    "--model.client.channels_last", "true", "--model.evaluation.precision", "run",
    "--model.evaluation.layer", "pool", "--model.evaluation.distance", "euclidean",
)  # fmt: skip
PEOPLE: Options = (
    "--data.size", "[128, 64]", "--data.source.clients", "4", "--data.source.unseen", "2", "--data.source.scale", "0.5",
)  # fmt: skip
METHODS: dict[str, Options] = {
    "FedPav": ("--model.method", "FedPav", "--model.method.weighting", "uniform"),
    "LSN": ("--model.method", "SKA", "--model.method.dual", "false", "--model.method.unseen", "avg",
            "--model.method.avg_every", str(ROUNDS)),
    "FedReID": ("--model.method", "FedReID"),
    "Local": ("--model.method", "Local"),
    "union": ("--model.method", "FedPav", "--data.partition", "union"),
    "not trained": ("--model.method", "FedPav", "--model.availability.drop", "1.0", "--trainer.max_epochs", "1",
                    "--trainer.check_val_every_n_epoch", "1"),
}  # fmt: skip
RATE = "0.001"
"""of Adam with weight decay 5e-4, for both starts and data sets: the best of the trials (own mAP of clients alone, seed
9). From ImageNet, people: 64.6 with 0.001, 54.2 with 0.0003, 13.2 with the papers' SGD (0.01; heads 0.1); groceries:
31.3 with 0.001, 29.8 with 0.0003, 23.2 with 0.0001. From nothing: 18.4, 15.5, 15.9; groceries 10.3 and 6.5"""

Model = tuple[str, str]
"""method, and which of its models: global, local (before averaging), personalised (own; the mean over clients)"""


@dataclass(frozen=True)
class Claim:
    """One model is ahead of another."""

    text: str
    ahead: Model
    behind: Model
    domains: str
    """seen: the clients' own; or unseen"""


CLAIMS = (
    Claim("000, Table 4: LSN is ahead of averaging", ("LSN", "personalised"), ("FedPav", "personalised"), "seen"),
    Claim("000, Table 2: LSN is ahead of clients alone", ("LSN", "personalised"), ("Local", "personalised"), "seen"),
    Claim("000, Table 4: averaging is ahead of LSN", ("FedPav", "global"), ("LSN", "global"), "unseen"),
    Claim("001, Table 2: FedReID is ahead of averaging", ("FedReID", "global"), ("FedPav", "global"), "unseen"),
    Claim("001, Table 3: FedReID is ahead of clients", ("FedReID", "global"), ("Local", "personalised"), "unseen"),
    Claim("001, Table 6: FedReID is behind clients", ("Local", "personalised"), ("FedReID", "global"), "seen"),
    Claim("003, Figure 6: before averaging models are ahead", ("FedPav", "local"), ("FedPav", "global"), "seen"),
    Claim("averaging is ahead of clients alone", ("FedPav", "global"), ("Local", "personalised"), "seen"),
    Claim("averaging is ahead of clients alone", ("FedPav", "global"), ("Local", "personalised"), "unseen"),
    Claim("all data in one place are ahead of averaging", ("union", "global"), ("FedPav", "global"), "seen"),
    Claim("all data in one place are ahead of averaging", ("union", "global"), ("FedPav", "global"), "unseen"),
)


def grocery(folder: str) -> Options:
    """Return the data of Grocery."""
    return ("--data.source", "MarketFolders", "--data.source.root", folder, "--data.unseen", '["fruit"]',
            "--data.size", "[64, 64]", "--data.max_images", "300")  # fmt: skip


def mean_ap(runs: Runs, model: Model, domain: str) -> NDArray[np.float64]:
    """Return the mAP of one model on a data set, or on all seen or unseen ones, percent, for each seed."""
    method, kind = model
    return np.array([score(run, kind, domain) for run in runs[method]])


def gain(runs: Runs, ahead: Model, behind: Model, domain: str) -> NDArray[np.float64]:
    """Return by how many points of mAP one model is ahead of another, for each seed."""
    return mean_ap(runs, ahead, domain) - mean_ap(runs, behind, domain)


def by_seed(gains: NDArray[np.float64]) -> str:
    """Return all differences."""
    return ", ".join(f"{value:+.1f}" for value in gains)


def score_table(runs: Runs) -> str:
    """Return ``mAP / rank-1`` of all models over seeds."""
    rows = []
    for method, method_runs in runs.items():
        for kind in ("global", "local", "personalised"):
            cells = [_cell(method_runs, kind, domains) for domains in ("seen", "unseen")]
            if set(cells) != {"-"}:
                rows.append([method, kind, *cells])
    return tabulate(rows, headers=["method", "model", "own, mAP / rank-1", "unseen"])


def _cell(runs: list[Run], kind: str, domains: str) -> str:
    if f"test/{kind}/{domains}/mAP" not in runs[0].summary["final"]["metrics"]:
        return "-"
    return " / ".join(show(np.array([score(run, kind, domains, metric) for run in runs])) for metric in METRICS)


def claim_table(runs: Runs) -> str:
    """Return the differences of all claims, and their verdicts."""
    gains = [gain(runs, claim.ahead, claim.behind, claim.domains) for claim in CLAIMS]
    words = verdicts([paired(of_claim) for of_claim in gains])
    rows = [
        [claim.text, claim.domains, by_seed(of_claim), word]
        for claim, of_claim, word in zip(CLAIMS, gains, words, strict=True)
    ]
    return tabulate(rows, headers=["claim", "domains", "difference in mAP, by seed", "verdict"])


def client_table(runs: Runs) -> str:
    """Return what each client gains at home over training alone."""
    test = "test/personalised/"
    names = [name.removeprefix(test).removesuffix("/mAP") for name in runs["LSN"][0].summary["final"]["metrics"]
             if name.startswith(test) and name.endswith("/mAP")]  # fmt: skip
    baseline: Model = ("Local", "personalised")
    models: tuple[Model, ...] = (("FedPav", "global"), ("LSN", "personalised"), ("FedReID", "global"))
    rows = [
        [name, show(mean_ap(runs, baseline, name)), *(by_seed(gain(runs, model, baseline, name)) for model in models)]
        for name in names
        if name not in {"seen", "unseen"}
    ]
    return tabulate(rows, headers=["client", "alone, mAP", *(f"{method}, ahead by" for method, _ in models)])


def study(name: str, data: Options, folder: Path, weights: str) -> None:
    """Run and print both starts on one data set."""
    for start, network in {"ImageNet": ("--model.backbone.weights", weights), "nothing": ()}.items():
        common = (*COMMON, *data, *network, "--model.client.optimizer.lr", RATE)
        runs: Runs = {method: [] for method in METHODS}
        for seed in SEEDS:
            for method, options in METHODS.items():
                run = fit(folder / name / start / f"{method}-{seed}", *common, *options, "--seed_everything", str(seed))
                runs[method].append(run)
        print(f"{name}, from {start}", score_table(runs), claim_table(runs), client_table(runs), sep="\n\n", flush=True)
        print(flush=True)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", required=True, help="ImageNet weights of MobileNetV2 1.0")
    parser.add_argument("--people", action="store_true", help="drawn people")
    parser.add_argument("--grocery", help="folder of fruit, packages and vegetables in Market-1501's layout")
    parser.add_argument("--runs", type=Path, default=Path("runs/pretrained"))
    args = parser.parse_args()
    if not (args.people or args.grocery):
        parser.error("give --people, or --grocery, or both")
    if args.people:
        study("people", PEOPLE, args.runs, args.weights)
    if args.grocery:
        study("grocery", grocery(args.grocery), args.runs, args.weights)


if __name__ == "__main__":
    main()
