"""Tables of scores: all models on all test sets, intervals and differences, and how much clients differ (fairness).

Paper 002 names fairness (Table 9) and does not define it; the definition is below.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from fedsim.core.errors import DataError
from fedsim.core.metrics import MEANS, comparable
from fedsim.core.names import metric_name
from fedsim.report.costs import answers_line, fewest_answers, is_timed, traffic, work
from fedsim.report.groups import MEANING, RunGroup, shown_metrics, splits, unequal_evaluation
from fedsim.report.layout import Block, mean_and_spread
from fedsim.report.runs import Rule, Run
from fedsim.report.series import Series, curves, label_of_line, seconds_of
from fedsim.report.significance import (
    Estimate,
    Floats,
    adjusted,
    chance_text,
    interval_text,
    over_people,
    over_seeds,
    percent_text,
)


def score_block(groups: Sequence[RunGroup], metric: str, rule: Rule) -> Block:
    """Return a row per test set and a column per group and kind of model; cells ``metric / rank-1`` in percent.

    Below the means is their difference, ``drop``, if a model has a mean over seen and one over unseen test sets.

    Raises:
        DataError: if no run has a score under the rule.
    """
    rules = [Rule(), rule] if rule.name in ("best3", "oracle") else [rule]
    columns = [(group, model_kind, r) for group in groups for model_kind in group.distinct_kinds(rule) for r in rules]
    if not columns:
        folder = groups[0].runs[0].folder
        if rule.name == "best":
            raise DataError(
                f"{folder}: --rule best needs val/mAP or val/top1, which a run with data.val: none does not have; "
                "use --rule last"
            )
        raise DataError(f"{folder}: the run has no scores yet; wait for its first evaluation")
    names, shown = all_sets(groups), shown_metrics(metric)
    titles = titles_of(names, {name for group in groups for run in group.runs for name in run.unseen})
    cells = [
        [group.cell(metric_name("test", model_kind, name), shown, r) for name in names]
        for group, model_kind, r in columns
    ]
    lines = [[titles[name], *(column[row] for column in cells)] for row, name in enumerate(names)]
    drops = [group.drop_cell(model_kind, shown, r) for group, model_kind, r in columns]
    if has_drop := set(drops) != {"-"}:
        lines.append(["drop", *drops])
    has_seeds = any(len(group.runs) > 1 for group in groups)
    headers = []
    for group, model_kind, r in columns:
        seeds = [f"{len(group.runs)} seed{'s' * (len(group.runs) > 1)}"] if has_seeds else []
        headers.append("\n".join([group.label, model_kind, *seeds, *([r.name] if len(rules) > 1 else [])]))
    tidy = list(tidy_lines(groups, names, shown, rules))
    headers_of_tidy = ["run", "model", "rule", "data set", "score", "mean", "standard deviation", "seeds"]
    notes = tuple(_legend(groups, {model_kind for _, model_kind, _ in columns}, shown, rule, has_drop=has_drop))
    return Block(["data set", *headers], lines, notes, is_cut=True, tidy=(headers_of_tidy, tidy))


def tidy_lines(
    groups: Sequence[RunGroup], names: Sequence[str], metrics: Sequence[str], rules: Sequence[Rule]
) -> Iterator[list[str]]:
    """Yield a line per number: group, model, rule, test set and metric; mean and deviation over seeds, in percent."""
    for group, rule in ((group, rule) for group in groups for rule in rules):
        for model_kind in group.kinds(rule):
            numbers = [
                (name, metric, group.values(metric_name("test", model_kind, name, metric), rule))
                for name in names
                for metric in metrics
            ]
            numbers += [("drop", metric, group.drops(model_kind, metric, rule)) for metric in metrics]
            for name, metric, fractions in numbers:
                if len(values := 100 * fractions):
                    spread = f"{values.std(ddof=1):.6g}" if len(values) > 1 else ""
                    key = [group.label, model_kind, rule.name, name, metric]
                    yield [*key, f"{values.mean():.6g}", spread, str(len(values))]


def all_sets(groups: Sequence[RunGroup]) -> list[str]:
    """Return all test sets in the order of the runs, then the two means."""
    names = list(dict.fromkeys(name for group in groups for run in group.runs for name in run.test_sets))
    means = [name for name in MEANS if name in names]
    return [name for name in names if name not in means] + means


def titles_of(names: Sequence[str], unseen: Collection[str] = ()) -> dict[str, str]:
    """Return test set -> its title in tables; ``unseen`` ones are marked with that word."""
    return {name: f"mean {name}" if name in MEANS else f"{name} (unseen)" if name in unseen else name for name in names}


def _legend(
    groups: Sequence[RunGroup], kinds: Collection[str], metrics: Sequence[str], rule: Rule, *, has_drop: bool
) -> Iterator[str]:
    monitor = "val/top1" if metrics[0] == "top1" else "val/mAP"
    when = {"last": "last evaluation", "best": f"round with the best {monitor}", "tested": "fedsim test"}
    shown = when.get(rule.name, f"last evaluation and {rule.name}")
    spread = any(len(group.runs) > 1 for group in groups)
    numbers = " / ".join("rank-1" if name == "rank1" else name for name in metrics)
    yield f"{numbers} in percent, {shown}" + (", mean +- standard deviation over seeds" if spread else "")
    yield "drop: mean seen - mean unseen, in points" if has_drop else ""
    yield "; ".join(meaning for model_kind, meaning in MEANING.items() if model_kind in kinds)
    alike = [group.label for group in groups if "personalised" in {*group.kinds(rule)} - {*group.distinct_kinds(rule)}]
    if alike:
        yield f"{', '.join(alike)}: personalised models score as the global one, and have no column"
    yield "; ".join(f"{group.label}: {group.describe()}" for group in groups)
    yield traffic(groups)
    yield from scores_line(groups, all_sets(groups), metrics[0])
    yield from answers_line(groups)
    yield from splits(groups)
    yield from unequal_evaluation(groups)
    yield from work(groups)
    if rule.name == "best3":
        yield "best3 chooses rounds by scores on test data: optimistic, comparable only with the numbers of paper 003"
        yield from (f"{run.folder}: {rule.describe(run)}" for group in groups for run in group.runs)
    if rule.name == "oracle":
        yield "oracle: each model on each test set in its best round there; this choice needs the test labels"
    if rule.name == "tested":
        yield from (str((run.tested or {}).get("checkpoint")) for group in groups for run in group.runs)


_PARTS = 3
"""number of times, evenly spread until the shortest run's last evaluation"""


