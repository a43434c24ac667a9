"""What paper 003 observes, looked for on drawn people and on Omniglot: 3 seeds, everything declared here before a run.

The paper's observations: federated by camera is far behind by identity (Table 2); clients' local models are ahead of
the federated model on their own data (Figure 6); small clients gain most from taking part (Section 4.2); distillation
on public images, here of an unseen domain, makes curves smoother and seldom higher (Section 5.1); cosine distance
weight is ahead of weights by size (Section 5.2), for which uniform weights are the control. Here nothing is like the
paper but the methods: the networks, the images and the number of rounds are small.

    python benchmarks/fedreidbench.py --omniglot FOLDER    # of tests' data: six clients, two unseen alphabets
    python benchmarks/fedreidbench.py                      # drawn people only

Runs go below --runs, and those that are there already are not repeated.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.stats import spearmanr
from tabulate import tabulate

from fedsim.data import FederatedDataModule, MarketFolders, SyntheticReID
from fedsim.report import Run
from seeded_runs import ROOT, SEEDS, fit, score, show

COMMON = ("--data.val", "none", "--trainer.devices", "2", "--trainer.accelerator", "cpu")


@dataclass(frozen=True)
class Setting:
    """A data set, and how it is divided by camera and by identity."""

    name: str
    config: tuple[str, ...]
    options: tuple[str, ...]
    divided: tuple[str, ...]
    """source of the scenarios of Table 2"""
    parts: int
    """clients per data set by identity: as many as cameras"""
    data: FederatedDataModule


FEDPAV = ("--model.method", "FedPav")
METHODS: dict[str, tuple[str, ...]] = {
    "Local": ("--model.method", "Local"),
    "FedPav": (*FEDPAV, "--model.method.weighting", "size"),
    "FedPav, uniform": (*FEDPAV, "--model.method.weighting", "uniform"),
    "FedPav, CDW": (*FEDPAV, "--model.method.weighting", "cdw"),
    "FedPav, KD": (*FEDPAV, "--model.method.distillation", "{every: 1}"),
    "FedPav, KD + CDW": (*FEDPAV, "--model.method.weighting", "cdw", "--model.method.distillation", "{every: 1}"),
}
"""of the table by data set; public images are added to those that distil"""


def settings(omniglot: str | None) -> list[Setting]:
    """Return what is run: drawn people, and Omniglot where its folder is given."""
    drawn = Setting(
        "drawn people",
        ("--config", str(ROOT / "configs" / "quickstart.yaml"), *COMMON),
        (),
        ("--data.source", "SyntheticReID", "--data.source.clients", "1", "--data.source.unseen", "0",
         "--data.source.scale", "2"),
        4,
        FederatedDataModule(SyntheticReID(), val="none"),
    )  # fmt: skip
    if omniglot is None:
        return [drawn]
    source = ("--data.source.root", omniglot)
    data = FederatedDataModule(MarketFolders(omniglot), val="none")
    config = ("--config", str(ROOT / "configs" / "omniglot.yaml"), *COMMON)
    return [drawn, Setting("Omniglot", config, source, source, 5, data)]


def compare_scenarios(setting: Setting, runs: Path) -> str:
    """Table 2: by camera against by identity, mean over the test sets of those who train."""
    rows = []
    for name, partition in (("by camera", ("by_camera",)), ("by identity", ("by_identity",)), ("union", ("union",))):
        options = (*setting.divided, *FEDPAV, "--data.partition", *partition, "--data.parts", str(setting.parts))
        group = [fit(runs / f"{name}-{s}", *setting.config, *options, "--seed_everything", str(s)) for s in SEEDS]
        rows.append([name, *(show(np.array([score(r, "global", "seen", m) for r in group])) for m in ("mAP", "rank1"))])
    return tabulate(rows, headers=[f"FedPav, {setting.name}", "mAP", "rank-1"])


def compare_methods(setting: Setting, runs: Path) -> str:
    """Tables 3, 4, 7 and 8, Figure 6: each client's own data, by method and kind of model; and who gains."""
    runs_of: dict[str, list[Run]] = {}
    for name, options in METHODS.items():
        public = ("--data.public", setting.data.federated.unseen[0]) if "KD" in name else ()
        every = (*setting.config, *setting.options, *options, *public)
        runs_of[name] = [fit(runs / f"{name}-{s}", *every, "--seed_everything", str(s)) for s in SEEDS]
    sizes = {client.name: client.num_images for client in setting.data.federated.clients}
    local = runs_of.pop("Local")
    columns: dict[str, tuple[list[Run], str]] = {"Local": (local, "personalised")}
    for name, group in runs_of.items():
        columns |= {f"{name}, {kind}": (group, kind) for kind in ("global", "local")}
    per_client = {
        label: {client: np.array([score(run, kind, client) for run in group]) for client in sizes}
        for label, (group, kind) in columns.items()
    }
    rows: list[list[object]] = [
        [client, sizes[client], *(show(scores[client]) for scores in per_client.values())] for client in sizes
    ]
    rows.append(["mean", "", *(show(np.mean(list(scores.values()), axis=0)) for scores in per_client.values())])
    lines = [tabulate(rows, headers=["mAP", "images", *per_client]), *map(fluctuation, runs_of, runs_of.values())]
    for label, scores in per_client.items():
        if label != "Local":
            gains = {client: float((scores[client] - per_client["Local"][client]).mean()) for client in sizes}
            order = spearmanr(list(sizes.values()), list(gains.values())).statistic
            lines.append(f"{label}: gain over Local by size of the client, rank correlation {order:+.2f}")
    return "\n".join(lines)


def fluctuation(name: str, group: list[Run]) -> str:
    """Figures 7, 8 and 11 to 14: how far the global model's mAP moves from one evaluation to the next, percent."""
    key = "test/global/seen/mAP"
    curves = [np.array([row[key] for row in run.log.values() if key in row]) for run in group]
    moves = np.array([100 * np.abs(np.diff(curve))[len(curve) // 2 :].mean() for curve in curves])
    return f"{name}: mean move of the global mAP between evaluations of the second half, {show(moves)}"


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--omniglot", help="folder of Omniglot's alphabets in Market-1501's layout")
    parser.add_argument("--runs", type=Path, default=Path("runs/fedreidbench"))
    args = parser.parse_args()
    for setting in settings(args.omniglot):
        folder = args.runs / setting.name
        print(compare_scenarios(setting, folder / "scenarios"), end="\n\n")
        print(compare_methods(setting, folder / "methods"), end="\n\n")


if __name__ == "__main__":
    main()
