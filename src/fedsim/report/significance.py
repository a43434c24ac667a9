"""Statistical tests of differences between methods: over seeds, and over the identities of queries; by scipy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedsim.core.names import metric_name
from fedsim.report.groups import RunGroup
from fedsim.report.layout import Block
from fedsim.report.rules import Rule
from fedsim.report.runs import Queries
from fedsim.report.series import kind_of_last, label_of_line, queries_of

Floats = NDArray[np.float64]

_RESAMPLES = 4999
_ALL_PAIRS = 4
"""Up to this number of groups, all pairs are compared; with more, each group with the first one."""
_MEANS = ("seen", "unseen")


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

    options = {"n_resamples": _RESAMPLES, "vectorized": True, "batch": 500}
    bootstrap = stats.bootstrap((sums, counts), mean, paired=True, method="percentile", rng=_generator(), **options)
    low, high = bootstrap.confidence_interval
    p = float("nan")
    if test:
        total = counts.sum()
        signs = stats.permutation_test(
            (sums,),
            lambda sample, axis: sample.sum(axis=axis) / total,
            permutation_type="samples",
            rng=_generator(),
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


def intervals_table(groups: Sequence[RunGroup], names: Sequence[str], metrics: Sequence[str]) -> Block:
    """Return a table of the delivered models' scores at the last evaluation, with intervals over people.

    On unseen data sets, the score is that of the global model if the method delivers a client's own model.
    """
    lines, missing = [], dict[str, None]()
    for group in groups:
        for name in (name for name in names if name not in _MEANS):
            for metric in metrics:
                queries = _mean_queries(group, name, metric)
                if isinstance(queries, str):
                    missing[queries] = None
                    continue
                estimate = over_people(queries.scores[metric], queries.pids)
                model_kind, value = kind_of_last(group, name, metric), _percent(estimate.value)
                lines.append([group.label, model_kind, name, metric, value, interval_text(estimate), estimate.over])
    note = "95 % bootstrap interval over people, each with all their queries; a query's score is the mean over seeds"
    notes = [note, *missing]
    return Block(["run", "model", "data set", "score", "mean", "interval", "over"], lines, tuple(notes), num_left=4)


def differences_table(groups: Sequence[RunGroup], names: Sequence[str], metrics: Sequence[str]) -> Block:
    """Return a table of paired tests between groups, for the models of :func:`intervals_table`.

    Two groups with at least two common seeds have Student's test over these; two groups with scores of single queries
    have the test over people, too.
    """
    pairs = list(combinations(groups, 2))
    if len(groups) > _ALL_PAIRS:
        pairs = [(groups[0], group) for group in groups[1:]]
    tests = [
        (f"{_named(first, name, metric)} - {_named(second, name, metric)}", name, metric, estimate)
        for first, second in pairs
        for name in names
        for metric in metrics
        for estimate in _tests(first, second, name, metric)
    ]
    headers = ["difference", "data set", "score", "points", "interval", "p", "p adjusted", "over"]
    adjusted = _adjusted([estimate.p for *_, estimate in tests])
    lines = [
        [
            label,
            name,
            metric,
            f"{round(100 * e.value, 1) + 0.0:+.1f}",
            interval_text(e),
            chance_text(e.p),
            chance_text(p),
            e.over,
        ]
        for (label, name, metric, e), p in zip(tests, adjusted, strict=True)
    ]
    notes = [
        "percentage points, 95 % interval; p: probability of a difference at least this large if there is none; "
        "adjusted for the number of tests (Benjamini and Hochberg)",
        "over seeds: Student's paired test on common seeds; over people: random sign changes per person, "
        "the same models on other people",
    ]
    if len(groups) < 2:
        notes = ["a test needs two methods"]
    elif not tests:
        notes = ["a test needs two seeds that both methods have, or scores of single queries of both (queries.npz)"]
    return Block(headers, lines, tuple(notes), num_left=3)


def _named(group: RunGroup, name: str, metric: str) -> str:
    return label_of_line(group, kind_of_last(group, name, metric))


def _tests(first: RunGroup, second: RunGroup, name: str, metric: str) -> Iterator[Estimate]:
    keys = [metric_name("test", kind_of_last(group, name, metric), name, metric) for group in (first, second)]
    of_seeds = [
        {run.summary["seed"]: scores[key] for run in group.runs if key in (scores := Rule().scores(run))}
        for group, key in zip((first, second), keys, strict=True)
    ]
    common = sorted(of_seeds[0].keys() & of_seeds[1].keys())
    if len(common) > 1:
        yield over_seeds(*(np.array([scores[seed] for seed in common]) for scores in of_seeds))
    if name in _MEANS:
        return
    minuend, subtrahend = (_mean_queries(group, name, metric) for group in (first, second))
    if isinstance(minuend, str) or isinstance(subtrahend, str) or not np.array_equal(minuend.pids, subtrahend.pids):
        return  # the queries differ, so there are no pairs to compare
    difference = minuend.scores[metric] - subtrahend.scores[metric]
    if np.isfinite(difference).any():
        yield over_people(difference, minuend.pids, test=True)


def _mean_queries(group: RunGroup, name: str, metric: str) -> Queries | str:
    """Return the mean over seeds of each query's score, or a text with the reason why there is none."""
    by_run = [queries_of(run, name, kind_of_last(group, name, metric)) for run in group.runs]
    scored = [queries for queries in by_run if queries is not None and metric in queries.scores]
    if len(scored) < len(by_run):
        return f"{group.label}: has no scores of single queries of its last evaluation; evaluate it again to write them"
    first = scored[0]
    if first.num_splits > 1:
        return f"{name}: is tested on {first.num_splits} random splits of the same images: see mAP_std in summary.json"
    if any(not np.array_equal(queries.pids, first.pids) for queries in scored):
        return f"{group.label}: its seeds were tested on different images of {name}"
    scores: Floats = np.mean([queries.scores[metric] for queries in scored], axis=0)
    return Queries({metric: scores}, first.pids, 1, first.cmc)


def _adjusted(chances: Sequence[float]) -> list[float]:
    """Return p-values adjusted for the number of tests; NaN stays NaN."""
    from scipy import stats  # slow to import

    values = np.array(chances, dtype=np.float64)
    finite = np.isfinite(values)
    if finite.any():
        values[finite] = stats.false_discovery_control(values[finite])
    return [float(value) for value in values]


def _generator() -> np.random.Generator:
    return np.random.default_rng(0)  # fixed, so that a repeated report has the same numbers


def _percent(value: float) -> str:
    return f"{round(100 * value, 1) + 0.0:.1f}"  # no -0.0


def interval_text(estimate: Estimate) -> str:
    """Write an interval in percent; ``-`` without one."""
    return f"{_percent(estimate.low)} to {_percent(estimate.high)}" if np.isfinite(estimate.low) else "-"


def chance_text(p: float) -> str:
    """Write p; ``-`` if it is unknown."""
    return "-" if not np.isfinite(p) else f"{p:.3f}" if p >= 0.001 else "< 0.001"
