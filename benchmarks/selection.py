"""What paper 002 observes, looked for on drawn people and on Omniglot: 3 seeds, all declared here before a run.

Table 10: selection by upper confidence bounds, distances of parameters as weights and attention together ("adaptive")
are ahead of none of them ("plain"): all clients, weights by size, no attention. Table 8: attention alone helps. The
paper shows neither selection nor weights alone; here all eight combinations run, and what each of the three changes is
the mean over the four combinations of the other two, seed by seed.

Beside them stands a random half of the clients in each round: what selection gains must be more than what a random one
does. One row has MS-CAM as it is shipped (norm_init: convert); AFF fuses residual sums or stages, which this small
network has not.

Equal work is a table of its own (--equal: this table alone). Every run of it trains on as many images as all clients do
in 12 rounds: it ends after the first round in which that number is reached. Steps and bytes are printed beside, and
differ. Rows: UCB with each of its rewards (argmax of Eq. (11), argmin of the prose, soft), the random half, all
clients; the clients alone; and all data in one place. UCB is ahead of a row if it is with each of the three seeds.

With weights by size the reward goes to the largest of the selected clients (docs/selection.md), so selection then is by
size; Eq. (11) is meant for distances.

Scores are those of the global model after the last round, on pooled features: embeddings stay with the clients, as in
the paper. Clients alone have their own models; on unseen domains theirs is the mean of their scores. All else is unlike
the paper: configs/quickstart.yaml's drawn people (six clients, two unseen) and configs/omniglot.yaml (six alphabets,
two unseen), a small network from nothing, cross-entropy alone, Adam, 12 rounds of one epoch, three of six clients
selected, one architecture. Attention is MS-CAM on the last map and starts as published (norm_init: random), for there
are no pretrained weights to spare. The paper has no unseen domains.

    python benchmarks/selection.py                      # drawn people
    python benchmarks/selection.py --equal              # the same, equal work alone
    python benchmarks/selection.py --omniglot FOLDER    # both; tests' data, in Market-1501's layout

Runs go below --runs, and those that are there already are not repeated.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tabulate import tabulate

from equal_images import read_work
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
MOST_ROUNDS = 5 * ROUNDS
"""in which any selection of half of the clients has trained on as many images as all in ``ROUNDS``"""
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
EQUAL: Choice = {
    "all": (*WEIGHTINGS["cdw_param"], *SELECTIONS["all"]),
    "random": (*WEIGHTINGS["cdw_param"], *RANDOM),
    **{
        f"UCB {reward}": (*WEIGHTINGS["cdw_param"], *SELECTIONS["UCB"], "--model.selection.reward", reward)
        for reward in REWARDS
    },
    "clients alone": ("--model.method", "Local"),
    "all data in one place": ("--model.method", "FedPav", "--data.partition", "union"),
}
"""rows of equal work; the first one's images are the measure"""
SHIPPED: Row = ("all", "size", "mscam, convert")


def rows() -> dict[Row, tuple[str, ...]]:
    """Return the options of each row: all combinations, then the others."""
    return {row: row_options(row) for row in (*itertools.product(*FACTORS.values()), *CONTROLS, SHIPPED)}


def row_options(row: Row) -> tuple[str, ...]:
    """Return the options of one row."""
    selection, weighting, attention = row
    selected = RANDOM if selection == "random" else SELECTIONS[selection]
    network = ("--model.backbone.fam", "mscam") if row == SHIPPED else ATTENTIONS[attention]
    return (*WEIGHTINGS[weighting], *network, *selected, *length(ROUNDS))


def length(rounds: int) -> tuple[str, ...]:
    """Return the options of a run of so many rounds, with one evaluation at its end."""
    return ("--trainer.max_epochs", str(rounds), "--trainer.check_val_every_n_epoch", str(rounds))


def run_all(setting: tuple[str, ...], folder: Path) -> dict[Row, list[Run]]:
    """Return the runs of each row, one per seed."""
    runs: dict[Row, list[Run]] = {row: [] for row in rows()}
    for seed in SEEDS:
        for row, options in rows().items():
            words = (*setting, *COMMON, *options, "--seed_everything", str(seed))
            runs[row].append(fit(folder / f"{'-'.join(row).replace(', ', '-').replace(' ', '-')}-{seed}", *words))
    return runs


def run_equal(setting: tuple[str, ...], folder: Path) -> dict[str, list[Run]]:
    """Return the runs of each row of equal work, one per seed."""
    runs: dict[str, list[Run]] = {row: [] for row in EQUAL}
    for seed in SEEDS:
        images = None
        for row, options in EQUAL.items():
            rounds = ROUNDS if images is None else MOST_ROUNDS
            counter = json.dumps([{"class_path": "equal_images.CountWork", "init_args": {"images": images}}])
            common = (*COMMON, "--trainer.callbacks", counter, "--seed_everything", str(seed))
            run = fit(folder / f"equal-{row.replace(' ', '-')}-{seed}", *setting, *common, *options, *length(rounds))
            images = images or read_work(run.folder).images
            runs[row].append(run)
    return runs