def scores_line(groups: Sequence[RunGroup], names: Sequence[str], metric: str) -> Iterator[str]:
    """Yield a line with scores at common simulated times, if a run does not wait for all clients.

    A score is that of the newest evaluation until then, a mean over seeds; ``names``: all test sets, with ``seen`` and
    ``unseen`` for the means over them, of which the first one there is counts.
    """
    if not any(is_timed(run) for group in groups for run in group.runs):
        return
    name = next((mean for mean in MEANS if mean in names), names[0])
    lines = [curve for curve in curves(groups, name, metric, seconds_of) if curve.x[-1] > 0]
    if not lines:
        return
    times = min(float(curve.x[-1]) for curve in lines) * np.arange(1, _PARTS + 1) / _PARTS
    texts = (f"{curve.label} {', '.join(_score_at(curve, time) for time in times)}" for curve in lines)
    subject = f"mean {name}" if name in MEANS else name
    seconds = ", ".join(f"{time:,.1f}" for time in times)
    yield f"{metric} in percent, {subject}, until {seconds} simulated seconds: {'; '.join(texts)}"


def _score_at(curve: Series, time: float) -> str:
    """Return the score of the newest evaluation until a time; ``-`` if there is none."""
    position = int(np.searchsorted(curve.x, time * (1 + 1e-12), side="right")) - 1  # sums of seconds are rounded
    return f"{curve.mean[position]:.1f}" if position >= 0 else "-"


def fairness_table(groups: Sequence[RunGroup], metric: str, rule: Rule) -> Block:
    """Return a table of the spread of a score over the test sets of clients, per model; seeds are averaged."""
    rows, timed = [], any(is_timed(run) for group in groups for run in group.runs)
    for group in groups:
        for model_kind in group.distinct_kinds(rule):
            spreads = [s for run in group.runs if (s := _spread_in(run, model_kind, metric, rule)) is not None]
            if spreads:
                numbers = 100 * np.array([spread[0] for spread in spreads]).T
                worst = " or ".join(dict.fromkeys(worst_set for _, worst_set in spreads))
                answers = [" or ".join(dict.fromkeys(map(fewest_answers, group.runs)))] if timed else []
                rows.append([group.label, model_kind, *map(mean_and_spread, numbers), worst, *answers])
    headers = ["run", "model", "mean", "deviation", "worst", "worst set", *(["fewest answers"] if timed else [])]
    note = (
        f"{metric} in percent over the test sets of clients: mean, standard deviation between test sets, "
        "lowest; clients with the same test set count as one"
    )
    if not rows:
        note = "fairness: needs at least two test sets of clients that train"
    return Block(headers, rows, (note,), num_left=2)


