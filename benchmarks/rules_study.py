"""Six rules under eight attacks by a tenth, two and three tenths of the clients: 5 seeds, declared before a run.

Data      One drawn town with four cameras and eight people, each with 12 pictures by each camera, dealt at random to
          ten clients, in all seeds alike. Tests have other pictures of the same people: 6 of each by each camera are
          queries, 4 the gallery. So this is no re-identification of strangers: that is not learnt in so few seconds,
          and a score that nothing moves would show nothing of a rule. The server of FLTrust has one more picture of
          each person and camera.
Training  rules_study.yaml: SmallCNN of width 8 with standardised images, from nothing; 30 rounds of the mean without an
          attacker, once for each seed, and from their checkpoint six rounds with a rule and an attack.
Attacks   ATTACKS: strengths are those of configs/recipes/attacks.yaml where it has the attack. The seed chooses the
          attackers. ``none`` never starts, and has the patch of the backdoor.
Rules     RULES, which know how many clients attack, and the mean undefended beside them.
Score     mAP of the global model after the last round, percent; of the backdoor also its success. A run that ends with
          an error has delivered nothing: its score is 0.
Seeds     of training and of the attackers' choice.
Claims    24. For each rule and share: over the eight attacks, its mean mAP is above that of the mean undefended. For
          each rule: without an attack, with the settings for two attackers, it is within 5 points of the mean. Verdicts
          are those of verdicts.py: Student's t by seed, Holm's method over the 24. Cells have none.

Trials had seed 0, without attack or rule: ten clients of several towns, or new people in the tests, stayed within 5
points of an untrained network (12 to 21) in 30 rounds; eight known people had a mAP of 44.1, untrained 12.5. Trials
with seed 90, which is none of the study's: the mean without an attack 67.2, under a sign flip by one client 17.1; under
inner products by three clients the mean 36.7, the rules 68.5 to 71.0. The success of the backdoor without an attack is
69.8 with a patch of 3 pixels and 33.2 with 2, so the patch has 2. A run took 2.1 CPU-seconds.

    python benchmarks/rules_study.py --seeds 0                                   # a slice
    python benchmarks/rules_study.py --record benchmarks/results/DAY-rules.md    # all, and the tables

All runs are in one process with one thread. A run has a line in ``runs.csv`` below --runs once it is over, and is not
repeated, so an interrupted study goes on with the same command.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats
from tabulate import tabulate
from torch import Tensor

from fedsim.__main__ import main as run_fedsim
from fedsim.data.images import Domain, Images, Index, ReIDSource, Size, Split
from fedsim.data.synthetic import SyntheticImages
from fedsim.report import read_run
from seeded_runs import is_finished, show
from verdicts import LEVEL, Claim, paired, verdicts

CONFIG = Path(__file__).with_suffix(".yaml")
SEEDS = tuple(range(5))
BEFORE, ROUNDS = 30, 36
CLIENTS, BAD = 10, (1, 2, 3)
PEOPLE, CAMERAS = 8, 4
MARGIN = 5.0
NEVER = 1_000_000
ATTACKS: Mapping[str, tuple[str, ...]] = {
    "none": ("Backdoor", "--model.attack.patch", "2"),
    "sign flip": ("SignFlip", "--model.attack.scale", "10"),
    "noise": ("GaussianNoise", "--model.attack.scale", "100"),
    "label flip": ("LabelFlip",),
    "backdoor": ("Backdoor", "--model.attack.patch", "2", "--model.attack.boost", "5"),
    "ALIE": ("ALIE", "--model.attack.z", "1.5"),
    "inner product": ("InnerProduct", "--model.attack.epsilon", "5"),
    "min-max": ("MinMax",),
    "min-sum": ("MinSum",),
}
RULE = "--model.aggregation"
FIXED: Mapping[str, tuple[str, ...]] = {
    "mean": (),
    "median": (RULE, "Median"),
    "geometric median": (RULE, "GeometricMedian"),
    "FLTrust": (RULE, "FLTrust"),
}
"""rules without a number of attackers"""
RULES = ("median", "trimmed mean", "Multi-Krum", "geometric median", "NNM, trimmed mean", "FLTrust")
FIELDS = ("rule", "attack", "bad", "seed", "mAP", "success", "cpu_seconds")


class Cell(NamedTuple):
    """One run."""

    rule: str
    attack: str
    bad: int
    """attackers of the ten clients; without an attack the number that the rule expects"""
    seed: int


class Score(NamedTuple):
    """The result of a run, percent."""

    precision: float
    """mAP"""
    success: float
    """of the backdoor; NaN without one"""


class Held(Images):
    """Pictures that are drawn once in a process."""

    def __init__(self, pictures: SyntheticImages) -> None:
        self.pictures = pictures

    def __len__(self) -> int:
        return len(self.pictures)

    def take(self, index: Index) -> Held:
        """Return the pictures at these positions."""
        return Held(self.pictures.take(index))

    def content(self) -> bytes:
        """Return a hash of all that they depend on."""
        return self.pictures.content()

    def decode(self, size: Size) -> Tensor:
        """Return all pictures."""
        pictures, keys = self.pictures, zip(*_keys_of(self.pictures), strict=True)
        whole = _drawn(pictures.domain, size)
        return whole[[_place(*key) for key in keys]]


SHOTS = {"train": range(12), "root": range(12, 13), "query": range(13, 19), "gallery": range(19, 23)}


@cache
def _drawn(town: str, size: Size) -> Tensor:
    """Return all pictures of a town, in the order of :func:`_place`."""
    shots = range(SHOTS["gallery"].stop)
    return SyntheticImages(0, town, *_all_keys(shots)).decode(size)


def _all_keys(shots: range) -> tuple[Index, Index, Index]:
    grid = np.meshgrid(np.arange(PEOPLE), np.arange(CAMERAS), np.array(shots), indexing="ij")
    people, cameras, numbers = (axis.flatten() for axis in grid)
    return people, cameras, numbers


def _keys_of(pictures: SyntheticImages) -> tuple[list[int], list[int], list[int]]:
    return pictures.identities.tolist(), pictures.cameras.tolist(), pictures.shots.tolist()


def _place(person: int, camera: int, shot: int) -> int:
    return (person * CAMERAS + camera) * SHOTS["gallery"].stop + shot


def _split(part: str) -> Split:
    people, cameras, shots = _all_keys(SHOTS[part])
    return Split(Held(SyntheticImages(0, "town", people, cameras, shots)), people, cameras)


class Town(ReIDSource):
    """Eight people before four cameras, and one more picture of each for the server."""

    def domains(self) -> list[Domain]:
        """Return the town, and the server's pictures."""
        empty = _split("root").take(np.zeros(0, np.int64))
        return [
            Domain("town", _split("train"), _split("query"), _split("gallery")),
            Domain("root", _split("root"), empty, empty),
        ]


