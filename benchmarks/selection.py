"""What paper 002 observes, looked for on drawn people and on Omniglot: 3 seeds, all declared here before a run.

Table 10: selection by upper confidence bounds, distances of parameters as weights and attention together ("adaptive")
are ahead of none of them ("plain"): all clients, weights by size, no attention. Table 8: attention alone helps. The
paper shows neither selection nor weights alone; here all eight combinations run, and what each of the three changes is
the mean over the four combinations of the other two, seed by seed.

Beside them stands a random half of the clients in each round: what selection gains must be more than what a random one
does, as both train half as much as all clients. Rows of equal work have twice the rounds, so as many client rounds as
"all": UCB with each of its rewards (argmax of Eq. (11), argmin of the prose, soft) and the random half. One row has
MS-CAM as it is shipped (norm_init: convert); AFF fuses residual sums or stages, which this small network has not.

With weights by size the reward goes to the largest of the selected clients (docs/selection.md), so selection then is by
size; Eq. (11) is meant for distances.

Scores are those of the global model after the last round, on pooled features: embeddings stay with the clients, as in
the paper. Everything else is unlike it: configs/quickstart.yaml's drawn people (six clients, two unseen) and
configs/omniglot.yaml (six alphabets, two unseen), a small network from nothing, cross-entropy alone, Adam, 12 rounds of
one epoch, three of six clients selected, one architecture. Attention is MS-CAM on the last map and starts as published
(norm_init: random), for there are no pretrained weights to spare. The paper has no unseen domains.

    python benchmarks/selection.py                      # drawn people
    python benchmarks/selection.py --omniglot FOLDER    # both; tests' data, in Market-1501's layout

Runs go below --runs, and those that are there already are not repeated.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tabulate import tabulate

from fedsim.report import Run
from seeded_runs import ROOT, SEEDS, fit, score, show

ROUNDS = 12
CLIENTS = 6
SELECTED = 3
METRICS = ("mAP", "rank1")
DOMAINS = ("seen", "unseen")
COMMON = (
    "--data.val", "none", "--trainer.accelerator", "cpu", "--trainer.devices", "1", "--model.evaluation.layer", "pool",
)  # fmt: skip

Choice = dict[str, tuple[str, ...]]
"""name -> options"""

SELECTIONS: Choice = {
    "all": ("--model.selection", "AllClients"),
    "UCB": ("--model.selection", "UCB", "--model.selection.count", str(SELECTED), "--model.selection.rho", "1.0"),
}
EQUAL_WORK = 2 * ROUNDS
"""rounds in which half of the clients train as often as all do in ``ROUNDS``"""
REWARDS = ("argmax", "argmin", "soft")
RANDOM = ("--model.selection", "RandomFraction", "--model.selection.fraction", str(SELECTED / CLIENTS))
WEIGHTINGS: Choice = {
    "size": ("--model.method", "FedAvg", "--model.method.share_head", "false", "--model.method.share_neck", "false",
             "--model.method.weighting", "size"),
    "cdw_param": ("--model.method", "WeightedPav", "--model.method.weighting", "cdw_param"),
}  # fmt: skip
ATTENTIONS: Choice = {
    "none": ("--model.backbone.fam", "none"),
    "mscam": ("--model.backbone.fam", "mscam", "--model.backbone.norm_init", "random"),
}
FACTORS = {"selection": SELECTIONS, "weighting": WEIGHTINGS, "attention": ATTENTIONS}

Row = tuple[str, ...]
"""selection, weighting, attention"""

PLAIN: Row = ("all", "size", "none")
ADAPTIVE: Row = ("UCB", "cdw_param", "mscam")
CONTROLS: tuple[Row, ...] = (("random", "size", "none"), ("random", *ADAPTIVE[1:]))
EQUAL: tuple[Row, ...] = (
    ("random, equal work", "cdw_param", "none"),
    *((f"UCB {reward}, equal work", "cdw_param", "none") for reward in REWARDS),
)
SHIPPED: Row = ("all", "size", "mscam, convert")


def rows() -> dict[Row, tuple[str, ...]]:
    """Return the options of each row: all combinations, then the others."""
    return {row: row_options(row) for row in (*itertools.product(*FACTORS.values()), *CONTROLS, *EQUAL, SHIPPED)}


def row_options(row: Row) -> tuple[str, ...]:
    """Return the options of one row."""
    selection, weighting, attention = row
    name, _, work = selection.partition(", ")
    chosen = RANDOM if name == "random" else SELECTIONS[name.partition(" ")[0]]
    if reward := name.partition(" ")[2]:
        chosen = (*chosen, "--model.selection.reward", reward)
    rounds = str(EQUAL_WORK if work else ROUNDS)
    how = ("--model.backbone.fam", "mscam") if row == SHIPPED else ATTENTIONS[attention]
    often = ("--trainer.max_epochs", rounds, "--trainer.check_val_every_n_epoch", rounds)
    return (*WEIGHTINGS[weighting], *how, *chosen, *often)


def run_all(setting: tuple[str, ...], folder: Path) -> dict[Row, list[Run]]:
    """Return the runs of each row, one per seed."""
    found: dict[Row, list[Run]] = {row: [] for row in rows()}
    for seed in SEEDS:
        for row, options in rows().items():
            how = (*setting, *COMMON, *options, "--seed_everything", str(seed))
            found[row].append(fit(folder / f"{'-'.join(row).replace(', ', '-').replace(' ', '-')}-{seed}", *how))
    return found


def scores(runs: list[Run], domains: str, metric: str = "mAP") -> NDArray[np.float64]:
    """Return the global model's score, percent, for each seed."""
    return np.array([score(run, "global", domains, metric) for run in runs])


