"""Unseen styles: what does a change of the pictures cost, with causes switched off in turn? Declared before a run.

The study of 2026-11-26 compared scores on unseen towns, and had no control for their cause, and no row that only
standardises each image. So here the outcome is a loss between two test sets of the same people, by the same model, that
differ in one thing (shifted_towns.py): the town of a client against a town without one, or against the same pictures
with another light, hue, blur, resolution or background.

    loss = (mAP seen - mAP changed) / (mAP seen - mAP of a random order)

Each mAP is the mean over three sets of 24 new people; a loss by a shift is the mean over its two doses. It is a share,
as rows differ by a factor of two in mAP, and none can fall far below a random order. Drops in points stand beside it,
and decide nothing.

Data      three drawn towns train, with 20, 16 and 15 people, as SyntheticReID draws them: with cameras, backgrounds,
          casts, blur and resolution of their own. No one is held out, and nothing chooses a round: the last one counts.
Training  SmallCNN of width 8 from nothing, BNNeck, 32 x 16, 20 rounds of one epoch, batches of 32 with 4 images of a
          person; SGD with rate 0.1, momentum 0.9 and weight decay 5e-4; cross-entropy with label smoothing 0.1, and
          the triplet loss of features of length 1; the augmentation of configs/quickstart.yaml.
Seeds     ten. Each draws people, towns, signs and training anew, so an interval is about all of these together.
          "--training 1" trains everything again on the same draws, which parts the luck of both.

| row              | differs from FedPav by                                        | is the control of            |
|------------------|---------------------------------------------------------------|------------------------------|
| standardised     | images standardised in the network, without a parameter       | SNR: a normalisation alone   |
| SNR              | its layer behind two stages, without its loss                 |                              |
| momentum 0       | no momentum, and ten times the rate: steps of about one size  |                              |
| twice the images | two epochs in a round                                         | DACS: its second images      |
| DACS             | the method, with its defaults                                 |                              |
| instance norm    | maps standardised behind two stages, in the places of SNR     | SNR: its gates               |
| IBN              | instance norms for half of the channels of the first 3 norms  |                              |
| colour jitter    | brightness, contrast, saturation 0.4 and hue 0.1 in training  |                              |

Omniglot is the negative control. Ink on paper has no photometric style, so SNR must leave the step from the clients'
alphabets to others as it is: loss = (mAP seen - mAP unseen) / mAP seen, of other characters. Ten trainings on the same
data, augmented as in configs/omniglot.yaml.

STAGES run in this order, each with all ten seeds. A claim has a verdict once its rows are whole; verdicts are those of
verdicts.py, Student's t by seed and Holm's method over all claims that have one. A stage that is cut short has none.

Trials had seeds 90 and 91, which are none of the study's. Size, width, rounds and rate were chosen by what they take.
mAP of "seen" and "town" with seed 90: 64 x 32, width 16, rate 0.03, 12 rounds: FedPav 24.1, 11.9, SNR 53.0, 21.3;
FedPav with 20 rounds 40.5, 15.2. Width 8, 20 rounds: FedPav 27.7, 12.9, SNR 51.4, 34.4, standardised 41.1, 36.5.
Width 8, rate 0.1, 12 rounds: FedPav 24.3, 8.0; with seed 91 32.0, 18.8, SNR 59.9, 54.1. So a row at 24 can lose 12
points where one at 53 loses 32: hence the share. 32 x 16, width 8, rate 0.1, 12 rounds: FedPav 28.0, 13.4,
standardised 24.5, 29.6, SNR 34.0, 33.7: so the study has 20 rounds. Momentum 0 with rate 1: 17.4, 10.0. No other row
was tried.

    python benchmarks/generalisation.py --omniglot FOLDER                 # in Market-1501's layout
    python benchmarks/generalisation.py --stages 1                        # the first of them
    python benchmarks/generalisation.py --weights mobilenet_v2_imagenet_features.pth

The last one is a study of its own: the rows of stage 1 on the same draws, from ImageNet's weights, with the claims on
them. MobileNetV2 of width 1.0, 64 x 32, 6 rounds, Adam with rate 0.001 and weight decay 5e-4, as in pretrained.py; all
else as above. Trials with seed 90, "seen" and "town" of three sets: FedPav 37.5, 29.7, standardised 34.1, 29.9; SNR of
two sets 30.2, 36.1. Nothing else was tried.

Runs go below --runs, and those that are there already are not repeated, so an interrupted study goes on with the same
command.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy import stats
from tabulate import tabulate

from fedsim.__main__ import main as run_fedsim
from fedsim.report import Run, read_run
from pretrained import by_seed
from seeded_runs import ROOT, is_finished, score, show
from shifted_towns import DOSES, SETS, SHIFTS
from verdicts import paired, verdicts

Options = tuple[str, ...]
Floats = NDArray[np.float64]
"""[S], a number per seed"""
Groups = Mapping[str, Sequence[Run]]
"""row -> a run per seed"""

SEEDS = range(10)
CONFIGS = ROOT / "configs"
COMMON: Options = (
    "--trainer.devices", "1", "--trainer.max_epochs", "20", "--trainer.check_val_every_n_epoch", "20",
    "--data.val", "none", "--model.method", "FedPav", "--model.backbone", "SmallCNN", "--model.backbone.width", "8",
    "--model.neck", "{kind: bnneck, dropout: 0.0}", "--model.client.batch_size", "32",
    "--model.client.sampler", "identity", "--model.client.num_instances", "4",
    "--model.client.channels_last", "true", "--model.evaluation.precision", "run", "--model.reduction", "fp32",
    "--model.client.optimizer",
    "{class_path: torch.optim.SGD, init_args: {lr: 0.1, momentum: 0.9, weight_decay: 5.0e-4}}",
    "--model.objective.triplet", "1.0", "--model.objective.unit_length", "true",
    "--model.evaluation.layer", "neck", "--model.evaluation.distance", "euclidean",
)  # fmt: skip
STYLE = "--model.backbone.style"
ROWS: dict[str, Options] = {
    "FedPav": (),
    "standardised": (STYLE, "{kind: standardise, after: [input]}"),
    "SNR": (STYLE, "{kind: snr, after: [layer1, layer2], reduction: 16}"),
    "momentum 0": ("--model.client.optimizer.momentum", "0.0", "--model.client.optimizer.lr", "1.0"),
    "twice the images": ("--model.client.local_epochs", "2"),
    "DACS": ("--model.method", "DACS"),
    "instance norm": (STYLE, "{kind: standardise, after: [layer1, layer2]}"),
    "IBN": ("--model.backbone", "shifted_towns.IBNCNN", "--model.backbone.width", "8"),
    "colour jitter": ("--data.augmentation.brightness", "0.4", "--data.augmentation.contrast", "0.4",
                      "--data.augmentation.saturation", "0.4", "--data.augmentation.hue", "0.1"),
}  # fmt: skip
TOWNS, OMNIGLOT, IMAGENET = "towns", "Omniglot", "ImageNet"
FROM_IMAGENET: Options = (
    "--model.backbone", "MobileNetV2", "--model.backbone.width", "1.0", "--data.size", "[64, 32]",
    "--trainer.max_epochs", "6", "--trainer.check_val_every_n_epoch", "6",
    "--model.client.optimizer", "{class_path: torch.optim.Adam, init_args: {lr: 0.001, weight_decay: 5.0e-4}}",
)  # fmt: skip
STAGES = (
    (TOWNS, ("FedPav", "standardised", "SNR")), (OMNIGLOT, ("FedPav", "SNR")), (TOWNS, ("momentum 0",)),
    (TOWNS, ("twice the images", "DACS")), (TOWNS, ("instance norm", "IBN", "colour jitter")),
)  # fmt: skip


@dataclass(frozen=True)
class Claim:
    """A row loses less by a change than another one; with a margin, as much within it."""

    text: str
    less: str
    more: str
    changes: tuple[str, ...]
    """the mean of their losses counts"""
    data: str = TOWNS
    margin: float = 0.0
    """percentage points of the loss"""


ALPHABETS = "other alphabets"
LEFT = ("hue", "blur", "resolution", "background")
"""what a mean and a deviation of an image undo in part or not at all"""
CLAIMS = (
    Claim("standardised images lose less by light than FedPav", "standardised", "FedPav", ("light",)),
    Claim("SNR loses less by another town than FedPav", "SNR", "FedPav", ("town",)),
    Claim("SNR loses less by another town than standardised images", "SNR", "standardised", ("town",)),
    Claim("SNR loses less by hue, blur, resolution and background than FedPav", "SNR", "FedPav", LEFT),
    Claim("Omniglot: SNR loses as much as FedPav, within 3 points", "SNR", "FedPav", (ALPHABETS,), OMNIGLOT, 3.0),
    Claim("DACS loses less by another town than twice the images", "DACS", "twice the images", ("town",)),
)

CLAIMS_FROM_IMAGENET = tuple(replace(claim, data=IMAGENET) for claim in CLAIMS[:4])
"""of a study of its own"""


def random_order(matches: int, wrong: int) -> float:
    """Return the mean average precision of random orders of a gallery with R matches among N images, percent.

    Place k holds a match with the probability R / N, and each place before it then does with q = (R - 1) / (N - 1). So
    the mean of the precision at k is (1 + (k - 1) q) / k, and that of all matches is q + (1 - q) sum_k 1 / (k N).

    >>> random_order(1, 1)
    75.0
    """
    size = matches + wrong
    q = (matches - 1) / (size - 1)
    return 100 * float(q + (1 - q) * np.mean(1 / np.arange(1, size + 1)))


RANDOM = float(np.mean([random_order(cameras - 1, 23 * cameras) for cameras in (4, 4, 3)]))
"""of the three sets of people: the gallery has a picture per person and camera, and the own one of a query is junk"""


def mean_ap(runs: Sequence[Run], view: str) -> Floats:
    """Return the mAP of a view, of a shift the mean over its doses: percent, the mean over the sets of people."""
    if view in (ALPHABETS, "alphabets"):
        return np.array([score(run, "global", "unseen" if view == ALPHABETS else "seen") for run in runs])
    views = [f"{view}-{dose}" for dose in DOSES] if view in SHIFTS else [view]
    sets = [f"people{number}-{name}" for number in range(SETS) for name in views]
    return np.array([np.mean([score(run, "global", name) for name in sets]) for run in runs])


def drops(runs: Sequence[Run], changes: Sequence[str]) -> Floats:
    """Return how many points of mAP are lost by changes, in the mean."""
    seen = mean_ap(runs, "alphabets" if ALPHABETS in changes else "seen")
    changed: Floats = np.mean([mean_ap(runs, change) for change in changes], axis=0)
    return seen - changed


def losses(runs: Sequence[Run], changes: Sequence[str]) -> Floats:
    """Return the share of the mAP above a random order that is lost by changes, in the mean; on Omniglot of all mAP.

    In percent.
    """
    above = mean_ap(runs, "alphabets") if ALPHABETS in changes else mean_ap(runs, "seen") - RANDOM
    return 100 * drops(runs, changes) / above


def fit(folder: Path, *options: str) -> Run:
    """Run ``fedsim fit`` in this process, which has drawn the pictures, unless it has been run to its end."""
    if not is_finished(folder):
        with redirect_stdout(StringIO()):
            code = run_fedsim(["fit", *options, "--run_dir", str(folder), "--overwrite", "true"])
        if code:
            sys.exit(code)
    return read_run(folder)


def train(args: argparse.Namespace, data: str, row: str, seed: int) -> Run:
    """Train a row with a seed; other trainings have the same draws of the towns."""
    if data == OMNIGLOT:
        of_data: Options = ("--config", str(CONFIGS / "omniglot.yaml"), "--data.source.root", args.omniglot)
    else:
        of_data = ("--config", str(CONFIGS / "quickstart.yaml"), "--data.size", "[32, 16]",
                   "--data.source", "shifted_towns.ShiftedTowns", "--data.source.seed", str(seed))  # fmt: skip
    start = (*FROM_IMAGENET, "--model.backbone.weights", args.weights) if data == IMAGENET else ()
    options = (*of_data, *COMMON, *start, *ROWS[row], "--seed_everything", str(seed + 1000 * args.training))
    return fit(args.runs / data / f"{row.replace(' ', '-')}-{seed}-{args.training}", *options)


def interval(values: Floats) -> str:
    """Return the mean with its 95 % interval over seeds: Student's t, without Holm's method."""
    half = float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values))
    return f"{values.mean():+.1f} ({values.mean() - half:+.1f} to {values.mean() + half:+.1f})"


def score_table(groups: Groups) -> str:
    """Return the mAP of all rows on all views."""
    views = ["seen", "town", *(f"{shift}-{dose}" for shift in SHIFTS for dose in DOSES)]
    rows = [[name, *(show(mean_ap(runs, view)) for view in views)] for name, runs in groups.items()]
    return tabulate(rows, headers=["mAP", *views], tablefmt="github", disable_numparse=True)


def loss_table(groups: Groups) -> str:
    """Return what all rows lose by all changes, and by how much less than FedPav."""
    changes = ("town", *SHIFTS)
    rows = [[name, *(show(losses(runs, [change])) for change in changes)] for name, runs in groups.items()]
    for name, runs in groups.items():
        gains = [losses(groups["FedPav"], [change]) - losses(runs, [change]) for change in changes]
        rows += [[f"{name}, less than FedPav", *map(interval, gains)]] if name != "FedPav" else []
    return tabulate(rows, headers=["loss, %", *changes], tablefmt="github", disable_numparse=True)


def control_table(groups: Groups) -> str:
    """Return the scores and losses of the negative control."""
    rows = [
        [name, *(show(mean_ap(runs, view)) for view in ("alphabets", ALPHABETS)), show(losses(runs, [ALPHABETS]))]
        for name, runs in groups.items()
    ]
    return tabulate(rows, headers=["Omniglot", "seen", "unseen", "loss, %"], tablefmt="github", disable_numparse=True)


def claim_table(groups: Mapping[str, Groups]) -> str:
    """Return the claims whose rows are whole: by how much less is lost, verdicts, and the same of drops in points."""
    declared = (*CLAIMS, *CLAIMS_FROM_IMAGENET)
    claims = [claim for claim in declared if {claim.less, claim.more} <= groups.get(claim.data, {}).keys()]
    gains, points = (
        [outcome(groups[c.data][c.more], c.changes) - outcome(groups[c.data][c.less], c.changes) for c in claims]
        for outcome in (losses, drops)
    )
    words = verdicts([paired(gain)._replace(margin=c.margin) for c, gain in zip(claims, gains, strict=True)])
    rows = [
        [claim.text, by_seed(gain), interval(gain), word, interval(point)]
        for claim, gain, word, point in zip(claims, gains, words, points, strict=True)
    ]
    headers = ["claim", "loss, % less, by seed", "mean, 95 % interval", "verdict", "drop, points less"]
    return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    stages = range(1, len(STAGES) + 1)
    parser.add_argument("--stages", type=int, choices=stages, default=len(STAGES), help="how many of them")
    parser.add_argument("--omniglot", help="folder of Omniglot's alphabets, which stage 2 needs")
    parser.add_argument("--weights", help="file of MobileNetV2 from ImageNet: run the study from there instead")
    parser.add_argument("--training", type=int, default=0, help="0: the study; 1: it is trained again on its draws")
    parser.add_argument("--runs", type=Path, default=Path("runs/generalisation"))
    args = parser.parse_args()
    if args.stages > 1 and not (args.omniglot or args.weights):
        parser.error("stage 2 needs --omniglot; give it, or --stages 1")
    groups: dict[str, dict[str, list[Run]]] = {TOWNS: {}, OMNIGLOT: {}, IMAGENET: {}}
    for data, rows in [(IMAGENET, STAGES[0][1])] if args.weights else STAGES[: args.stages]:
        for seed in SEEDS:
            for row in rows:
                groups[data].setdefault(row, []).append(train(args, data, row, seed))
    towns = groups[IMAGENET if args.weights else TOWNS]
    print(score_table(towns), loss_table(towns), sep="\n\n")
    print(*([control_table(groups[OMNIGLOT])] if groups[OMNIGLOT] else []), claim_table(groups), sep="\n\n")


if __name__ == "__main__":
    main()
