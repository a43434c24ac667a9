"""Statistical tests of differences between methods: over seeds, and over the identities of queries; by scipy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_RESAMPLES = 4999


class Estimate(NamedTuple):
    """An estimate with its uncertainty; fractions of 1."""

    value: float
    low: float
    """lower end of the 95 % confidence interval"""
    high: float
    p: float
    """probability of a difference at least this large if there is none; NaN if not requested or unknown"""
    over: str
    """the units of resampling, and their number"""


def over_people(values: Floats, pids: NDArray[np.int64], test: bool = False) -> Estimate:
    """Return the mean of queries' scores, with a bootstrap interval over people.

    A person is resampled with all their queries: these are not independent, so intervals over single queries would be
    too narrow. The interval is made of percentiles. With ``test``, the mean is also tested against 0, by sign changes
    per person.

    Args:
        values: [Q] scores, or differences of scores, NaN if a query does not count.
        pids: [Q] identities.
        test: whether to compute p.
    """
    from scipy import stats  # slow to import

    counted = np.isfinite(values)
    _, person = np.unique(pids[counted], return_inverse=True)
    sums = np.bincount(person, weights=values[counted])
    counts = np.bincount(person).astype(np.float64)
    value = float(sums.sum() / counts.sum())
    over = f"{len(sums)} people, {int(counts.sum())} queries"
    if len(sums) < 2:
        return Estimate(value, float("nan"), float("nan"), float("nan"), over)

    def mean(sums: Floats, counts: Floats, axis: int) -> Floats:
        of_samples: Floats = sums.sum(axis=axis) / counts.sum(axis=axis)
        return of_samples

    # the generator is fixed, so that a repeated report has the same numbers
    options = {"n_resamples": _RESAMPLES, "vectorized": True, "batch": 500}
    bootstrap = stats.bootstrap((sums, counts), mean, paired=True, method="percentile", rng=0, **options)
    low, high = bootstrap.confidence_interval
    p = float("nan")
    if test:
        total = counts.sum()
        signs = stats.permutation_test(
            (sums,),
            lambda sample, axis: sample.sum(axis=axis) / total,
            permutation_type="samples",
            rng=0,
            **options,
        )
        p = float(signs.pvalue)
    return Estimate(value, float(low), float(high), p, over)


def over_seeds(first: Floats, second: Floats) -> Estimate:
    """Return the mean difference between two methods over their common seeds, by Student's paired test.

    ``first`` and ``second`` are scores [seeds], two at least, in the same order.
    """
    from scipy import stats  # slow to import

    difference, over = first - second, f"{len(first)} seeds"
    value = float(difference.mean())
    if np.ptp(difference) < 1e-12:  # no spread to compare with
        return Estimate(value, math.nan, math.nan, 1.0 if value == 0 else math.nan, over)
    test = stats.ttest_rel(first, second)
    low, high = test.confidence_interval(0.95)
    return Estimate(value, float(low), float(high), float(test.pvalue), over)


def holm(chances: Sequence[float]) -> list[float]:
    """Return p-values corrected for their number, in their order (Holm, Scandinavian Journal of Statistics 6, 1979).

    NaN, of a test without a result, counts as a test, and stays NaN.

    >>> holm([0.04, math.nan, 0.01])
    [0.08, nan, 0.03]
    """
    corrected, largest = [math.nan] * len(chances), 0.0
    for rank, index in enumerate(np.argsort(chances)):  # NaN is the last
        if math.isnan(chances[index]):
            break
        largest = max(largest, min(1.0, chances[index] * (len(chances) - rank)))
        corrected[index] = largest
    return corrected


def adjusted(chances: Sequence[float]) -> list[float]:
    """Return p-values adjusted for the number of tests; NaN stays NaN."""
    from scipy import stats  # slow to import

    values = np.array(chances, dtype=np.float64)
    finite = np.isfinite(values)
    if finite.any():
        values[finite] = stats.false_discovery_control(values[finite])
    return [float(value) for value in values]


def percent_text(value: float, sign: str = "") -> str:
    """Write a fraction of 1 in percent; ``sign``: + to write it before what is not negative, too."""
    return f"{round(100 * value, 1) + 0.0:{sign}.1f}"  # no -0.0


def interval_text(estimate: Estimate) -> str:
    """Write an interval in percent; ``-`` without one."""
    return f"{percent_text(estimate.low)} to {percent_text(estimate.high)}" if np.isfinite(estimate.low) else "-"


def chance_text(p: float) -> str:
    """Write p; ``-`` if it is unknown."""
    return "-" if not np.isfinite(p) else f"{p:.3f}" if p >= 0.001 else "< 0.001"
