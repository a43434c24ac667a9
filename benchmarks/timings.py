"""FedPav under four timings, with one slow client of ten: 40 simulated seconds each, 3 seeds, declared before a run.

Data and network are those of configs/timing/slow_client.yaml: nine clients take a second per session, town0, which has
the most images, takes four. All runs end after 40 simulated seconds (FedAsync after 39): 10 synchronous rounds, 40
steps of a buffer of nine, 40 rounds that drop town0, or 360 steps of FedAsync, whose buffer is one and whose share is
0.6 (configs/timing/fedasync.yaml).

Scores    of the global model at the end: the mean over the ten clients' own test sets, town0's alone, the unseen town.
          Nothing is chosen.
Work      time is equal, work is not: answers of town0 are printed beside.

A claim is a difference in mAP, seed by seed. Verdicts are those of verdicts.py (the record of 2026-11-25 has them
without Holm's method). All are in CLAIMS.

    python benchmarks/timings.py

Runs go below --runs, and those that are there already are not repeated.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tabulate import tabulate

from pretrained import Claim, Options, Runs, by_seed, gain, mean_ap
from seeded_runs import ROOT, SEEDS, fit, show
from verdicts import paired, verdicts

COMMON: Options = ("--config", str(ROOT / "configs" / "timing" / "slow_client.yaml"))
BUFFERED: Options = ("--model.timing", "Buffered", "--model.timing.buffer")
TIMINGS: dict[str, tuple[int, int, Options]] = {
    "synchronous": (10, 10, ()),
    "buffer of nine": (40, 40, (*BUFFERED, "9")),
    "town0 dropped": (40, 40, ("--model.timing", "Deadline", "--model.timing.first", "9")),
    "FedAsync": (360, 360, (*BUFFERED, "1", "--model.timing.mix", "0.6")),
}
"""timing -> rounds, rounds between two evaluations, options"""
SETS = ("seen", "town0", "unseen")
CLAIMS = tuple(
    Claim(text, (ahead, "global"), (behind, "global"), domain)
    for text, ahead, behind, domain in (
        ("a buffer is ahead on all clients", "buffer of nine", "synchronous", "seen"),
        ("waiting is ahead for the slow client", "synchronous", "buffer of nine", "town0"),
        ("a buffer is ahead of dropping for the slow client", "buffer of nine", "town0 dropped", "town0"),
        ("waiting is ahead on an unseen town", "synchronous", "buffer of nine", "unseen"),
        ("a buffer of nine is ahead of FedAsync on all clients", "buffer of nine", "FedAsync", "seen"),
    )
)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/timings"))
    folder = parser.parse_args().runs
    runs: Runs = {name: [] for name in TIMINGS}
    for seed in SEEDS:
        for name, (rounds, every, options) in TIMINGS.items():
            length = ("--trainer.max_epochs", str(rounds), "--trainer.check_val_every_n_epoch", str(every))
            place = folder / f"{name.replace(' ', '-')}-{seed}"
            runs[name].append(fit(place, *COMMON, *length, *options, "--seed_everything", str(seed)))
    rows = []
    for name, of_seeds in runs.items():
        scores = [show(mean_ap(runs, (name, "global"), domain)) for domain in SETS]
        answers = sum(row.get("comm/town0/up_bytes", 0) > 0 for run in of_seeds for row in run.log.values())
        rows.append([name, *scores, f"{answers / len(of_seeds):.1f}"])
    print(tabulate(rows, headers=["timing", *(f"{domain}, mAP" for domain in SETS), "answers of town0"]), end="\n\n")
    gains = [gain(runs, claim.ahead, claim.behind, claim.domains) for claim in CLAIMS]
    words = verdicts([paired(of_claim) for of_claim in gains])
    table = [[claim.text, by_seed(of_claim), word] for claim, of_claim, word in zip(CLAIMS, gains, words, strict=True)]
    print(tabulate(table, headers=["claim", "difference in mAP, by seed", "verdict"]))


if __name__ == "__main__":
    main()
