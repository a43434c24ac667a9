"""``fedsim report --compare`` beside a printed table in which each column is a run of its own.

Such a run leaves the data set of its column out. Below each printed row stand the runs closest to it, by the round that
was chosen without the target, by the best round there, and the gap between the two; see
:mod:`fedsim.report.leave_one_out`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from fedsim.core.errors import ConfigError, DataError
from fedsim.core.metrics import LABELS
from fedsim.core.names import metric_name
from fedsim.papers.contradictions import lines_of, wrong_mean
from fedsim.papers.files import Paper
from fedsim.papers.published import Footnotes, Table, TableRow
from fedsim.papers.resolved_rows import find_run
from fedsim.report.closest import Match, closest_row, settings_of_row, verdict_lines, wrong_sets
from fedsim.report.groups import RunGroup, name_variants
from fedsim.report.layout import Block
from fedsim.report.leave_one_out import (
    COLUMNS,
    UNSEEN,
    Choice,
    Rotations,
    by_method,
    choice_of,
    honest_rule,
    mean_of,
    refuse_oracle,
    rotations_of,
)
from fedsim.report.runs import CHOSEN_BY, Rule, Run
from fedsim.settings.effects import Flat

_Line = list[str]
"""the scores of one model by one choice: method, model and choice, then a cell per left-out data set, and the mean"""


def leaves_out(groups: Sequence[RunGroup], table: Table) -> bool:
    """Return whether each run leaves out exactly one data set, which is a column of the table."""
    unseen = [group.runs[0].setting(UNSEEN) for group in groups]
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
        left_out = run.setting(UNSEEN)
        rows = (settings_of_row(self.paper.key, name) for name in self.paper.rows)
        return next((row for row in rows if row[UNSEEN].value == left_out), None)

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
