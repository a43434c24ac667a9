"""Whether methods differ by more than chance: over seeds, and over the people that test sets ask for; by scipy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedsim.report.groups import RunGroup
from fedsim.report.layout import Block
from fedsim.report.queries import Queries
from fedsim.report.rules import Rule
from fedsim.report.series import kind_of_last, label_of_line, queries_of

Floats = NDArray[np.float64]

_RESAMPLES = 4999
_ALL_PAIRS = 4
"""Groups that are all compared with each other; of more, each with the first."""
_MEANS = ("seen", "unseen")


class Estimate(NamedTuple):
    """A number with what chance leaves of it; fractions of 1."""

    value: float
    low: float
    """of the 95 % confidence interval"""
    high: float
    p: float
    """chance of a difference at least this large if there is none; NaN where that is not asked or not known"""
    over: str
    """what was drawn again"""


def over_people(values: Floats, pids: NDArray[np.int64], test: bool = False) -> Estimate:
    """Return the mean of queries' scores, with a bootstrap interval: people are drawn with all their queries.

    Queries of one person are not independent, so intervals over single queries would be too narrow. The interval is
    that of percentiles. ``test``: also test whether the mean is 0, by changing signs person by person.

    Args:
        values: [Q] scores, or differences of scores, NaN where a query does not count.
        pids: [Q] identities.
        test: whether to give p.
    """
    from scipy import stats  # slow to import

    there = np.isfinite(values)
    _, person = np.unique(pids[there], return_inverse=True)
    sums = np.bincount(person, weights=values[there])
    counts = np.bincount(person).astype(np.float64)
    value = float(sums.sum() / counts.sum())
    over = f"{len(sums)} people, {int(counts.sum())} queries"
    if len(sums) < 2:
        return Estimate(value, float("nan"), float("nan"), float("nan"), over)

    def mean(sums: Floats, counts: Floats, axis: int) -> Floats:
        of_draws: Floats = sums.sum(axis=axis) / counts.sum(axis=axis)
        return of_draws

    how = {"n_resamples": _RESAMPLES, "vectorized": True, "batch": 500}
    drawn = stats.bootstrap((sums, counts), mean, paired=True, method="percentile", rng=_draws(), **how)
    low, high = drawn.confidence_interval
    p = float("nan")
    if test:
        total = counts.sum()
        signs = stats.permutation_test(
            (sums,), lambda drawn, axis: drawn.sum(axis=axis) / total, permutation_type="samples", rng=_draws(), **how
        )
        p = float(signs.pvalue)
    return Estimate(value, float(low), float(high), p, over)


def over_seeds(first: Floats, second: Floats) -> Estimate:
    """Return the mean difference between two methods over seeds that both have, by Student's paired test.

    ``first`` and ``second`` are scores [seeds], two at least, in the same order.
    """
    from scipy import stats  # slow to import

    difference, over = first - second, f"{len(first)} seeds"
    value = float(difference.mean())
    if np.ptp(difference) < 1e-12:  # no spread to compare with
        return Estimate(value, value, value, 1.0 if value == 0 else float("nan"), over)
    found = stats.ttest_rel(first, second)
    low, high = found.confidence_interval(0.95)
    return Estimate(value, float(low), float(high), float(found.pvalue), over)


def intervals_table(groups: Sequence[RunGroup], names: Sequence[str], metrics: Sequence[str]) -> Block:
    """Return a table of the delivered models' scores at the last evaluation, with intervals over people.

    On unseen data sets it is the global model's of methods that deliver a client's own.
    """
    lines, missing = [], dict[str, None]()
    for group in groups:
        for name in (name for name in names if name not in _MEANS):
            for metric in metrics:
                found = _mean_queries(group, name, metric)
                if isinstance(found, str):
                    missing[found] = None
                    continue
                of = over_people(found.scores[metric], found.pids)
                kind = kind_of_last(group, name, metric)
                lines.append([group.label, kind, name, metric, _percent(of.value), _span(of), of.over])
    notes = ["95 % bootstrap interval, people drawn with all their queries; of seeds, the mean of each query", *missing]
    return Block(["run", "model", "data set", "score", "mean", "interval", "over"], lines, tuple(notes), num_left=4)


def differences_table(groups: Sequence[RunGroup], names: Sequence[str], metrics: Sequence[str]) -> Block:
    """Return a table of paired tests between groups, of the models that :func:`intervals_table` has.

    Where two groups have two seeds in common, Student's test over these; where both have scores of single queries, the
    test over people, too.
    """
    pairs = list(combinations(groups, 2)) if len(groups) <= _ALL_PAIRS else [(groups[0], of) for of in groups[1:]]
    found = [
        (f"{_named(first, name, metric)} - {_named(second, name, metric)}", name, metric, of)
        for first, second in pairs
        for name in names
        for metric in metrics
        for of in _tests(first, second, name, metric)
    ]
    headers = ["difference", "data set", "score", "points", "interval", "p", "p adjusted", "over"]
    lines = [
        [label, name, metric, f"{100 * of.value:+.1f}", _span(of), _chance(of.p), _chance(adjusted), of.over]
        for (label, name, metric, of), adjusted in zip(found, _adjusted([of.p for *_, of in found]), strict=True)
    ]
    notes = [
        "points of percent, 95 % interval; p: chance of a difference at least this large where there is none; "
        "adjusted for the number of tests (Benjamini and Hochberg)",
        "over seeds: Student's paired test, seeds that both have; over people: signs changed person by person, "
        "the same models on other people",
    ]
    if len(groups) < 2:
        notes = ["a test needs two methods"]
    elif not found:
        notes = ["a test needs two seeds that both methods have, or scores of single queries of both (queries.npz)"]
    return Block(headers, lines, tuple(notes), num_left=3)


def _named(group: RunGroup, name: str, metric: str) -> str:
    return label_of_line(group, kind_of_last(group, name, metric))


def _tests(first: RunGroup, second: RunGroup, name: str, metric: str) -> Iterator[Estimate]:
    key = [f"test/{kind_of_last(group, name, metric)}/{name}/{metric}" for group in (first, second)]
    of_seeds = [
        {run.summary["seed"]: scores[k] for run in group.runs if k in (scores := Rule().scores(run))}
        for group, k in zip((first, second), key, strict=True)
    ]
    common = sorted(of_seeds[0].keys() & of_seeds[1].keys())
    if len(common) > 1:
        yield over_seeds(*(np.array([of[seed] for seed in common]) for of in of_seeds))
    if name in _MEANS:
        return
    one, other = (_mean_queries(group, name, metric) for group in (first, second))
    if isinstance(one, str) or isinstance(other, str) or not np.array_equal(one.pids, other.pids):
        return  # other test images: a difference has no pairs
    difference = one.scores[metric] - other.scores[metric]
    if np.isfinite(difference).any():
        yield over_people(difference, one.pids, test=True)


def _mean_queries(group: RunGroup, name: str, metric: str) -> Queries | str:
    """Return the mean over seeds of each query's score, or say why there is none."""
    found = [queries_of(run, name, kind_of_last(group, name, metric)) for run in group.runs]
    there = [of for of in found if of is not None and metric in of.scores]
    if len(there) < len(found):
        return f"{group.label}: has no scores of single queries of its last evaluation; evaluate again to have them"
    if there[0].num_splits > 1:
        return (
            f"{name}: is tested on {there[0].num_splits} random splits of the same images: see mAP_std in summary.json"
        )
    if any(not np.array_equal(of.pids, there[0].pids) for of in there):
        return f"{group.label}: its seeds were tested on different images of {name}"
    scores: Floats = np.mean([of.scores[metric] for of in there], axis=0)
    return Queries({metric: scores}, there[0].pids, 1, there[0].cmc)


def _adjusted(chances: Sequence[float]) -> list[float]:
    """Return p-values for as many tests as there are; NaN stays."""
    from scipy import stats  # slow to import

    values = np.array(chances, dtype=np.float64)
    there = np.isfinite(values)
    if there.any():
        values[there] = stats.false_discovery_control(values[there])
    return [float(value) for value in values]


def _draws() -> np.random.Generator:
    return np.random.default_rng(0)  # the same report twice has the same numbers


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"


def _span(of: Estimate) -> str:
    return f"{_percent(of.low)} to {_percent(of.high)}" if np.isfinite(of.low) else "-"


def _chance(p: float) -> str:
    return "-" if not np.isfinite(p) else f"{p:.3f}" if p >= 0.001 else "< 0.001"