def rule_options(rule: str, bad: int) -> tuple[str, ...]:
    """Return the options of a rule for so many attackers."""
    if rule in FIXED:
        return FIXED[rule]
    trimmed = ("TrimmedMean", f"{RULE}.trim", str(bad / CLIENTS))
    if rule == "trimmed mean":
        return (RULE, *trimmed)
    if rule == "Multi-Krum":
        return (RULE, "Krum", f"{RULE}.bad", str(bad), f"{RULE}.keep", str(CLIENTS - bad))
    inner = (f"{RULE}.rule", "TrimmedMean", f"{RULE}.rule.init_args.trim", str(bad / CLIENTS))
    return (RULE, "NearestNeighbourMixing", f"{RULE}.bad", str(bad), *inner)


def cells(seeds: Sequence[int]) -> Iterator[Cell]:
    """Yield all runs, seed by seed; without an attack, a rule of FIXED has one run for all shares."""
    for seed, rule, attack, bad in itertools.product(seeds, ("mean", *RULES), ATTACKS, BAD):
        if attack != "none" or rule not in FIXED or bad == BAD[0]:
            yield Cell(rule, attack, bad, seed)


def fit(folder: Path, *options: str) -> bool:
    """Train in this process; return whether the run came to its end. A signal, which says nothing of that, ends all."""
    with redirect_stdout(StringIO()):
        code = run_fedsim(["fit", "--config", str(CONFIG), *options, "--run_dir", str(folder), "--overwrite", "true"])
    if code > 2:
        raise SystemExit(code)
    return code == 0


def warm_up(folder: Path, seed: int) -> Path:
    """Return the checkpoint of the rounds before all attacks, which are run once."""
    run = folder / f"before-{seed}"
    checkpoint = run / "checkpoints" / "last.ckpt"
    if not is_finished(run):
        length = ("--trainer.max_epochs", str(BEFORE), "--trainer.check_val_every_n_epoch", str(BEFORE))
        if not fit(run, *length, "--seed_everything", str(seed)):
            raise SystemExit(f"{run}: failed")
    return checkpoint


def play(cell: Cell, folder: Path) -> Score:
    """Run one cell; only its score stays."""
    checkpoint, run = warm_up(folder, cell.seed), folder / "now"
    start = NEVER if cell.attack == "none" else BEFORE + 1
    attack = ("--model.attack", *ATTACKS[cell.attack], "--model.attack.attackers", str(cell.bad / CLIENTS))
    began = ("--model.attack.start", str(start), "--ckpt_path", str(checkpoint), "--seed_everything", str(cell.seed))
    ended = fit(run, *attack, *began, *rule_options(cell.rule, cell.bad))
    metrics = read_run(run).summary["final"]["metrics"] if ended else {}
    shutil.rmtree(run, ignore_errors=True)
    precision = metrics.get("test/global/seen/mAP", 0.0)
    return Score(100 * precision, 100 * metrics.get("attack/test/success", float("nan")))


def read(path: Path) -> dict[Cell, Score]:
    """Return the scores of the runs that are over."""
    if not path.is_file():
        return {}
    with path.open(newline="") as file:
        return {
            Cell(row["rule"], row["attack"], int(row["bad"]), int(row["seed"])): Score(
                float(row["mAP"]), float(row["success"])
            )
            for row in csv.DictReader(file)
        }


