"""What paper 000 observes, looked for on drawn people, Omniglot and groceries: 3 seeds, all declared here before a run.

Table 4, components: local specific normalisation (LSN) and attentive normalisation (AN) help on the clients' own
domains, and more together; LSN alone is behind the baseline on unseen domains, which Dual makes good without a change
on the clients' own. Table 6, normalisation layers on unseen domains: Dual is ahead of the mean of the clients' layers
(Avg) and of their features side by side (FeatConcat), initial layers (RandImg) are far behind all.

Clients alone and all data in one place, in as many rounds, are the bounds of Table 4 (declared on 2026-11-25, and not
run yet in these settings: docs/claims/000-ska.md has them for eight rounds).

Scores are those of the last round: pooled features, Euclidean distance, as in the paper; clients' own domains by their
own models, unseen ones by the server's. Nothing else is like the paper but the methods:

Drawn people  four towns and two new ones of configs/quickstart.yaml, 10 rounds from nothing. Towns differ in cameras,
              colours and backgrounds.
Lights        the same pictures, but each town has one contrast and one brightness of its own, LIGHTS: what
              normalisation layers take up, by construction.
Omniglot      configs/omniglot.yaml: six alphabets train a small CNN from nothing, two are unseen; 20 rounds. So
              attention starts as in its papers (norm_init: random), and "RandImg" has an untrained network's layers.
Grocery       paper 000's protocol with an ImageNet MobileNetV2 of width 0.35 on images of 96 x 96; 5 rounds,
              and no mirror images in the evaluation: a matter of time. Rates are 0.003 and 0.03: at the paper's
              0.01 and 0.1 the loss of this network rises again. Packages and vegetables train, fruit is unseen: it has
              the most images to be tested on. Attention starts from what the network computes without it (norm_init:
              convert).

    python benchmarks/ska.py --people FOLDER                    # an empty folder: the pictures are written there
    python benchmarks/ska.py --omniglot FOLDER                  # tests' data, in Market-1501's layout
    python benchmarks/ska.py --grocery FOLDER --weights mobilenet_v2_w035_features.pth

Runs go below --runs, and those that are there already are not repeated. LSN's run gives three rows of Table 6: the
server's model is Avg, all clients' models together are FeatConcat, its last checkpoint with initial layers is RandImg.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tabulate import tabulate

from fedsim.cli.rank import rank_file
from fedsim.data import SyntheticReID
from fedsim.data.images import Split
from fedsim.papers.files import read_paper
from fedsim.report import Run
from seeded_runs import ROOT, SEEDS, fedsim, fit, score, show

Scores = NDArray[np.float64]
"""mAP and rank-1, percent"""

METRICS = ("mAP", "rank1")
COMMON = (
    "--data.val", "none", "--data.source", "MarketFolders", "--trainer.accelerator", "cpu", "--trainer.devices", "1",
    "--model.evaluation.layer", "pool", "--model.evaluation.distance", "euclidean",
)  # fmt: skip
BASELINE = (
    "--model.method", "FedAvg", "--model.method.share_head", "false", "--model.method.share_neck", "false",
    "--model.method.weighting", "uniform",
)  # fmt: skip
LSN = ("--model.method", "SKA", "--model.method.dual", "false", "--model.method.unseen", "avg",
       "--model.evaluation.ensemble", "true")  # fmt: skip
DUAL = ("--model.method", "SKA", "--model.method.dual", "true")
ROWS: dict[str, tuple[tuple[str, ...], bool]] = {
    "Baseline": (BASELINE, False),
    "+AN": (BASELINE, True),
    "+LSN": (LSN, False),
    "+LSN+Dual": (DUAL, False),
    "+LSN+AN": (LSN, True),
    "+LSN+AN+Dual": (DUAL, True),
    "clients alone": (("--model.method", "Local"), False),
    "all data in one place": (("--model.method", "FedPav", "--data.partition", "union"), False),
}
"""of Table 4, and the two bounds: the method, and whether the network has attentive normalisation"""


@dataclass(frozen=True)
class Setting:
    """A data set and a network."""

    name: str
    options: tuple[str, ...]
    attention: tuple[str, ...]
    """what turns the network into one with attentive normalisation"""
    rounds: int
    unseen: tuple[str, ...]


LIGHTS = ((1.0, 0), (0.5, 0), (0.5, 128), (0.25, 96), (0.7, 20), (0.4, 80))
"""contrast and brightness of four towns, then of the two new ones: a byte x becomes contrast * x + brightness"""


def people(folder: Path, has_lights: bool) -> Setting:
    """Return drawn people, whose pictures are written into ``folder`` unless they are there."""
    name = "Lights" if has_lights else "Drawn people"
    root = folder / name.replace(" ", "-")
    domains = SyntheticReID(clients=4, unseen=2).domains()
    for domain, (contrast, brightness) in zip(domains, LIGHTS if has_lights else [(1.0, 0)] * 6, strict=True):
        for part, split in (("bounding_box_train", domain.train), ("query", domain.query),
                            ("bounding_box_test", domain.gallery)):  # fmt: skip
            if split is not None and not (root / domain.name / part).is_dir():
                _write(root / domain.name / part, split, contrast, brightness)
    options = ("--config", str(ROOT / "configs" / "quickstart.yaml"), *COMMON, "--data.source.root", str(root))
    attention = ("--model.backbone.norm", "attentive", "--model.backbone.norm_init", "random")
    return Setting(name, options, attention, 10, ("new0", "new1"))


def _write(folder: Path, split: Split, contrast: float, brightness: int) -> None:
    folder.mkdir(parents=True)
    pixels = split.images.decode((64, 32)).permute(0, 2, 3, 1).numpy() * contrast + brightness
    for i, (image, pid, cam) in enumerate(zip(pixels, split.pids, split.camids, strict=True)):
        path = folder / f"{pid:04d}_c{cam + 1}s1_{i:06d}_00.png"
        Image.fromarray(image.round().clip(0, 255).astype(np.uint8)).save(path)


def omniglot(folder: str) -> Setting:
    """Return the setting in which nothing is pretrained."""
    options = ("--config", str(ROOT / "configs" / "omniglot.yaml"), *COMMON, "--data.source.root", folder)
    attention = ("--model.backbone.norm", "attentive", "--model.backbone.norm_init", "random")
    return Setting("Omniglot", options, attention, 20, ("Greek", "Tagalog"))


def grocery(folder: str, weights: str) -> Setting:
    """Return the setting with an ImageNet network."""
    options = (
        "--config", json.dumps(read_paper("000").content["protocol"]), *COMMON, "--data.source.root", folder,
        "--data.unseen", '["fruit"]', "--data.size", "[96, 96]", "--model.backbone", "MobileNetV2",
        "--model.backbone.width", "0.35", "--model.backbone.weights", weights, "--model.backbone.norm_eps", "1e-3",
        "--model.backbone.pixels", "symmetric", "--model.evaluation.flip", "false",
        "--model.client.optimizer.lr", "0.003", "--model.client.head_lr", "0.03",
    )  # fmt: skip
    attention = ("--model.backbone.norm", "attentive", "--model.backbone.norm_init", "convert")
    return Setting("Grocery", options, attention, 5, ("fruit",))


def run_all(setting: Setting, folder: Path, at_once: int) -> dict[str, list[Run]]:
    """Return the runs of each row of Table 4, one per seed; so many are run at a time."""
    rounds = str(setting.rounds)
    common = (*setting.options, "--trainer.max_epochs", rounds, "--trainer.check_val_every_n_epoch", rounds)

    def run(name: str, seed: int) -> Run:
        method, has_attention = ROWS[name]
        # the means of LSN are made in the last round alone
        options = (*method, "--model.method.avg_every", rounds) if method is LSN else method
        network = setting.attention if has_attention else ()
        return fit(folder / f"{name}-{seed}", *common, *options, *network, "--seed_everything", str(seed))

    with ThreadPoolExecutor(at_once) as pool:  # of threads that wait for processes
        waiting = {(name, seed): pool.submit(run, name, seed) for seed in SEEDS for name in ROWS}
        return {name: [waiting[name, seed].result() for seed in SEEDS] for name in ROWS}


def own_scores(run: Run) -> Scores:
    """Return mAP and rank-1 of the clients' own models on their own domains, their mean."""
    return np.array([score(run, run.primary, "seen", metric) for metric in METRICS])


