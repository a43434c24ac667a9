"""FedKLPR and what paper 004 compares it with, on clients without labels: accuracy against bytes at 70 % pruned.

All is declared here before a run. Drawn people (four clients of 144 to 480 images) and Omniglot (four clients of 220 to
400; the two largest alphabets are left out to save time) learn nothing about identities: all methods cluster alike. Of
each person there are 6 to 12 drawings, in 2 to 4 cameras: clusters as docs/unsupervised.md has them for small data
sets. Of each character there are 20: the paper's numbers. Networks and images are small, and weights are not
pretrained, so nothing here says anything about the paper's tables. "Idle weights" are the drawn people again, with a
network of which nine weights in ten have no effect, and are small: there a method that prunes by magnitude has the
right ones to take, and what it costs in accuracy is its own doing.

Twenty rounds of two epochs, as many rounds as in the paper, so that all can reach 70 % with their own defaults:
FedKLPR nine points a round, LotteryFL and SubFedAvg a tenth of what is left, FedDIP with a mask in every round.
FedKLPR stands there three times, with three measures of the accuracy that decides: ``rank1``, the default,
``centroids``, and ``classifier``, the proxies as the last batch has left them.

Below them stand raw pixels, ranked by their cosine, and the untrained network. What is sent is counted as fedsim counts
by default: pruned weights as values and a bit for each position, masks when they change, first downloads too.

    python benchmarks/fedklpr.py --figure docs/fedklpr.png
    python benchmarks/fedklpr.py --omniglot FOLDER --rounds 20 --seeds 0 1 2 --methods FedCAPR FedKLPR

All in one process with one thread. Runs go below --runs, and those that are there already are not repeated: take a new
folder for other rounds. Without --omniglot the drawn people are alone.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from tabulate import tabulate
from torch import Tensor, nn

from fedsim.__main__ import main as run_fedsim
from fedsim.data import FederatedDataModule, MarketFolders, SyntheticReID
from fedsim.evaluation.ranker import rank_features
from fedsim.evaluation.ranking import RetrievalLabels
from fedsim.models import SmallCNN
from fedsim.report import Run, read_run
from seeded_runs import ROOT, SEEDS, score, show

METRICS = ("mAP", "rank1")
KINDS = ("global", "local", "personalised")
TARGET = ("--model.method.target", "0.7")
COMMON = (
    "--data.val", "none", "--trainer.accelerator", "cpu", "--trainer.devices", "1",
    "--trainer.enable_progress_bar", "false", "--model.client.local_epochs", "2",
    "--model.client.batch_size", "32", "--model.client.num_instances", "4", "--model.neck.bias", "false",
)  # fmt: skip
METHODS: dict[str, tuple[str, ...]] = {
    "FedCAPR": ("--model.method", "FedCAPR"),
    "FedKLPR": ("--model.method", "FedKLPR", *TARGET),
    "FedKLPR, centroids": ("--model.method", "FedKLPR", *TARGET, "--model.method.accuracy", "centroids"),
    "FedKLPR, classifier": ("--model.method", "FedKLPR", *TARGET, "--model.method.accuracy", "classifier"),
    "LotteryFL": ("--model.method", "LotteryFL", *TARGET),
    "SubFedAvg": ("--model.method", "SubFedAvg", *TARGET),
    "FedDIP": ("--model.method", "FedDIP", *TARGET, "--model.method.reconfig_interval", "1"),
}
UNTRAINED = ("--model.method", "FedCAPR", "--model.availability.drop", "1.0")


class IdleCNN(SmallCNN):
    """The small network, of which three quarters of the channels between layers are always 0.

    The weights that write or read them, nine in ten, have no effect, and begin smaller than the others.
    """

    def __init__(self, width: int = 16) -> None:
        super().__init__(width=width)
        *inner, _ = (module for module in self.modules() if isinstance(module, nn.BatchNorm2d))
        for module in inner:
            module.register_forward_hook(_silence)
        with torch.no_grad():
            for module in self.modules():
                if isinstance(module, nn.Conv2d):
                    if module.in_channels > 3:
                        module.weight[:, module.in_channels // 4 :] *= 1e-3
                    if module.out_channels < 4 * width:
                        module.weight[module.out_channels // 4 :] *= 1e-3


def _silence(module: nn.Module, inputs: object, maps: Tensor) -> Tensor:  # noqa: ARG001 - a hook's
    """Let only the first quarter of the channels of [B, C, H, W] through."""
    count = maps.shape[1] // 4
    return torch.cat([maps[:, :count], torch.zeros_like(maps[:, count:])], dim=1)


@dataclass(frozen=True)
class Setting:
    """A data set and how its images are clustered."""

    name: str
    options: tuple[str, ...]
    data: FederatedDataModule


def settings(omniglot: str | None) -> list[Setting]:
    """Return the data sets and networks."""
    people = (
        "--config", str(ROOT / "configs" / "quickstart.yaml"), "--data.source.clients", "4", "--data.source.unseen",
        "0", "--data.size", "[40, 20]", "--model.backbone.width", "16", "--model.client.cluster.k1", "8",
        "--model.client.cluster.k2", "2", "--model.client.cluster.min_samples", "2",
    )  # fmt: skip
    drawn = FederatedDataModule(SyntheticReID(clients=4, unseen=0), val="none", size=(40, 20))
    idle = (*people, "--model.backbone", "fedklpr.IdleCNN")
    data_sets = [Setting("drawn people", people, drawn), Setting("idle weights", idle, drawn)]
    if omniglot is None:
        return data_sets
    left_out = ["Japanese_katakana", "Sanskrit"]
    letters = (
        "--config", str(ROOT / "configs" / "omniglot.yaml"), "--data.source.root", omniglot, "--data.size", "[24, 24]",
        "--data.unseen", f"[{', '.join(left_out)}]", "--model.client.cluster.k1", "20",
        "--model.client.cluster.k2", "6", "--model.client.cluster.min_samples", "4",
    )  # fmt: skip
    written = FederatedDataModule(MarketFolders(omniglot), val="none", size=(24, 24), unseen=left_out)
    return [*data_sets, Setting("Omniglot", letters, written)]


def fit(folder: Path, *options: str) -> Run:
    """Run ``fedsim fit`` in this process, unless it has been run to its end; the last round is scored."""
    if not ((folder / "summary.json").is_file() and read_run(folder).summary["finished"]):
        with contextlib.redirect_stdout(io.StringIO()):
            code = run_fedsim(["fit", *options, "--run_dir", str(folder), "--overwrite", "true"])
        if code:
            sys.exit(code)
    return read_run(folder)


def for_rounds(rounds: int) -> tuple[str, ...]:
    """Return the options for a run that is scored after its last round only."""
    return ("--trainer.max_epochs", str(rounds), "--trainer.check_val_every_n_epoch", str(rounds))


def run_all(setting: Setting, folder: Path, args: argparse.Namespace) -> dict[str, list[Run]]:
    """Return the runs of each method, one per seed; the untrained network last."""
    rows = {name: (*METHODS[name], *for_rounds(args.rounds)) for name in args.methods}
    if "FedDIP" in rows:
        rows["FedDIP"] += ("--model.method.rounds", str(args.rounds))
    rows["untrained"] = (*UNTRAINED, *for_rounds(1))
    common = (*setting.options, *COMMON)
    return {
        name: [fit(folder / f"{name}-{s}", *common, *options, "--seed_everything", str(s)) for s in args.seeds]
        for name, options in rows.items()
    }


def scores(runs: list[Run], kind: str, metric: str) -> NDArray[np.float64]:
    """Return the clients' mean score of the last round, one per seed, percent."""
    return np.array([score(run, kind, "seen", metric) for run in runs])


