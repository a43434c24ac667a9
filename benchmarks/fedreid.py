"""What paper 001 observes, looked for on drawn people and on Omniglot: 3 seeds, all declared here before a run.

Table 2, Figure 4 d: on unseen domains FedReID is ahead of averaging without its expert. Table 3: there the clients'
features side by side are ahead of most clients alone, the mean of their parameters is behind them, FedReID is ahead of
all. Table 6: on the clients' own domains FedReID's global model is behind local training, and fine-tuning from it, with
it as the expert, is ahead. Beside that stands what the paper has not: fine-tuning from the same weights without the
expert. Figure 3: with more noise accuracy falls; noise on downloads as well ("Double") costs a little more; the model
stays ahead of an untrained one.

The protocol is the paper's (src/fedsim/papers/001.yaml: SGD with Nesterov's momentum, weight decay, no label smoothing,
pooled features, Euclidean distance), with a quarter of its rounds: 25, and drops after 10 and 20; 10 of its 40 for
fine-tuning. Rates are 0.003 and 0.03: the network, an ImageNet MobileNetV2 of width 0.35, does not bear the paper's
0.01 and 0.1 (benchmarks/ska.py). Averaging without the expert is FedAvg with private necks and heads and uniform
weights: the paper's FedAVG shares them. Of clients alone the mean over clients is shown; the parameter average is of
the same models. Everything else is unlike the paper: configs/quickstart.yaml's drawn people (six clients, two unseen)
and configs/omniglot.yaml (six alphabets, two unseen). Newcomers are six towns of another seed, which no federation has
seen.

With ``--noise`` FedReID is run with the paper's noise on Omniglot, 25 rounds, and beside it with differential privacy
(docs/privacy.md), which the paper has not: clipped to 1, noise of 0.01 and 0.1 of that on the sum. Running statistics
then stay with the clients, so unseen domains are scored by the clients' own models, also of the run without noise that
it is to be compared with. With six clients no useful noise gives a small epsilon; the accountant's is printed.

    python benchmarks/fedreid.py --weights mobilenet_v2_w035_features.pth --people
    python benchmarks/fedreid.py --weights FILE --omniglot FOLDER [--noise]    # tests' data, in Market-1501's layout

Runs go below --runs, and those that are there already are not repeated.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from tabulate import tabulate

from fedsim.papers.files import read_paper
from fedsim.report import Run
from seeded_runs import ROOT, SEEDS, fedsim, fit, score, show

Options = tuple[str, ...]

ROUNDS = 25
STEP = 10
"""rounds from one drop of the rates to the next"""
TUNING = 10
METRICS = ("mAP", "rank1")
COMMON: Options = (
    "--config", json.dumps(read_paper("001").content["protocol"]), "--model.backbone", "MobileNetV2",
    "--model.backbone.width", "0.35", "--model.backbone.norm_eps", "1e-3", "--model.backbone.pixels", "symmetric",
    "--model.client.optimizer.lr", "0.003", "--model.client.head_lr", "0.03", "--model.client.schedule.step", str(STEP),
    "--model.objective.label_smoothing", "0", "--data.val", "none", "--trainer.accelerator", "cpu",
    "--trainer.devices", "1",
)  # fmt: skip


def for_rounds(rounds: int) -> Options:
    """Return the options for a run that is scored after its last round only."""
    return ("--trainer.max_epochs", str(rounds), "--trainer.check_val_every_n_epoch", str(rounds))


FEDAVG: Options = ("--model.method", "FedAvg", "--model.method.share_head", "false", "--model.method.share_neck",
                   "false", "--model.method.weighting", "uniform")  # fmt: skip
FEDREID: Options = ("--model.method", "FedReID")
NOBODY: Options = (*FEDAVG, "--model.availability.drop", "1.0", *for_rounds(1))
METHODS: dict[str, Options] = {
    "Local": ("--model.method", "Local", "--model.evaluation.ensemble", "true", *for_rounds(ROUNDS)),
    "FedAvg": (*FEDAVG, *for_rounds(ROUNDS)),
    "FedReID": (*FEDREID, *for_rounds(ROUNDS)),
    "untrained": NOBODY,
}
TUNED: dict[str, Options] = {
    "with the expert": ("--model.method", "FedReIDFineTune", *for_rounds(TUNING)),
    "without it": ("--model.method", "Local", *for_rounds(TUNING)),
}


def white(beta: str, double: bool = False) -> Options:
    """Return the options for FedReID with the paper's noise."""
    download = ("--model.privacy.in_download", "true") if double else ()
    return (*FEDREID, "--model.privacy", "WhiteNoise", "--model.privacy.beta", beta, *download)


