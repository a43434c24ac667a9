"""The verdict on each claim of a study, by the one rule of docs/results.md.

    python benchmarks/verdicts.py "60.2 ± 6.6 against 52.9 ± 7.5" "by seed +16.4, +14.8, +15.0"

The words are all claims of one study, as tables print them: means ± standard deviations over three seeds, or values by
seed, which then decide. A claim is shown if the 95 % interval of its difference is above 0, or within a margin if it is
a claim of equality (``--within 3``). The interval is Student's over seeds in pairs, or Welch's from means and
deviations. Holm's method widens it for the number of claims (Scandinavian Journal of Statistics 6, 1979).
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats
from tabulate import tabulate

from fedsim.report.significance import holm

LEVEL = 0.05
SEEDS = 3
"""of means with deviations; differences by seed are counted"""
_NUMBER = r"[+-]?\d+(?:\.\d+)?"
_VALUES = rf"({_NUMBER}(?:, {_NUMBER})+)"
_SPREAD = rf"({_NUMBER}) ± ({_NUMBER})"


class Claim(NamedTuple):
    """That A is ahead of B, or with a margin that they are equal within it; differences in points."""

    mean: float
    """by how much A is ahead"""
    error: float
    """standard error of the mean"""
    freedom: float
    """degrees of freedom of Student's t"""
    margin: float = 0.0


def paired(gains: Sequence[float]) -> Claim:
    """Return the claim of differences by seed [S >= 2]."""
    return Claim(float(np.mean(gains)), float(stats.sem(gains)), len(gains) - 1)


def unpaired(ahead: tuple[float, float], behind: tuple[float, float], seeds: int = SEEDS) -> Claim:
    """Return the claim of two means over ``seeds`` each; an argument is a mean and its standard deviation.

    The degrees of freedom are those of Welch (Biometrika 34, 1947).
    """
    variances = np.square([ahead[1], behind[1]]) / seeds
    total = float(variances.sum())
    freedom = total**2 * (seeds - 1) / float(np.square(variances).sum()) if total else seeds - 1
    return Claim(ahead[0] - behind[0], total**0.5, freedom)


def chance(claim: Claim) -> float:
    """Return p: below 0.05 if and only if the 95 % interval excludes 0, or lies within a margin.

    Without any spread there is nothing to compare with: p is 1.
    """
    if claim.error < 1e-9:
        return 1.0
    ways = np.array([claim.margin + claim.mean, claim.margin - claim.mean])
    low, high = stats.t.sf(ways / claim.error, claim.freedom)
    return min(1.0, 2 * float(max(low, high) if claim.margin else min(low, high)))


def verdicts(claims: Sequence[Claim]) -> list[str]:
    """Return the verdicts on all claims of a study."""
    words = ["yes" if claim.margin or claim.mean > 0 else "no, behind" for claim in claims]
    chances = holm([chance(claim) for claim in claims])
    return [word if p < LEVEL else "not shown" for word, p in zip(words, chances, strict=True)]


def read_figures(text: str, margin: float = 0.0) -> Iterator[Claim]:
    """Yield the claims of a cell of a table, whose parts are divided by semicolons; other figures are none."""
    for part in text.split(";"):
        if lists := re.search(rf"by seed {_VALUES}(?: against {_VALUES})?|(?<!\S){_VALUES}\s*$", part):
            ahead, behind = (np.array((values or "0").split(","), float) for values in (lists[1] or lists[3], lists[2]))
            yield paired(ahead - behind)._replace(margin=margin)
        elif means := re.search(rf"{_SPREAD} against {_SPREAD}", part):
            a, of_a, b, of_b = map(float, means.groups())
            yield unpaired((a, of_a), (b, of_b))._replace(margin=margin)


def main() -> None:
    """Print the verdict on each claim that is given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("claims", nargs="+")
    parser.add_argument("--within", type=float, default=0.0, help="margin of claims of equality, points")
    args = parser.parse_args()
    texts, claims = zip(
        *((text, claim) for text in args.claims for claim in read_figures(text, args.within)), strict=True
    )
    chances = [chance(claim) for claim in claims]
    rows = [
        [text, f"{claim.mean:+.1f}", f"{p:.4f}", f"{corrected:.4f}", word]
        for text, claim, p, corrected, word in zip(texts, claims, chances, holm(chances), verdicts(claims), strict=True)
    ]
    print(tabulate(rows, headers=["claim", "points", "p", "p by Holm", "verdict"], disable_numparse=True))


if __name__ == "__main__":
    main()