def _spread_in(run: Run, model_kind: str, metric: str, rule: Rule) -> tuple[list[float], str] | None:
    """Return mean, deviation and the worst of a run's scores, and the set of the worst; of equal ones, the first."""
    by_key = rule.scores(run)
    scores = {
        name: by_key[key] for name in run.seen if (key := metric_name("test", model_kind, name, metric)) in by_key
    }
    if len(scores) < 2:
        return None
    values, worst = np.array(list(scores.values())), min(scores, key=lambda name: comparable(scores[name]))
    # the population's deviation, since the test sets are those of all clients, not a sample
    return [float(values.mean()), float(values.std()), scores[worst]], worst


_ALL_PAIRS = 4
"""Up to this number of groups, all pairs are compared; with more, each group with the first one."""


def intervals_table(groups: Sequence[RunGroup], names: Sequence[str], metrics: Sequence[str]) -> Block:
    """Return a table of the delivered models' scores at the last evaluation, with intervals over people.

    On unseen data sets, the score is that of the global model if the method delivers a client's own model.
    """
    lines, missing = [], dict[str, None]()
    for group in groups:
        for name in (name for name in names if name not in MEANS):
            for metric in metrics:
                queries = _mean_queries(group, name, metric)
                if isinstance(queries, str):
                    missing[queries] = None
                    continue
                estimate = over_people(*queries)
                model_kind, value = group.kind_scored(name, metric), percent_text(estimate.value)
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
    lines = [
        [label, name, metric, percent_text(e.value, "+"), interval_text(e), chance_text(e.p), chance_text(p), e.over]
        for (label, name, metric, e), p in zip(tests, adjusted([e.p for *_, e in tests]), strict=True)
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
    return label_of_line(group, group.kind_scored(name, metric))


def _tests(first: RunGroup, second: RunGroup, name: str, metric: str) -> Iterator[Estimate]:
    keys = [metric_name("test", group.kind_scored(name, metric), name, metric) for group in (first, second)]
    of_seeds = [
        {run.summary["seed"]: scores[key] for run in group.runs if key in (scores := Rule().scores(run))}
        for group, key in zip((first, second), keys, strict=True)
    ]
    common = sorted(of_seeds[0].keys() & of_seeds[1].keys())
    if len(common) > 1:
        yield over_seeds(*(np.array([scores[seed] for seed in common]) for scores in of_seeds))
    if name in MEANS:
        return
    minuend, subtrahend = (_mean_queries(group, name, metric) for group in (first, second))
    if isinstance(minuend, str) or isinstance(subtrahend, str) or not np.array_equal(minuend[1], subtrahend[1]):
        return  # the queries differ, so there are no pairs to compare
    difference = minuend[0] - subtrahend[0]
    if np.isfinite(difference).any():
        yield over_people(difference, minuend[1], test=True)


def _mean_queries(group: RunGroup, name: str, metric: str) -> tuple[Floats, NDArray[np.int64]] | str:
    """Return the mean over seeds of each query's score, and its identity, both [Q]; else a text with the reason."""
    by_run = [run.queries_of(name, group.kind_scored(name, metric)) for run in group.runs]
    scored = [queries for queries in by_run if queries is not None and metric in queries.scores]
    if len(scored) < len(by_run):
        return f"{group.label}: has no scores of single queries of its last evaluation; evaluate it again to write them"
    first = scored[0]
    if first.num_splits > 1:
        return f"{name}: is tested on {first.num_splits} random splits of the same images: see mAP_std in summary.json"
    if any(not np.array_equal(queries.pids, first.pids) for queries in scored):
        return f"{group.label}: its seeds were tested on different images of {name}"
    return np.mean([queries.scores[metric] for queries in scored], axis=0), first.pids