LOCAL_STATISTICS: Options = (*FEDREID, "--model.bn_stats", "local")


def private(multiplier: str) -> Options:
    """Return the options for FedReID with differential privacy."""
    return (*LOCAL_STATISTICS, "--model.privacy", "DifferentialPrivacy", "--model.privacy.clip", "1.0",
            "--model.privacy.noise_multiplier", multiplier)  # fmt: skip


NOISE: dict[str, Options] = {
    "no noise": FEDREID,
    "beta 0.0005, single": white("0.0005"),
    "beta 0.005, single": white("0.005"),
    "beta 0.005, double": white("0.005", double=True),
    "beta 0.05, single": white("0.05"),
    "statistics with the clients": LOCAL_STATISTICS,
    "differential privacy, 0.01": private("0.01"),
    "differential privacy, 0.1": private("0.1"),
}


def run_all(rows: dict[str, Options], setting: Options, folder: Path, weights: str) -> dict[str, list[Run]]:
    """Return the runs of each row, one per seed, from the network of the file ``weights``."""
    start = (*COMMON, "--model.backbone.weights", weights)
    return {
        name: [fit(folder / f"{name}-{s}", *setting, *start, *row, "--seed_everything", str(s)) for s in SEEDS]
        for name, row in rows.items()
    }


def from_weights(name: str, sources: list[Run], row: Options, setting: Options, mean: bool = False) -> list[Run]:
    """Return runs that start from the models of other runs: from the global one, or from the mean of the clients'."""
    runs = []
    for seed, source in zip(SEEDS, sources, strict=True):
        weights = source.folder / ("mean.safetensors" if mean else "global.safetensors")
        if not weights.is_file():
            last = str(source.folder / "checkpoints" / "last.ckpt")
            fedsim("export", "--ckpt_path", last, "--output", str(weights), *(("--mean", "true") if mean else ()))
        start = ("--model.backbone.weights", str(weights), "--seed_everything", str(seed))
        runs.append(fit(source.folder.parent / f"{name}-{seed}", *setting, *COMMON, *row, *start))
    return runs


def cell(runs: list[Run], kind: str, domains: str) -> str:
    """Return ``mAP / rank-1`` over seeds."""
    if f"test/{kind}/{domains}/mAP" not in runs[0].summary["final"]["metrics"]:
        return "-"
    return " / ".join(show(np.array([score(run, kind, domains, metric) for run in runs])) for metric in METRICS)


def compare_methods(name: str, runs_of: dict[str, list[Run]]) -> str:
    """Tables 2 and 3, and Table 6 without its last row."""
    local = runs_of["Local"]
    rows = [
        ["clients alone", cell(local, "personalised", "seen"), cell(local, "personalised", "unseen")],
        ["features side by side", "-", cell(local, "ensemble", "unseen")],
    ]
    rows += [[label, cell(runs, "global", "seen"), cell(runs, "global", "unseen")]
             for label, runs in runs_of.items() if label != "Local"]  # fmt: skip
    headers = [f"{name}, mAP / rank-1", "clients' own domains", "unseen domains"]
    pairs = differences(runs_of["FedReID"], runs_of["FedAvg"], "global", "unseen")
    return f"{tabulate(rows, headers=headers)}\nFedReID minus FedAvg, mAP on unseen domains, by seed: {pairs}"