def equal_tables(name: str, runs: dict[str, list[Run]]) -> str:
    """Return work and scores of each row of equal work, then UCB against the others in mAP, seed by seed."""
    table = []
    for row, seeds in runs.items():
        work = [read_work(run.folder) for run in seeds]
        columns = ([w.rounds for w in work], [w.images for w in work], [w.steps for w in work])
        cells = [" / ".join(show(own_scores(seeds, domains, metric)) for metric in METRICS) for domains in DOMAINS]
        sent = ", ".join(f"{w.bytes / 1e9:.4f}" for w in work)
        table.append([row, *(", ".join(map(str, column)) for column in columns), sent, *cells])
    headers = ["selection", "rounds, by seed", "images", "steps", "GB sent", f"{name}: own, mAP / rank-1", "unseen"]
    gains = []
    for row, control in itertools.product([row for row in runs if row.startswith("UCB")], runs):
        if not control.startswith("UCB"):
            by_domain = [own_scores(runs[row], d) - own_scores(runs[control], d) for d in DOMAINS]
            gains.append(
                [f"{row}, not {control}", *(", ".join(f"{gain:+.1f}" for gain in gains) for gains in by_domain)]
            )
    changes = ["equal images: change in mAP, by seed", "own", "unseen"]
    tables = (
        tabulate(rows, headers=head, disable_numparse=True) for rows, head in ((table, headers), (gains, changes))
    )
    return "\n\n".join(tables)


def own_scores(runs: list[Run], domains: str, metric: str = "mAP") -> NDArray[np.float64]:
    """Return the score of the model that each run delivers, percent, for each seed."""
    return np.array([score(run, run.primary, domains, metric) for run in runs])


def scores(runs: list[Run], domains: str, metric: str = "mAP") -> NDArray[np.float64]:
    """Return the global model's score, percent, for each seed."""
    return np.array([score(run, "global", domains, metric) for run in runs])


def score_table(name: str, runs_of: dict[Row, list[Run]]) -> str:
    """Return ``mAP / rank-1`` of each row over seeds, and how many client rounds it has trained."""
    table = []
    for row, runs in runs_of.items():
        trained = CLIENTS * ROUNDS if row[0] == "all" else SELECTED * ROUNDS
        cells = [" / ".join(show(scores(runs, domains, metric)) for metric in METRICS) for domains in DOMAINS]
        table.append([*row, trained, *cells])
    headers = [*FACTORS, "client rounds", f"{name}: clients' own domains, mAP / rank-1", "unseen domains"]
    return tabulate(table, headers=headers)


def change_table(runs_of: dict[Row, list[Run]]) -> str:
    """Return what each factor changes, in mAP, seed by seed; then adaptive against plain, and UCB against random."""
    pairs: dict[str, list[tuple[Row, Row]]] = {}
    for place, (factor, (first, second)) in enumerate(FACTORS.items()):
        changed = [row for row in itertools.product(*FACTORS.values()) if row[place] == second]
        without = [(*row[:place], first, *row[place + 1 :]) for row in changed]
        pairs[f"{factor}: {second}, not {first}"] = list(zip(changed, without, strict=True))
    pairs["all three: adaptive, not plain"] = [(ADAPTIVE, PLAIN)]
    for control in CONTROLS:
        pairs[f"UCB, not random; {control[1]}, {control[2]}"] = [(("UCB", *control[1:]), control)]
    pairs["attention as shipped, not none"] = [(SHIPPED, PLAIN)]
    table = []
    for label, compared in pairs.items():
        gains = [mean_gain(runs_of, compared, domains) for domains in DOMAINS]
        table.append([label, *(", ".join(f"{gain:+.1f}" for gain in of_domains) for of_domains in gains)])
    return tabulate(
        table, headers=["change in mAP, by seed", "clients' own domains", "unseen domains"], disable_numparse=True
    )


def mean_gain(runs_of: dict[Row, list[Run]], compared: list[tuple[Row, Row]], domains: str) -> NDArray[np.float64]:
    """Return the mean over pairs of rows of the difference in mAP, for each seed."""
    gains: NDArray[np.float64] = np.mean(
        [scores(runs_of[a], domains) - scores(runs_of[b], domains) for a, b in compared], 0
    )
    return gains


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--omniglot", help="folder of Omniglot's alphabets in Market-1501's layout")
    parser.add_argument("--equal", action="store_true", help="the rows of equal work alone")
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
        print(equal_tables(name, run_equal(setting, args.runs / name)), end="\n\n", flush=True)
        if not args.equal:
            runs_of = run_all(setting, args.runs / name)
            print(score_table(name, runs_of), change_table(runs_of), sep="\n\n", end="\n\n", flush=True)


if __name__ == "__main__":
    main()
