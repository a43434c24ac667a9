"""``fedsim report --left_out``: leave-one-data-set-out, with all rotations in one table.

Scores on a data set that no client trained on are those of a round that was chosen without it, and those of the best
round there. The second is an oracle: with the target's test labels one can do no better among the evaluated rounds. The
gap between the two is what a table gains that is chosen on its own test set. ``--compare`` has them next to printed
tables in which each column is a run of its own: the one that leaves this data set out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fedsim.core.errors import ConfigError, DataError
from fedsim.core.metrics import LABELS, comparable
from fedsim.core.names import metric_name
from fedsim.papers.contradictions import lines_of, wrong_mean
from fedsim.papers.files import Paper
from fedsim.papers.published import Footnotes, Table, TableRow
from fedsim.papers.resolved_rows import find_run
from fedsim.report.closest import Match, closest_row, settings_of_row, verdict_lines, wrong_sets
from fedsim.report.groups import MEANING, RunGroup, shown_metrics
from fedsim.report.layout import Block, mean_and_spread
from fedsim.report.names import name_variants
from fedsim.report.rules import CHOSEN_BY, Rule
from fedsim.report.runs import KINDS, Run
from fedsim.settings.configuration import Flat, digest, values_of_experiment

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

    def cell(self, column: str) -> str:
        """Return numbers as a table shows them; ``-`` without any."""
        texts = [mean_and_spread(values) for values in self.scores[column] if len(values)]
        return " / ".join(_signed(cell) if column == "gap" else cell for cell in texts) or "-"

    def mean(self, column: str) -> NDArray[np.float64]:
        """Return the mean over seeds, a number per metric; empty without scores."""
        values = self.scores[column]
        return np.array([of_seeds.mean() for of_seeds in values]) if all(map(len, values)) else np.zeros(0)


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
    return Choice(columns, rounds, counts)


def mean_of(choices: Sequence[Choice], column: str) -> str:
    """Return the mean over data sets of the means over seeds, as a table shows it; ``-`` if one is missing."""
    means = [choice.mean(column) for choice in choices]
    if not means or not all(map(len, means)):
        return "-"
    texts = [f"{value:.1f}" for value in np.mean(means, axis=0)]
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


_Line = list[str]
"""the scores of one model by one choice: method, model and choice, then a cell per left-out data set, and the mean"""


def leaves_out(groups: Sequence[RunGroup], table: Table) -> bool:
    """Return whether each run leaves out exactly one data set, which is a column of the table."""
    unseen = [group.runs[0].setting("data.unseen") for group in groups]
    return all(isinstance(names, list) and len(names) == 1 and names[0] in table.test_sets for names in unseen)


def left_out_comparison(
    paper: Paper, table: Table, groups: Sequence[RunGroup], metric: str, rule: Rule | None, is_whole: bool = False
) -> LeftOutComparison:
    """Return a table of left-out data sets with the runs below its rows.

    Args:
        paper: the paper.
        table: one of its tables.
        groups: the runs.
        metric: the first number of each cell.
        rule: the user's rule; None: people of the sources choose, if the runs have held some out.
        is_whole: show all columns, also those of which there is no run.

    Raises:
        ConfigError: if the table has no such metric, a run does not leave out one data set, or the rule is oracle.
        DataError: if a run leaves out a data set that is no column of the table.
    """
    if metric not in table.metrics:
        names = ", ".join(sorted(table.metrics))
        raise ConfigError(f"--metric: {paper.key}/{table.name} has no {metric}; choose from {names}")
    shown = [name for name in dict.fromkeys((metric, "rank1")) if name in table.metrics]
    if rule is not None:
        refuse_oracle(rule, "a table of left-out data sets")
    chosen = rule or honest_rule([run for group in groups for run in group.runs])
    return LeftOutComparison(paper, table, groups, shown, chosen, is_whole)


@dataclass
class LeftOutComparison:
    """One table of a paper, and the runs to compare.

    A score stands only in the column of the data set that its run leaves out; the run's scores on its sources stand
    nowhere.
    """

    paper: Paper
    table: Table
    groups: Sequence[RunGroup]
    shown: Sequence[str]
    """metrics of a cell"""
    rule: Rule
    """chooses the rounds of the runs"""
    is_whole: bool
    """whether all columns are shown, also those of which there is no run"""
    footnotes: Footnotes = field(default_factory=Footnotes)
    methods: list[Rotations] = field(init=False)
    labels: list[str] = field(init=False)
    """names of the methods"""
    names: list[str] = field(init=False)
    """the data sets that are shown"""

    def __post_init__(self) -> None:
        for name, group in rotations_of(self.groups, "--compare"):
            if name not in self.table.test_sets:
                raise DataError(
                    f"--compare: {group.runs[0].folder} leaves {name} out, which is no column of {self.paper.key}/"
                    f"{self.table.name}; its columns are {', '.join(self.table.test_sets)}"
                )
        self.methods = by_method(self.groups, "--compare")
        self.labels = name_variants([next(iter(rotations.values())).runs[0] for rotations in self.methods])
        self.names = [
            n for n in self.table.test_sets if self.is_whole or any(n in rotations for rotations in self.methods)
        ]

    def text(self) -> str:
        """Return the table and its notes."""
        numbers = " / ".join(LABELS.get(metric, metric) for metric in self.shown)
        return f"{self.table.name}: {self.table.title}; {numbers} in percent\n\n{self.block().text('table')}"

    def block(self) -> Block:
        """Return the paper's rows, each followed by the runs closest to it, and the notes."""
        test_sets = self.paper.test_sets
        names = [name + self.footnotes.mark(test_sets[name]) for name in self.names]
        mean = ["mean"] if len(self.names) > 1 else []
        lines = list(self._lines())
        return Block(["method", "model", "scores", *names, *mean], lines, [*self._legend()], num_left=3)

    def _lines(self) -> Iterator[_Line]:
        """Yield a line per row of the paper, each followed by runs' lines; runs of other methods come last."""
        below: dict[str, list[_Line]] = {}
        last: list[_Line] = []
        for label, rotations in zip(self.labels, self.methods, strict=True):
            matches = {name: closest_row(self.paper, self.table, group.runs) for name, group in rotations.items()}
            for row in self.table.rows:
                of_row = {name: rotations[name] for name, match in matches.items() if _is_of(row, match)}
                below.setdefault(row.name, []).extend(self._lines_of_run(label, row, of_row))
            unmatched = {name: rotations[name] for name, match in matches.items() if match is None}
            last += self._lines_of_run(label, None, unmatched)
        for row in self.table.rows:
            if any(name in row.scores for name in self.names):
                yield self._published(row)
                yield from below.get(row.name, [])
        yield from last

    def _published(self, row: TableRow) -> _Line:
        digits = self.table.digits
        texts = [
            " / ".join(f"{row.scores[name][m]:.{digits}f}" for m in self.shown if m in row.scores.get(name, {})) or "-"
            for name in self.names
        ]
        if len(self.names) > 1:
            texts.append(self._published_mean(row))
        return [row.name + self.footnotes.mark(row), "client" if row.single else row.model, "published", *texts]

    def _published_mean(self, row: TableRow) -> str:
        """Return the printed mean, with ! if its columns contradict it; else that of its columns, if all are shown."""
        if self.names != self.table.test_sets or not set(self.names) <= set(row.scores):
            return "-"
        if row.mean:
            printed = dict(zip(next(iter(row.scores.values())), row.mean, strict=True))
            mark = "!" if wrong_mean(row) else ""
            return " / ".join(f"{printed[metric]:.1f}" for metric in self.shown) + mark
        scores = [row.scores[name] for name in self.names]
        return " / ".join(f"{sum(of_set[m] for of_set in scores) / len(scores):.1f}" for m in self.shown)

    def _lines_of_run(self, label: str, row: TableRow | None, rotations: Rotations) -> Iterator[_Line]:
        """Yield the choice, the oracle and the gap of a method's runs; ``row``: the printed row that they are."""
        if not rotations:
            return
        run = next(iter(rotations.values())).runs[0]
        scores = (run.summary["final"] or {}).get("metrics", {})
        has_kind = row is not None and any(key.startswith(f"test/{row.model}/") for key in scores)
        model_kind = row.model if row is not None and has_kind else run.primary
        choices = {}
        for name, group in rotations.items():
            single = [row.single[name]] if row is not None and row.single else []
            choices[name] = choice_of(group, metric_name("test", model_kind, name, *single), self.shown, self.rule)
        loud = (
            ", NOT COMPARABLE" if any(self._reasons(run) for group in rotations.values() for run in group.runs) else ""
        )
        sources = {"chosen": self.rule.name, "oracle": "oracle", "gap": "gap"}
        for column in COLUMNS:
            cells = [choices[name].cell(column) if name in choices else "-" for name in self.names]
            model = "client" if row is not None and row.single else model_kind
            yield [label, model, sources[column] + loud, *cells, *self._mean(choices, column)]

    def _mean(self, choices: dict[str, Choice], column: str) -> list[str]:
        if len(self.names) == 1:
            return []
        whole = [choices[name] for name in self.names if name in choices]
        return [mean_of(whole, column) if len(whole) == len(self.table.test_sets) else "-"]

    def _reasons(self, run: Run) -> list[str]:
        """Return why a run's data sets are not those of the row that it is compared with."""
        reference = self._row_of(run) if run.config else None
        return [] if reference is None else list(wrong_sets(reference, run))

    def _row_of(self, run: Run) -> Flat | None:
        """Return the settings of the row that a run is closest to; else of one that leaves the same data set out."""
        match = closest_row(self.paper, self.table, [run])
        if match is not None:
            paper, name = find_run(self.paper, match.name)
            return settings_of_row(paper.key, name)
        left_out = run.setting("data.unseen")
        rows = (settings_of_row(self.paper.key, name) for name in self.paper.rows)
        return next((row for row in rows if row["data.unseen"].value == left_out), None)

    def _legend(self) -> Iterator[str]:
        yield from (f"[{number}] {remark}" for remark, number in self.footnotes.items())
        yield from (f"! {remark}" for remark in lines_of(self.paper))
        yield from (f"- {note}" for note in (*self.paper.content["notes"], *self.table.notes))
        yield "- each column is a run of its own, scored on the data set that it leaves out"
        yield f"- {CHOSEN_BY[self.rule.name]}"
        yield f"- {CHOSEN_BY['oracle']}, by {self.shown[0]}, as the paper chooses; gap: oracle - {self.rule.name}"
        for row in self.table.rows:
            if not row.scores:
                yield f"- {row.name}: {row.status}, no numbers are printed; {row.note}"
        for label, rotations in zip(self.labels, self.methods, strict=True):
            for left_out, group in rotations.items():
                yield from self._differences(f"{label}, {left_out} left out", group)

    def _differences(self, name: str, group: RunGroup) -> Iterator[str]:
        match = closest_row(self.paper, self.table, group.runs)
        yield from verdict_lines(f"{name},", group.runs, match, self.rule.name == "tested")
        for each in group.runs:
            yield from (f"    NOT COMPARABLE: {each.folder} {reason}" for reason in self._reasons(each))


def _is_of(row: TableRow, match: Match | None) -> bool:
    """Return whether a run stands below a row: the closest one, or one of another client of the same runs."""
    if match is None:
        return False
    return row is match.row or bool(row.single and match.row.single and row.runs == match.row.runs)