def unseen_scores(run: Run, kind: str = "global") -> Scores:
    """Return mAP and rank-1 on unseen domains, their mean."""
    return np.array([score(run, kind, "unseen", metric) for metric in METRICS])


def initial_scores(run: Run, setting: Setting) -> Scores:
    """Return a run's scores on unseen domains with initial normalisation layers (RandImg)."""
    folder = run.folder / "imagenet"
    if not folder.is_dir():
        checkpoint = str(run.folder / "checkpoints" / "last.ckpt")
        config = ("--config", str(run.folder / "config.yaml"), "--ckpt_path", checkpoint)
        fedsim("predict", *config, "--model.method.unseen", "imagenet", "--run_dir", str(folder))
    ranked = [
        json.loads(rank_file(str(folder / "features" / f"{name}.npz"), distance="euclidean", json=True))
        for name in setting.unseen
    ]
    return np.array([100 * np.mean([scores[metric] for scores in ranked]) for metric in METRICS])


def cell(scores: list[Scores]) -> str:
    """Return ``mAP / rank-1`` over seeds."""
    return " / ".join(show(column) for column in np.array(scores).T)


def component_table(setting: Setting, runs_of: dict[str, list[Run]]) -> str:
    """Table 4, and whether Dual changes anything on the clients' own domains."""
    kinds = {"clients alone": "personalised"}  # on unseen domains the mean of the clients' scores
    rows = [
        [name, cell([own_scores(r) for r in runs]), cell([unseen_scores(r, kinds.get(name, "global")) for r in runs])]
        for name, runs in runs_of.items()
    ]
    lines = [tabulate(rows, headers=[f"{setting.name}, mAP / rank-1", "clients' own domains", "unseen domains"])]
    for name in ("+LSN", "+LSN+AN"):
        pairs = zip(runs_of[name], runs_of[f"{name}+Dual"], strict=True)
        is_equal = all(personal_metrics(static) == personal_metrics(dual) for static, dual in pairs)
        lines.append(
            f"{name} and {name}+Dual on the clients' own domains: {'the same numbers' if is_equal else 'DIFFERENT'}"
        )
    return "\n".join(lines)


