"""``fedsim report --left_out true --significance``: each method beside the first one, over seeds; and their work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedsim.core.errors import ConfigError
from fedsim.core.names import metric_name
from fedsim.report.groups import RunGroup, shown_metrics, work
from fedsim.report.layout import Block, mean_and_spread
from fedsim.report.rules import CHOSEN_BY, Rule
from fedsim.report.series import kind_of_last
from fedsim.report.significance import Estimate, chance_text, holm, interval_text, over_seeds

Methods = Sequence[tuple[str, Mapping[str, RunGroup]]]
"""Name of a method, and its runs by left-out data set."""

_MEAN = "mean"
_OPTION = "--significance"


@dataclass(frozen=True)
class _Score:
    """One score of a method on a left-out data set, or its mean over these; fractions of 1, one per seed."""

    name: str
    metric: str
    away: NDArray[np.float64]
    """[seeds] on the data set that no client trained on"""
    home: NDArray[np.float64]
    """[seeds] the same model's mean over the clients' test sets; empty without such scores"""


def left_out_differences(methods: Methods, metric: str, rule: Rule) -> Block:
    """Return a table of the differences to the first method, with a row per method, left-out data set and score.

    Each row has the mean over seeds and the difference to the first method, seed by seed, both with Student's 95 %
    interval; and the drop, the score at home less the one away. Rows of the means over data sets have p of the paired
    test, and p by Holm's method for all tests of the table. Scores are those of the delivered model, or of the global
    one if only that is tested on the left-out data set.

    Args:
        methods: the compared methods.
        metric: the first score; rank-1 is the second one.
        rule: chooses the round of each run.

    Raises:
        ConfigError: if there is one seed only, a method lacks a run that another one has, runs that are compared have
            other data, or a run lacks the score.
    """
    seeds = _shared_seeds(methods)
    _refuse_other_data(methods)
    scores = [_scores(rotations, seeds, shown_metrics(metric), rule) for _, rotations in methods]
    tests = [
        [over_seeds(score.away, base.away) for score, base in zip(of_method, scores[0], strict=True)]
        for of_method in scores[1:]
    ]
    # the claims are the means; rows of single data sets only show where these come from
    claims = [test.p for of_method in tests for s, test in zip(scores[0], of_method, strict=True) if s.name == _MEAN]
    corrected = iter(holm(claims))
    lines = []
    for (label, rotations), of_method, tested in zip(methods, scores, [None, *tests], strict=True):
        name, group = next(iter(rotations.items()))
        words = [label, kind_of_last(group, name, metric)]
        for place, score in enumerate(of_method):
            test = tested[place] if tested else None
            adjusted = next(corrected) if test is not None and score.name == _MEAN else None
            p = "" if adjusted is None else chance_text(adjusted)
            lines.append([*words, *_cells(score, test, p)])
    headers = ["method", "model", "left out", "score", "mean", "interval", f"less {methods[0][0]}", "interval", "p",
               "p by Holm", "drop"]  # fmt: skip
    return Block(headers, lines, list(_notes(methods[0][0], seeds, len(claims), rule)), num_left=4)


def left_out_work(methods: Methods) -> Block:
    """Return a table of the images and steps of each method by left-out data set.

    A line below names each method whose images or steps are not those of the first one. Counts are means over seeds,
    ``-`` of runs that have not logged them.
    """
    names = list(dict.fromkeys(name for _, rotations in methods for name in rotations))
    lines = [
        [label, *(_counts(rotations[name]) if name in rotations else "-" for name in names)]
        for label, rotations in methods
    ]
    notes = ["images of all training passes / steps of optimizers, over all rounds, counted where they are computed"]
    first, base = methods[0]
    for label, rotations in methods[1:]:
        pairs = {name: [base[name], rotations[name]] for name in names if name in base and name in rotations}
        if unequal := [name for name, pair in pairs.items() if any("NOT EQUAL WORK" in line for line in work(pair))]:
            notes.append(f"NOT EQUAL WORK: {label} and {first}, without {', '.join(unequal)}; this may change scores")
    return Block(["method", *names], lines, notes)


def _shared_seeds(methods: Methods) -> list[int]:
    """Return the seeds; raise ConfigError if there is one only, or a run of a data set and seed is missing."""
    trained = {
        label: {(name, int(run.summary["seed"])) for name, group in rotations.items() for run in group.runs}
        for label, rotations in methods
    }
    names = list(dict.fromkeys(name for _, rotations in methods for name in rotations))
    seeds = sorted({seed for runs in trained.values() for _, seed in runs})
    for label, runs in trained.items():
        for name, seed in ((name, seed) for name in names for seed in seeds):
            if (name, seed) not in runs:
                raise ConfigError(
                    f"{_OPTION}: {label} has no run without {name} with seed {seed}, and differences need the same "
                    "runs of each method; train it, or omit this method, seed or data set"
                )
    if len(seeds) < 2:
        raise ConfigError(f"{_OPTION}: all runs have seed {seeds[0]}, and an interval needs two seeds or more")
    return seeds


def _refuse_other_data(methods: Methods) -> None:
    """Raise ConfigError if a run has other data than that of the first method with its seed; unknown ones pass."""
    first, base = methods[0]
    digests = {name: _digests(group) for name, group in base.items()}
    for label, rotations in methods[1:]:
        for name, group in rotations.items():
            for seed, digest in _digests(group).items():
                if digest != digests[name].get(seed, digest):
                    raise ConfigError(
                        f"{_OPTION}: {label} without {name} with seed {seed} was trained or tested on other data than "
                        f"{first}; train one of them again on the data of the other"
                    )


def _digests(group: RunGroup) -> dict[int, str]:
    return {run.summary["seed"]: run.summary["data"]["digest"] for run in group.runs if run.summary.get("data")}


def _scores(rotations: Mapping[str, RunGroup], seeds: Sequence[int], shown: Sequence[str], rule: Rule) -> list[_Score]:
    """Return the scores on each data set, then the means over these, seed by seed."""
    scores = [
        _score(group, metric_name("test", kind_of_last(group, name, metric)), name, metric, seeds, rule)
        for name, group in rotations.items()
        for metric in shown
    ]
    for metric in shown:
        of_metric = [score for score in scores if score.metric == metric]
        homes = [score.home for score in of_metric if len(score.home)]
        home = np.mean(homes, axis=0) if len(homes) == len(of_metric) else np.zeros(0)
        scores.append(_Score(_MEAN, metric, np.mean([score.away for score in of_metric], axis=0), home))
    return scores


def _score(group: RunGroup, model: str, name: str, metric: str, seeds: Sequence[int], rule: Rule) -> _Score:
    by_seed = {int(run.summary["seed"]): rule.scores(run) for run in group.runs}
    away, home = (f"{model}/{metric_name(domain, metric)}" for domain in (name, "seen"))
    if lacking := [seed for seed in seeds if away not in by_seed[seed]]:
        raise ConfigError(
            f"{_OPTION}: a run without {name} with seed {lacking[0]} has no {away} by --rule {rule.name}; give another "
            "rule"
        )
    of_home = [by_seed[seed][home] for seed in seeds if home in by_seed[seed]]
    away_scores = np.array([by_seed[seed][away] for seed in seeds])
    return _Score(name, metric, away_scores, np.array(of_home if len(of_home) == len(seeds) else []))


def _cells(score: _Score, test: Estimate | None, corrected: str) -> list[str]:
    """Return a row without method and model; ``corrected`` is p by Holm's method."""
    scored = over_seeds(score.away, np.zeros_like(score.away))
    cells = [score.name, score.metric, f"{100 * scored.value:.1f}", interval_text(scored)]
    if test is None:
        cells += ["", "", ""]
    else:
        cells += [
            f"{round(100 * test.value, 1) + 0.0:+.1f}",
            interval_text(test),
            chance_text(test.p) if corrected else "",
        ]
    return [*cells, corrected, mean_and_spread(100 * (score.home - score.away)) if len(score.home) else "-"]


def _notes(first: str, seeds: Sequence[int], num_claims: int, rule: Rule) -> Iterator[str]:
    yield (
        f"percent, over seeds {', '.join(map(str, seeds))}, with Student's 95 % intervals; less {first}: in pairs of "
        "runs with one seed"
    )
    yield f"p: Student's paired test of the mean over data sets; by Holm's method for {num_claims} tests"
    yield "drop: the mean score on the clients' test sets less that on the left-out one, in points, +- the deviation"
    yield f"the round is chosen by {CHOSEN_BY[rule.name]}"


def _counts(group: RunGroup) -> str:
    totals = [group.totals(f"train/{unit}") for unit in ("images", "steps")]
    return " / ".join(f"{np.mean(of_unit):,.0f}" if of_unit else "-" for of_unit in totals)