def megabytes(runs: list[Run]) -> NDArray[np.float64]:
    """Return what was sent in all rounds, one per seed."""
    return np.array([run.log[max(run.log)]["comm/total_bytes"] / 1e6 for run in runs])


def left(runs: list[Run]) -> str:
    """Return the share of the clients' parameters that is left at the end, percent."""
    return show(np.array([100 * run.log[max(run.log)].get("comm/density", 1.0) for run in runs]))


def raw_pixels(data: FederatedDataModule) -> dict[str, float]:
    """Return what raw pixels reach on the clients' test sets, percent."""
    percents: dict[str, list[float]] = {metric: [] for metric in METRICS}
    for client in data.federated.clients:
        test = data.federated.tests[client.name]
        q, g = test.query, test.gallery
        features = [part.images.decode(data.size).float().flatten(1) / 255 - 0.5 for part in (q, g)]
        ranking = rank_features(*features, RetrievalLabels(q.pids, q.camids, g.pids, g.camids, own=test.own))
        percents["mAP"].append(100 * ranking.mAP)
        percents["rank1"].append(100 * ranking.rank1)
    return {metric: float(np.mean(values)) for metric, values in percents.items()}


def compare(name: str, runs_of: dict[str, list[Run]], pixels: dict[str, float]) -> str:
    """Return the table of a data set."""
    first = next(iter(runs_of))
    whole = megabytes(runs_of[first]).mean()
    rows = []
    for label, runs in runs_of.items():
        if label == "untrained":
            continue
        cells = [" / ".join(show(scores(runs, kind, metric)) for metric in METRICS) for kind in KINDS]
        rows.append([label, left(runs), show(megabytes(runs)), f"{megabytes(runs).mean() / whole:.2f}", *cells])
    untrained = " / ".join(show(scores(runs_of["untrained"], "global", metric)) for metric in METRICS)
    rows.append(["untrained", "", "", "", untrained, "", ""])
    rows.append(["raw pixels", "", "", "", " / ".join(f"{value:.1f}" for value in pixels.values()), "", ""])
    return tabulate(rows, headers=[f"{name}, mAP / rank-1", "left, %", "MB sent", f"of {first}'s", *KINDS])


