"""What paper 001 observes, looked for on drawn people and on Omniglot: 3 seeds, all declared here before a run.

Table 2, Figure 4 d: on unseen domains FedReID is ahead of averaging without its expert. Table 3: there the clients'
features side by side are ahead of most clients alone, the mean of their parameters is behind them, FedReID is ahead of
all. Table 6: on the clients' own domains FedReID's global model is behind local training. Figure 3: with more noise
accuracy falls; noise on downloads as well ("Double") costs a little more; the model stays ahead of an untrained one.

Averaging without the expert is FedAvg with private necks and heads and uniform weights: the paper's FedAVG shares them.
Of clients alone the mean over clients is shown. Scores are those of the last round, on pooled features by Euclidean
distance as in the paper. Everything else is unlike it: configs/quickstart.yaml's drawn people (six clients, two unseen)
and configs/omniglot.yaml (six alphabets, two unseen), small networks from nothing, Adam, 8 rounds of one epoch.

Noise is tried on Omniglot, for 3 rounds, so that all rows and seeds fit into the time. Beside it stands differential
privacy (docs/privacy.md), which the paper has not: clipped to 1, noise of 0.01 and 0.1 of that on the sum. Running
statistics then stay with the clients, so unseen domains are scored by the clients' own models, also of the run without
noise that it is to be compared with. With six clients no useful noise gives a small epsilon; the accountant's is
printed.

    python benchmarks/fedreid.py --omniglot FOLDER    # tests' data, in Market-1501's layout

Runs go below --runs, and those that are there already are not repeated.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from tabulate import tabulate

from fedsim.cli.report import Run
from seeded_runs import ROOT, SEEDS, fit, score, show

ROUNDS = 8
NOISE_ROUNDS = 3
METRICS = ("mAP", "rank1")
COMMON = (
    "--data.val", "none", "--trainer.accelerator", "cpu", "--trainer.devices", "1",
    "--model.evaluation.layer", "pool", "--model.evaluation.distance", "euclidean",
)  # fmt: skip


def for_rounds(rounds: int) -> tuple[str, ...]:
    """Return the options for a run that is scored after its last round only."""
    return ("--trainer.max_epochs", str(rounds), "--trainer.check_val_every_n_epoch", str(rounds))


FEDAVG = ("--model.method", "FedAvg", "--model.method.share_head", "false", "--model.method.share_neck", "false",
          "--model.method.weighting", "uniform")  # fmt: skip
FEDREID = ("--model.method", "FedReID")
LOCAL = ("--model.method", "Local", "--model.evaluation.ensemble", "true", *for_rounds(ROUNDS))
METHODS: dict[str, tuple[str, ...]] = {
    "Local": LOCAL,
    "parameter average": (*FEDAVG, "--model.client.local_epochs", str(ROUNDS), *for_rounds(1)),
    "FedAvg": (*FEDAVG, *for_rounds(ROUNDS)),
    "FedReID": (*FEDREID, *for_rounds(ROUNDS)),
    "untrained": (*FEDAVG, "--model.availability.drop", "1.0", *for_rounds(1)),
}


def white(beta: str, double: bool = False) -> tuple[str, ...]:
    """Return the options for FedReID with the paper's noise."""
    download = ("--model.privacy.in_download", "true") if double else ()
    return (*FEDREID, "--model.privacy", "WhiteNoise", "--model.privacy.beta", beta, *download)


LOCAL_STATISTICS = (*FEDREID, "--model.bn_stats", "local")


def private(multiplier: str) -> tuple[str, ...]:
    """Return the options for FedReID with differential privacy."""
    return (*LOCAL_STATISTICS, "--model.privacy", "DifferentialPrivacy", "--model.privacy.clip", "1.0",
            "--model.privacy.noise_multiplier", multiplier)  # fmt: skip


NOISE: dict[str, tuple[str, ...]] = {
    "no noise": FEDREID,
    "beta 0.0005, single": white("0.0005"),
    "beta 0.005, single": white("0.005"),
    "beta 0.005, double": white("0.005", double=True),
    "beta 0.05, single": white("0.05"),
    "statistics with the clients": LOCAL_STATISTICS,
    "differential privacy, 0.01": private("0.01"),
    "differential privacy, 0.1": private("0.1"),
}


def run_all(rows: dict[str, tuple[str, ...]], setting: tuple[str, ...], folder: Path) -> dict[str, list[Run]]:
    """Return the runs of each row, one per seed."""
    return {
        name: [fit(folder / f"{name}-{s}", *setting, *COMMON, *row, "--seed_everything", str(s)) for s in SEEDS]
        for name, row in rows.items()
    }


def cell(runs: list[Run], kind: str, domains: str) -> str:
    """Return ``mAP / rank-1`` over seeds."""
    if f"test/{kind}/{domains}/mAP" not in runs[0].summary["final"]["metrics"]:
        return "-"
    return " / ".join(show(np.array([score(run, kind, domains, metric) for run in runs])) for metric in METRICS)


def compare_methods(name: str, found: dict[str, list[Run]]) -> str:
    """Tables 2, 3 and 6."""
    local = found["Local"]
    rows = [
        ["clients alone", cell(local, "personalised", "seen"), cell(local, "personalised", "unseen")],
        ["features side by side", "-", cell(local, "ensemble", "unseen")],
    ]
    rows += [[label, cell(runs, "global", "seen"), cell(runs, "global", "unseen")]
             for label, runs in found.items() if label != "Local"]  # fmt: skip
    headers = [f"{name}, mAP / rank-1", "clients' own domains", "unseen domains"]
    return f"{tabulate(rows, headers=headers)}\n{pairs(found['FedReID'], found['FedAvg'])}"


def pairs(ours: list[Run], theirs: list[Run]) -> str:
    """Return what FedReID gains over FedAvg on unseen domains, seed by seed."""
    gains = [
        f"{score(a, 'global', 'unseen') - score(b, 'global', 'unseen'):+.1f}" for a, b in zip(ours, theirs, strict=True)
    ]
    return f"FedReID minus FedAvg, mAP on unseen domains, by seed: {', '.join(gains)}"


def compare_noise(name: str, found: dict[str, list[Run]]) -> str:
    """Figure 3, and differential privacy."""
    rows = []
    for label, runs in found.items():
        kind = "global" if f"test/global/unseen/{METRICS[0]}" in runs[0].summary["final"]["metrics"] else "personalised"
        epsilon = runs[0].log[NOISE_ROUNDS].get("privacy/epsilon", float("nan"))
        bound = "-" if np.isnan(epsilon) else f"{epsilon:.0f}"
        rows.append([label, kind, cell(runs, kind, "unseen"), bound])
    return tabulate(rows, headers=[f"{name}, mAP / rank-1", "models", "unseen domains", "epsilon"])


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--omniglot", required=True, help="folder of Omniglot's alphabets in Market-1501's layout")
    parser.add_argument("--runs", type=Path, default=Path("runs/fedreid"))
    args = parser.parse_args()
    drawn = ("--config", str(ROOT / "configs" / "quickstart.yaml"))
    omniglot = ("--config", str(ROOT / "configs" / "omniglot.yaml"), "--data.source.root", args.omniglot)
    for name, setting in (("Omniglot", omniglot), ("drawn people", drawn)):
        print(compare_methods(name, run_all(METHODS, setting, args.runs / name)), end="\n\n", flush=True)
    noise = run_all(NOISE, (*omniglot, *for_rounds(NOISE_ROUNDS)), args.runs / "noise")
    print(compare_noise("Omniglot, FedReID", noise))


if __name__ == "__main__":
    main()