def run_missing(folder: Path, seeds: Sequence[int], most: int | None) -> None:
    """Run the cells that have no line yet, or the first ``most`` of them, and add their lines."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "runs.csv"
    finished = read(path)
    missing = [cell for cell in cells(seeds) if cell not in finished]
    for cell in missing[:most]:
        warm_up(folder, cell.seed)
        before = time.process_time()
        score = play(cell, folder)
        is_new = not path.is_file()
        with path.open("a", newline="") as file:
            writer = csv.writer(file)
            if is_new:
                writer.writerow(FIELDS)
            writer.writerow([*cell, *(f"{x:.4f}" for x in score), f"{time.process_time() - before:.2f}"])


Scores = Mapping[Cell, Score]


def by_seed(scores: Scores, seeds: Sequence[int], rule: str, attack: str, bad: int) -> NDArray[np.float64]:
    """Return the mAP of each seed."""
    number = BAD[0] if attack == "none" and rule in FIXED else bad
    return np.array([scores[Cell(rule, attack, number, seed)].precision for seed in seeds])


def score_table(scores: Scores, seeds: Sequence[int], bad: int) -> str:
    """Return mean and deviation of the mAP of each rule under each attack."""
    rows = [
        [rule, *(show(by_seed(scores, seeds, rule, attack, bad)) for attack in ATTACKS)] for rule in ("mean", *RULES)
    ]
    return tabulate(rows, headers=[f"{bad} of {CLIENTS} attack", *ATTACKS], tablefmt="github", disable_numparse=True)


def success_table(scores: Scores, seeds: Sequence[int]) -> str:
    """Return mean and deviation of the backdoor's success."""
    rows = []
    for rule in ("mean", *RULES):
        none = [scores[Cell(rule, "none", BAD[0], seed)].success for seed in seeds]
        attacked = [[scores[Cell(rule, "backdoor", bad, seed)].success for seed in seeds] for bad in BAD]
        rows.append([rule, *(show(np.array(values)) for values in (none, *attacked))])
    headers = ["success of the backdoor", "none", *(f"{bad} of {CLIENTS}" for bad in BAD)]
    return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)


def claims_of(scores: Scores, seeds: Sequence[int]) -> dict[str, Claim]:
    """Return the 24 claims by their words."""
    claims, attacks = {}, [attack for attack in ATTACKS if attack != "none"]
    for rule, bad in itertools.product(RULES, BAD):
        gains = [
            by_seed(scores, seeds, rule, attack, bad) - by_seed(scores, seeds, "mean", attack, bad)
            for attack in attacks
        ]
        claims[f"{rule}, {bad} attack: ahead of the mean"] = paired(np.mean(gains, axis=0).tolist())
    for rule in RULES:
        price = by_seed(scores, seeds, rule, "none", BAD[1]) - by_seed(scores, seeds, "mean", "none", BAD[1])
        claim = paired(price.tolist())
        claims[f"{rule}, no attack: within {MARGIN:g} of the mean"] = claim._replace(margin=MARGIN)
    return claims


def claim_table(claims: Mapping[str, Claim]) -> str:
    """Return each claim with its 95 % interval, and its verdict."""
    rows = []
    for (words, claim), verdict in zip(claims.items(), verdicts([*claims.values()]), strict=True):
        half = float(stats.t.ppf(1 - LEVEL / 2, claim.freedom)) * claim.error
        interval = f"{claim.mean - half:+.1f} to {claim.mean + half:+.1f}"
        rows.append([words, f"{claim.mean:+.1f}", interval, verdict])
    return tabulate(rows, headers=["claim", "points", "95 %", "verdict"], tablefmt="github", disable_numparse=True)


def report(scores: Scores, seeds: Sequence[int]) -> str:
    """Return the tables; claims need two seeds."""
    tables = [score_table(scores, seeds, bad) for bad in BAD] + [success_table(scores, seeds)]
    if len(seeds) > 1:
        tables.append(claim_table(claims_of(scores, seeds)))
    return "\n\n".join(tables)


def main() -> None:
    """Run what is missing, and print or write the tables if nothing is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/rules_study"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[*SEEDS])
    parser.add_argument("--most", type=int, help="end after so many runs")
    parser.add_argument("--record", type=Path, help="file that gets the tables")
    args = parser.parse_args()
    run_missing(args.runs, args.seeds, args.most)
    scores = read(args.runs / "runs.csv")
    if missing := [cell for cell in cells(args.seeds) if cell not in scores]:
        print(f"{len(missing)} runs are missing")
        return
    text = f"mAP, percent, mean ± standard deviation over {len(args.seeds)} seeds.\n\n{report(scores, args.seeds)}\n"
    if args.record:
        head = f"# Six rules under eight attacks\n\n- **Date:** {time.strftime('%Y-%m-%d')}. Not corrected since.\n"
        command = "- **Command:** `python benchmarks/rules_study.py`; its text is the declaration.\n\n"
        args.record.write_text(head + command + text)
    print(text)


if __name__ == "__main__":
    main()