def draw(runs_of: dict[str, dict[str, list[Run]]], pixels: dict[str, dict[str, float]], path: Path) -> None:
    """Draw mAP against bytes, a panel for each data set."""
    with mpl.rc_context({"font.size": 9}):
        figure = Figure(figsize=(9, 3.6), layout="constrained")
        for axes, (name, runs) in zip(np.atleast_1d(figure.subplots(1, len(runs_of))), runs_of.items(), strict=True):
            for colour, label in enumerate(name for name in runs if name != "untrained"):
                x = megabytes(runs[label])
                for kind, fill in (("global", "full"), ("local", "none")):
                    y = scores(runs[label], kind, "mAP")
                    axes.errorbar(
                        x.mean(), y.mean(), y.std(), x.std(), fmt="o", color=f"C{colour}", fillstyle=fill,
                        label=f"{label}, {kind}",
                    )  # fmt: skip
            axes.axhline(pixels[name]["mAP"], color="grey", linestyle=":", label="raw pixels")
            untrained = scores(runs["untrained"], "global", "mAP").mean()
            axes.axhline(untrained, color="grey", linestyle="--", label="untrained")
            axes.set(xlabel="MB sent", ylabel="mAP (%)", title=name)
            axes.spines[["top", "right"]].set_visible(False)
        figure.legend(*axes.get_legend_handles_labels(), frameon=False, loc="outside right center")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=90)


def main() -> None:
    """Run, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--omniglot", help="folder of Omniglot's alphabets in Market-1501's layout")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS), metavar="METHOD")
    parser.add_argument("--runs", type=Path, default=Path("runs/fedklpr"))
    parser.add_argument("--figure", type=Path, help="where to draw the picture")
    args = parser.parse_args()
    runs_of, pixels = {}, {}
    for setting in settings(args.omniglot):
        pixels[setting.name] = raw_pixels(setting.data)
        runs_of[setting.name] = run_all(setting, args.runs / setting.name, args)
        print(compare(setting.name, runs_of[setting.name], pixels[setting.name]), end="\n\n", flush=True)
    if args.figure:
        draw(runs_of, pixels, args.figure)


if __name__ == "__main__":
    main()