def personal_metrics(run: Run) -> dict[str, float]:
    """Return all scores of the clients' own models."""
    return {name: value for name, value in run.summary["final"]["metrics"].items() if "/personalised/" in name}


def norm_table(setting: Setting, runs_of: dict[str, list[Run]]) -> str:
    """Table 6, with attentive normalisation as in the paper, and without."""
    columns = {}
    for label, suffix in (("with AN", "+AN"), ("without AN", "")):
        lsn, dual = runs_of[f"+LSN{suffix}"], runs_of[f"+LSN{suffix}+Dual"]
        columns[label] = {
            "Dual": [unseen_scores(run) for run in dual],
            "Avg": [unseen_scores(run) for run in lsn],
            "FeatConcat": [unseen_scores(run, "ensemble") for run in lsn],
            "RandImg": [initial_scores(run, setting) for run in lsn],
        }
    names = columns["with AN"]
    rows = [[name, *(cell(column[name]) for column in columns.values())] for name in names]
    return tabulate(rows, headers=[f"{setting.name}, unseen, mAP / rank-1", *columns])


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--people", type=Path, help="folder for the pictures of drawn people")
    parser.add_argument("--omniglot", help="folder of Omniglot's alphabets in Market-1501's layout")
    parser.add_argument("--grocery", help="folder of fruit, packages and vegetables in Market-1501's layout")
    parser.add_argument("--weights", help="ImageNet weights of MobileNetV2 0.35 that take pixels from -1 to 1")
    parser.add_argument("--runs", type=Path, default=Path("runs/ska"))
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    args = parser.parse_args()
    if bool(args.grocery) != bool(args.weights) or not (args.people or args.omniglot or args.grocery):
        parser.error("give --people, --omniglot, or --grocery and --weights")
    chosen = [people(args.people, has_lights) for has_lights in (False, True)] if args.people else []
    chosen += [omniglot(args.omniglot)] if args.omniglot else []
    chosen += [grocery(args.grocery, args.weights)] if args.grocery else []
    for setting in chosen:
        runs_of = run_all(setting, args.runs / setting.name, args.jobs)
        print(component_table(setting, runs_of), end="\n\n")
        print(norm_table(setting, runs_of), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
