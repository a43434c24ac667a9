"""``fedsim report --left_out``: leave-one-data-set-out, with all rotations in one table, and differences of methods.

Scores on a data set that no client trained on are those of a round that was chosen without it, and those of the best
round there. The second is an oracle: with the target's test labels one can do no better among the evaluated rounds. The
gap between the two is what a table gains that is chosen on its own test set.
With ``--significance``, each method stands beside the first one, over seeds.
:mod:`fedsim.report.left_out_comparison` has all beside printed tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedsim.core.errors import ConfigError
from fedsim.core.metrics import KINDS, comparable
from fedsim.core.names import metric_name
from fedsim.report.groups import MEANING, RunGroup, name_variants, shown_metrics, unequal_evaluation
from fedsim.report.layout import Block, mean_and_spread
from fedsim.report.runs import CHOSEN_BY, Rule, Run
from fedsim.report.significance import Estimate, chance_text, holm, interval_text, over_seeds, percent_text
from fedsim.settings.configuration import digest, values_of_experiment

COLUMNS = ("chosen", "oracle", "gap")
UNSEEN = "data.unseen"


@dataclass(frozen=True)
class Choice:
    """One model on one data set, over the seeds of a group: percent per metric and seed."""

    scores: Mapping[str, Sequence[NDArray[np.float64]]]
    """``chosen``, ``oracle``, ``gap`` -> an array [seeds] per metric; empty without scores"""
    rounds: Mapping[str, Sequence[int]]
    """``chosen``, ``oracle`` -> the round of each seed; none where a rule takes several rounds"""
    num_evaluations: Sequence[int]
    """evaluated rounds among which the oracle is the best, of each seed"""
    num_runs: int
    """runs of the group, with or without scores"""

    def cell(self, column: str) -> str:
        """Return numbers as a table shows them; ``-`` without any."""
        scored = [values for values in self.scores[column] if len(values)]
        texts = [mean_and_spread(values) for values in scored]
        text = " / ".join(_signed(cell) if column == "gap" else cell for cell in texts) or "-"
        is_whole = not scored or len(scored[0]) == self.num_runs
        return text if is_whole else f"{text} ({len(scored[0])} of {self.num_runs})"

    def mean(self, column: str) -> NDArray[np.float64]:
        """Return the mean over seeds, a number per metric; empty if a seed has no scores."""
        values = self.scores[column]
        is_whole = all(len(of_seeds) == self.num_runs for of_seeds in values)
        return np.array([of_seeds.mean() for of_seeds in values]) if is_whole else np.zeros(0)


def choice_of(group: RunGroup, model: str, shown: Sequence[str], rule: Rule) -> Choice:
    """Return a model's scores on a data set by the rule, and those of its best round there.

    Args:
        group: the runs, one per seed.
        model: the beginning of their scores' names, such as ``test/global/market1501``.
        shown: the metrics; the first one decides which round is the best.
        rule: chooses without the data set's test labels.
    """
    scores: dict[str, list[list[float]]] = {column: [] for column in COLUMNS}
    rounds: dict[str, list[int]] = {"chosen": [], "oracle": []}
    counts = []
    for run in group.runs:
        chosen = rule.scores(run)
        if any(f"{model}/{metric}" not in chosen for metric in shown):
            continue
        scores["chosen"].append([chosen[f"{model}/{metric}"] for metric in shown])
        if (round_ := _round_of(run, rule)) is not None:
            rounds["chosen"].append(round_)
        log = run.log if run.has_log else {}
        evaluated = {r: row for r, row in log.items() if all(f"{model}/{metric}" in row for metric in shown)}
        if evaluated:
            best = max(evaluated, key=lambda r: (comparable(evaluated[r][f"{model}/{shown[0]}"]), -r))
            rounds["oracle"].append(best)
            counts.append(len(evaluated))
            is_chosen = _round_of(run, rule) == best  # then no digit differs, as in the log
            scores["oracle"].append(
                scores["chosen"][-1] if is_chosen else [evaluated[best][f"{model}/{metric}"] for metric in shown]
            )
            differences = zip(scores["oracle"][-1], scores["chosen"][-1], strict=True)
            scores["gap"].append([best_score - chosen_score for best_score, chosen_score in differences])
    columns = {
        name: [100 * np.array(v) for v in zip(*rows, strict=True)] or [np.zeros(0)] for name, rows in scores.items()
    }
    return Choice(columns, rounds, counts, len(group.runs))


def mean_of(choices: Sequence[Choice], column: str) -> str:
    """Return the mean over data sets of the means over seeds, as a table shows it; ``-`` if one is missing."""
    means = [choice.mean(column) for choice in choices]
    if not means or not all(map(len, means)):
        return "-"
    texts = [mean_and_spread(np.array([value])) for value in np.mean(means, axis=0)]
    return " / ".join(_signed(cell) if column == "gap" else cell for cell in texts)


def honest_rule(runs: Sequence[Run]) -> Rule:
    """Return the rule for unseen targets: people of the sources choose, if all runs have held some out; else the last.

    >>> honest_rule([]).name
    'best'
    """
    return Rule(name="best" if all(run.summary["best"] is not None for run in runs) else "last")


def refuse_oracle(rule: Rule, option: str) -> None:
    """Raise ConfigError if the user wants the oracle in the place of a choice."""
    if rule.name == "oracle":
        raise ConfigError(
            f"--rule: oracle is the best round on the target itself, and has a column of its own in {option}; give "
            "best or last, or leave --rule out"
        )


def rotations_of(groups: Sequence[RunGroup], option: str) -> list[tuple[str, RunGroup]]:
    """Return each group with the data set that it leaves out.

    Raises:
        ConfigError: unless each run leaves out exactly one data set by ``data.unseen``.
    """
    pairs = []
    for group in groups:
        run = group.runs[0]
        unseen = run.setting(UNSEEN)
        if not isinstance(unseen, list) or len(unseen) != 1:
            raise ConfigError(
                f"{option}: {run.folder} does not leave out exactly one data set by {UNSEEN}; omit this run"
            )
        pairs.append((str(unseen[0]), group))
    return pairs


def _round_of(run: Run, rule: Rule) -> int | None:
    """Return the round that a rule chooses; None if it is not a single one of the run."""
    evaluation = {"last": run.summary["final"], "best": run.summary["best"]}.get(rule.name)
    return None if evaluation is None else int(evaluation["round"])


def _signed(cell: str) -> str:
    return cell if cell.startswith("-") else f"+{cell}"


Rotations = dict[str, RunGroup]
"""Left-out data set -> the runs without it."""
Methods = Sequence[tuple[str, Rotations]]
"""Name of a method, and its runs by left-out data set."""


def left_out_blocks(groups: Sequence[RunGroup], metric: str, rule: Rule) -> list[Block]:
    """Return two tables: scores of the rounds that the rule chooses, and these beside the best rounds on the target.

    The first has a row per method and kind of model, a column per left-out data set, and the mean over these. The
    second has a row per data set, the choice, the oracle and the gap between them. Cells are scores on the data set
    that no client trained on, ``metric / rank-1`` in percent; ``-`` if a rotation is missing. Without one of the
    rotations, there is no mean.

    Raises:
        ConfigError: unless each run leaves out exactly one data set by ``data.unseen``, or if the rule is oracle.
    """
    refuse_oracle(rule, "--left_out")
    methods = named_methods(groups, "--left_out")
    names = sorted({name for _, rotations in methods for name in rotations})
    shown = shown_metrics(metric)
    lines: list[list[str]] = []
    second: list[list[str]] = []
    kinds: list[str] = []
    for label, rotations in methods:
        for model_kind in KINDS:
            choices = {n: choice_of(rotations[n], metric_name("test", model_kind, n), shown, rule) for n in rotations}
            cells = [choices[name].cell("chosen") if name in choices else "-" for name in names]
            if any(cell != "-" for cell in cells):
                ordered = [choices[name] for name in names if name in choices]
                whole = ordered if len(ordered) == len(names) else []
                lines.append([label, model_kind, *cells, mean_of(whole, "chosen")])
                second += _lines_of_choice([label, model_kind], {n: choices[n] for n in names if n in choices}, whole)
                kinds.append(model_kind)
    numbers = " / ".join("rank-1" if name == "rank1" else name for name in shown)
    notes = [
        f"{numbers} in percent on the data set that no client trained on; mean over the data sets",
        f"the round is chosen by {CHOSEN_BY[rule.name]}",
        *(MEANING[model_kind] for model_kind in dict.fromkeys(kinds)),
        f"each cell: {groups[0].describe()}" if len({group.describe() for group in groups}) == 1 else "",
        *(f"{run.folder}: {', '.join(run.marks)}" for group in groups for run in group.runs if run.marks),
        *unequal_evaluation([RunGroup(label, next(iter(rotations.values())).runs) for label, rotations in methods]),
    ]
    gap = f"oracle - {rule.name}, in points; it grows with the number of evaluations that the oracle chooses from"
    best = f"the best one by {shown[0]}, so the gap of another metric may be below 0"
    headers = ["method", "model", "left out", rule.name, "round", "oracle", "round", "gap", "evaluations"]
    return [
        Block(["method", "model", *names, "mean"], lines, notes, num_left=2),
        Block(headers, second, [CHOSEN_BY["oracle"], f"gap: {gap}", f"the oracle's round is {best}"], num_left=3),
    ]


def named_methods(groups: Sequence[RunGroup], option: str) -> list[tuple[str, Rotations]]:
    """Return the name of each method, the user's own or that of the variant, and its rotations in alphabetical order.

    ``option`` and errors: see :func:`rotations_of`.
    """
    methods = [dict(sorted(rotations.items())) for rotations in by_method(groups, option)]
    firsts = [next(iter(rotations.values())).runs[0] for rotations in methods]
    return [
        (run.name or variant, each) for run, variant, each in zip(firsts, name_variants(firsts), methods, strict=True)
    ]


def by_method(groups: Sequence[RunGroup], option: str) -> list[Rotations]:
    """Return each method's rotations: name of the left-out data set -> the runs without it.

    Runs are of one method if only the left-out data set differs. ``option`` and errors: see :func:`rotations_of`.

    Raises:
        ConfigError: if runs of one method leave out one data set, and are still no seeds of one experiment.
    """
    methods: dict[str, Rotations] = {}
    for name, group in rotations_of(groups, option):
        run = group.runs[0]
        entries = {option: v for option, v in values_of_experiment(run.settings).items() if option != UNSEEN}
        method = methods.setdefault(run.name or (digest(entries) if entries else str(run.folder)), {})
        if name in method:
            first = method[name].runs[0]
            reasons = " and ".join(run.experiment.differs_in(first.experiment))
            raise ConfigError(f"{option}: {first.folder} and {run.folder} differ in {reasons}; omit one of them")
        method[name] = group
    return list(methods.values())


def _lines_of_choice(words: list[str], choices: dict[str, Choice], whole: Sequence[Choice]) -> Iterator[list[str]]:
    for name, choice in choices.items():
        chosen, oracle, gap = (choice.cell(column) for column in COLUMNS)
        rounds = {column: ", ".join(map(str, choice.rounds[column])) or "-" for column in ("chosen", "oracle")}
        counts = ", ".join(map(str, dict.fromkeys(choice.num_evaluations))) or "-"
        yield [*words, name, chosen, rounds["chosen"], oracle, rounds["oracle"], gap, counts]
    if whole:
        chosen, oracle, gap = (mean_of(whole, column) for column in COLUMNS)
        yield [*words, "mean", chosen, "", oracle, "", gap, ""]


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
        words = [label, group.kind_scored(name, metric)]
        for place, score in enumerate(of_method):
            test = tested[place] if tested else None
            adjusted = next(corrected) if test is not None and score.name == _MEAN else None
            p = "" if adjusted is None else chance_text(adjusted)
            lines.append([*words, *_cells(score, test, p)])
    headers = ["method", "model", "left out", "score", "mean", "interval", f"less {methods[0][0]}", "interval", "p",
               "p by Holm", "drop"]  # fmt: skip
    return Block(headers, lines, list(_notes(methods[0][0], seeds, len(claims), rule)), num_left=4)


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
            for seed, of_run in _digests(group).items():
                if of_run != digests[name].get(seed, of_run):
                    raise ConfigError(
                        f"{_OPTION}: {label} without {name} with seed {seed} was trained or tested on other data than "
                        f"{first}; train one of them again on the data of the other"
                    )


def _digests(group: RunGroup) -> dict[int, str]:
    return {run.summary["seed"]: run.summary["data"]["digest"] for run in group.runs if run.summary.get("data")}


def _scores(rotations: Mapping[str, RunGroup], seeds: Sequence[int], shown: Sequence[str], rule: Rule) -> list[_Score]:
    """Return the scores on each data set, then the means over these, seed by seed."""
    scores = [
        _score(group, metric_name("test", group.kind_scored(name, metric)), name, metric, seeds, rule)
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
    cells = [score.name, score.metric, percent_text(scored.value), interval_text(scored), "", "", ""]
    if test is not None:
        cells[-3:] = [percent_text(test.value, "+"), interval_text(test), chance_text(test.p) if corrected else ""]
    return [*cells, corrected, mean_and_spread(100 * (score.home - score.away)) if len(score.home) else "-"]


def _notes(first: str, seeds: Sequence[int], num_claims: int, rule: Rule) -> Iterator[str]:
    yield (
        f"percent, over seeds {', '.join(map(str, seeds))}, with Student's 95 % intervals; less {first}: in pairs of "
        "runs with one seed"
    )
    yield f"p: Student's paired test of the mean over data sets; by Holm's method for {num_claims} tests"
    yield "drop: the mean score on the clients' test sets less that on the left-out one, in points, +- the deviation"
    yield f"the round is chosen by {CHOSEN_BY[rule.name]}"