def compare_tuning(name: str, tuned: dict[str, list[Run]]) -> str:
    """Table 6: fine-tuning on own domains."""
    rows = [[label, cell(runs, "personalised", "seen")] for label, runs in tuned.items()]
    pairs = differences(*(tuned[label] for label in TUNED), "personalised", "seen")
    table = tabulate(rows, headers=[f"{name}, fine-tuned", "own domains, mAP / rank-1"])
    return f"{table}\nwith minus without the expert, mAP by seed: {pairs}"


def differences(ours: list[Run], theirs: list[Run], kind: str, domains: str) -> str:
    """Return what ours gain in mAP, seed by seed."""
    gains = (score(a, kind, domains) - score(b, kind, domains) for a, b in zip(ours, theirs, strict=True))
    return ", ".join(f"{gain:+.1f}" for gain in gains)


def compare_noise(name: str, runs_of: dict[str, list[Run]]) -> str:
    """Figure 3, and differential privacy."""
    rows = []
    for label, runs in runs_of.items():
        kind = "global" if f"test/global/unseen/{METRICS[0]}" in runs[0].summary["final"]["metrics"] else "personalised"
        epsilon = runs[0].log[ROUNDS].get("privacy/epsilon", float("nan"))
        bound = "-" if np.isnan(epsilon) else f"{epsilon:.0f}"
        rows.append([label, kind, cell(runs, kind, "unseen"), bound])
    return tabulate(rows, headers=[f"{name}, mAP / rank-1", "models", "unseen domains", "epsilon"])


def study(name: str, setting: Options, clients: dict[str, Options], folder: Path, weights: str) -> None:
    """Run and print all tables of one data set; ``clients``: more clients to tune for -> their data."""
    runs_of = run_all(METHODS, setting, folder, weights)
    runs_of["parameter average"] = from_weights("parameter average", runs_of["Local"], NOBODY, setting, mean=True)
    print(compare_methods(name, runs_of), end="\n\n", flush=True)
    for who, data in {"own clients": (), **clients}.items():
        tuned = {label: from_weights(f"{who}, {label}", runs_of["FedReID"], row, (*setting, *data))
                 for label, row in TUNED.items()}  # fmt: skip
        print(compare_tuning(f"{name}, {who}", tuned), end="\n\n", flush=True)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", required=True, help="ImageNet weights of MobileNetV2 0.35, pixels from -1 to 1")
    parser.add_argument("--people", action="store_true", help="drawn people")
    parser.add_argument("--omniglot", help="folder of Omniglot's alphabets in Market-1501's layout")
    parser.add_argument("--noise", action="store_true", help="Figure 3, on Omniglot")
    parser.add_argument("--runs", type=Path, default=Path("runs/fedreid"))
    args = parser.parse_args()
    if not (args.people or args.omniglot) or (args.noise and not args.omniglot):
        parser.error("give --people, or --omniglot, or both; --noise is on Omniglot")
    if args.people:
        newcomers = {"newcomers": ("--data.source.seed", "1")}
        drawn = ("--config", str(ROOT / "configs" / "quickstart.yaml"))
        study("drawn people", drawn, newcomers, args.runs / "drawn people", args.weights)
    omniglot = ("--config", str(ROOT / "configs" / "omniglot.yaml"), "--data.source.root", args.omniglot)
    if args.omniglot:
        study("Omniglot", omniglot, {}, args.runs / "Omniglot", args.weights)
    if args.noise:
        noise = run_all(NOISE, (*omniglot, *for_rounds(ROUNDS)), args.runs / "noise", args.weights)
        print(compare_noise("Omniglot, FedReID", noise))


if __name__ == "__main__":
    main()