def score_table(name: str, found: dict[Row, list[Run]]) -> str:
    """Return ``mAP / rank-1`` of each row over seeds, and how many client rounds it has trained."""
    table = []
    for row, runs in found.items():
        trained = CLIENTS * ROUNDS if row[0] == "all" or row in EQUAL else SELECTED * ROUNDS
        cells = [" / ".join(show(scores(runs, domains, metric)) for metric in METRICS) for domains in DOMAINS]
        table.append([*row, trained, *cells])
    headers = [*FACTORS, "client rounds", f"{name}: clients' own domains, mAP / rank-1", "unseen domains"]
    return tabulate(table, headers=headers)


def change_table(found: dict[Row, list[Run]]) -> str:
    """Return what each factor changes, in mAP, seed by seed; then adaptive against plain, and UCB against random."""
    pairs: dict[str, list[tuple[Row, Row]]] = {}
    for place, (factor, (first, second)) in enumerate(FACTORS.items()):
        changed = [row for row in itertools.product(*FACTORS.values()) if row[place] == second]
        without = [(*row[:place], first, *row[place + 1 :]) for row in changed]
        pairs[f"{factor}: {second}, not {first}"] = list(zip(changed, without, strict=True))
    pairs["all three: adaptive, not plain"] = [(ADAPTIVE, PLAIN)]
    for control in CONTROLS:
        pairs[f"UCB, not random; {control[1]}, {control[2]}"] = [(("UCB", *control[1:]), control)]
    for row in EQUAL[1:]:
        pairs[f"{row[0]}, not random"] = [(row, EQUAL[0])]
        pairs[f"{row[0]}, not all"] = [(row, ("all", *row[1:]))]
    pairs["attention as shipped, not none"] = [(SHIPPED, PLAIN)]
    table = []
    for label, compared in pairs.items():
        gains = [mean_gain(found, compared, domains) for domains in DOMAINS]
        table.append([label, *(", ".join(f"{gain:+.1f}" for gain in of_domains) for of_domains in gains)])
    return tabulate(
        table, headers=["change in mAP, by seed", "clients' own domains", "unseen domains"], disable_numparse=True
    )


def mean_gain(found: dict[Row, list[Run]], compared: list[tuple[Row, Row]], domains: str) -> NDArray[np.float64]:
    """Return the mean over pairs of rows of the difference in mAP, for each seed."""
    gains: NDArray[np.float64] = np.mean(
        [scores(found[a], domains) - scores(found[b], domains) for a, b in compared], 0
    )
    return gains


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--omniglot", help="folder of Omniglot's alphabets in Market-1501's layout")
    parser.add_argument("--runs", type=Path, default=Path("runs/selection"))
    args = parser.parse_args()
    drawn = ("--config", str(ROOT / "configs" / "quickstart.yaml"))
    settings = {"drawn people": drawn}
    if args.omniglot:
        settings["Omniglot"] = (
            "--config",
            str(ROOT / "configs" / "omniglot.yaml"),
            "--data.source.root",
            args.omniglot,
        )
    for name, setting in settings.items():
        found = run_all(setting, args.runs / name)
        print(score_table(name, found), change_table(found), sep="\n\n", end="\n\n", flush=True)


if __name__ == "__main__":
    main()
