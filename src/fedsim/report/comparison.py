"""Runs next to published numbers, with every difference between the two experiments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from fedsim.core.errors import ConfigError, DataError
from fedsim.core.metrics import LABELS
from fedsim.papers.contradictions import impossible_numbers
from fedsim.papers.files import Paper, list_papers, read_paper
from fedsim.papers.published import Footnotes, Table, TableRow
from fedsim.papers.resolved_rows import find_run
from fedsim.report.closest import Match, closest_row, closest_table, verdict_lines
from fedsim.report.costs import pruned_and_sent, work
from fedsim.report.groups import RunGroup, splits, unequal_evaluation
from fedsim.report.layout import Block, table_in_parts
from fedsim.report.left_out_comparison import leaves_out, left_out_comparison
from fedsim.report.runs import CHOSEN_BY, Rule, Run

_DRAWN = "SyntheticReID"
_FOLDERS = "MarketFolders"
_FEW = 2
"""Up to this number of groups, their runs are columns next to those of a paper."""


def compare_with(
    reference: str, groups: Sequence[RunGroup], metric: str, rule: Rule, is_given: bool, left_out: bool = False
) -> str:
    """Return tables of a paper with the runs next to the published numbers, as text.

    If ``reference`` names no table, these are the tables with the row closest to the settings of each group.

    Args:
        reference: a paper, or one table of it: ``003``, ``003/table4``; the prefix ``papers/`` is allowed.
        groups: the runs.
        metric: the first number of each cell; ``mAP`` is the definition that the paper uses.
        rule: selects scores of the runs, shown in addition to those of the last evaluation.
        is_given: whether the user chose this rule; otherwise the paper's rule applies if runs have enough evaluations.
            In a table of left-out data sets, people of the sources then choose the round.
        left_out: show all columns of a table of left-out data sets, also those of which there is no run.

    Raises:
        ConfigError: if there is no such paper or table, the paper has no such metric, or the table is of left-out data
            sets and the runs are not, or the other way round.
        DataError: if a table and the runs have no test set in common.
    """
    paper, chosen = _tables_for(reference, groups)
    if left_out and (plain := [table.name for table in chosen if not table.left_out]):
        raise ConfigError(f"--left_out: {paper.key}/{plain[0]} is no table of left-out data sets; leave it out")
    rules = {group: _rules(paper, group, rule, is_given) for group in groups}
    texts = [
        left_out_comparison(paper, table, groups, metric, rule if is_given else None, left_out).text()
        if table.left_out
        else _Comparison(paper, table, groups, metric, rules).text()
        for table in chosen
    ]
    unused = [f"{paper.key}/{table.name}" for table in paper.tables if table not in chosen]
    warnings = list(_warnings(groups))
    parts = [f"Paper {paper.key}: {paper.content['title']}\n{paper.content['source']}", *warnings, *texts, *warnings]
    return "\n\n".join([*parts, f"other tables: {', '.join(unused)}"] if unused else parts)


def tables_with_runs(
    reference: str | None, groups: Sequence[RunGroup], metric: str, rule: Rule
) -> list[tuple[str, Block]]:
    """Return titles and tables of papers for a page; the runs stand below the published rows.

    ``reference`` names a paper, or one table of it; None: all papers that share a test set with the runs. If it is not
    None, the errors are those of :func:`compare_with`.
    """
    run_sets = {name for group in groups for name in group.runs[0].test_sets} - {"seen", "unseen"}
    blocks, shown = [], metric if reference else "mAP"
    for paper, tables in [_tables_for(key, groups) for key in ([reference] if reference else list_papers())]:
        rules = {group: _rules(paper, group, rule, is_given=False) for group in groups}
        for table in tables:
            if reference is None and not run_sets & set(table.test_sets):
                continue
            title = f"Paper {paper.key}, {table.name}: {table.title}"
            if table.left_out:
                if reference or leaves_out(groups, table):
                    blocks.append((title, left_out_comparison(paper, table, groups, shown, None).block()))
            else:
                blocks.append((title, _Comparison(paper, table, groups, shown, rules).block()))
    return blocks


def find_table(reference: str) -> tuple[Paper, Table | None]:
    """Return the paper that ``reference`` names, and its table if one is named; raise ConfigError if there is none."""
    key, _, name = reference.removeprefix("papers/").partition("/")
    paper = read_paper(key, "--compare")
    named_table = next((table for table in paper.tables if table.name == name), None)
    if name and named_table is None:
        names = ", ".join(table.name for table in paper.tables)
        raise ConfigError(f"--compare: paper {paper.key} has no {name}; choose from {names}")
    return paper, named_table


def _tables_for(reference: str, groups: Sequence[RunGroup]) -> tuple[Paper, list[Table]]:
    """Return the paper and the table that ``reference`` names; of a paper alone, the closest table of each group."""
    paper, named_table = find_table(reference)
    names = {named_table.name} if named_table else {closest_table(paper, group.runs).name for group in groups}
    return paper, [table for table in paper.tables if table.name in names]


def not_comparable(run: Run) -> Iterator[str]:
    """Yield the reasons why a run cannot be compared with a paper; each continues a sentence about the run."""
    if not run.config:
        yield "holds no config.yaml, so its data and settings are not known"
    if run.changes:
        yield f"was continued with other settings ({'; '.join(map(str, run.changes))})"
    if run.setting("data.dry_run"):
        yield "is a DRY RUN on small drawn stand-ins of the data sets (data.dry_run)"
    if _DRAWN in (run.setting("data.source") or ()):
        yield f"has SYNTHETIC DATA, drawn people ({_DRAWN})"
    if not run.summary["finished"]:
        yield f"is NOT FINISHED: it ends with round {run.summary['rounds']}"
    if (limit := run.setting("data.limit_client_batches")) is not None:
        yield f"trained on A PART OF THE DATA (data.limit_client_batches: {limit})"


def _warnings(groups: Sequence[RunGroup]) -> Iterator[str]:
    """Yield a line per reason, with the runs concerned."""
    members: dict[str, list[RunGroup]] = {}
    for group in groups:
        for reason in dict.fromkeys(reason for run in group.runs for reason in not_comparable(run)):
            members.setdefault(reason, []).append(group)
    for reason, concerned in members.items():
        each = f"each of {', '.join(group.label for group in concerned)}"
        yield f"NOT COMPARABLE: {concerned[0].runs[0].folder if len(concerned) == 1 else each} {reason}"


def _rules(paper: Paper, group: RunGroup, rule: Rule, is_given: bool) -> list[Rule]:
    """Return the last evaluation and the user's rule, or the paper's rule if the runs have enough evaluations."""
    second = rule if is_given else replace(rule, name=paper.content["rule"])
    if second.name == "last":
        return [second]
    if not is_given and any(not second.can_choose(run) for run in group.runs):
        return [Rule()]
    return [Rule(), second]


class _Line(NamedTuple):
    """The scores of one model: a column of the table, or a line if there are many runs."""

    label: str
    model: str
    source: str
    """``published``, or the rule"""
    cells: list[str]
    """per test set"""
    is_loud: bool = False
    """whether it is marked as not comparable"""

    @property
    def column(self) -> tuple[str, list[str]]:
        """The header and the cells."""
        lines = [*(["NOT COMPARABLE"] if self.is_loud else []), self.label, self.model, self.source]
        return "\n".join(lines), self.cells

    @property
    def line(self) -> list[str]:
        """Label, model and source, then the cells."""
        return [self.label, self.model, self.source + (", NOT COMPARABLE" if self.is_loud else ""), *self.cells]


@dataclass
class _Comparison:
    """One table of a paper, and the runs to compare."""

    paper: Paper
    table: Table
    groups: Sequence[RunGroup]
    metric: str
    rules: Mapping[RunGroup, list[Rule]]
    """the rules of each group's columns"""
    footnotes: Footnotes = field(default_factory=Footnotes)
    matches: dict[RunGroup, Match | None] = field(init=False)
    """the row that each group is closest to"""

    def __post_init__(self) -> None:
        self.matches = {group: closest_row(self.paper, self.table, group.runs) for group in self.groups}

    def text(self) -> str:
        """Return the table and its notes."""
        title = f"{self.table.name}: {self.table.title}"
        if not self.table.test_sets:
            return "\n".join([title, *self._figures_only()])
        if not set(self.table.test_sets) & {name for group in self.groups for name in group.runs[0].test_sets}:
            raise DataError(
                f"--compare: {self.groups[0].runs[0].folder} has none of the test sets of {self.paper.key}/"
                f"{self.table.name}: {', '.join(self.table.test_sets)}"
            )
        test_sets = self.paper.test_sets
        names = [name + self.footnotes.mark(test_sets[name]) for name in self.table.test_sets]
        if len(self.groups) <= _FEW:
            table = self._side_by_side(names)
        else:
            table = Block(["method", "model", "scores", *names], self._one_below_another(), num_left=3).text("table")
        return "\n".join([f"{title}; {self._unit}", "", table, "", *self._costs(), *self._legend()])

    def block(self) -> Block:
        """Return the paper's rows, each followed by the runs closest to it, and the notes."""
        names = [name + self.footnotes.mark(self.paper.test_sets[name]) for name in self.table.test_sets]
        lines = self._one_below_another()
        origin = f"{self.paper.content['title']}; {self.paper.content['source']}"
        notes = [origin, self._unit, *_warnings(self.groups)]
        return Block(["method", "model", "scores", *names], lines, (*notes, *self._legend()), num_left=3)

    def _costs(self) -> Iterator[str]:
        """Yield the table of pruning and traffic: a column per row of the paper that has them, and per group."""
        if not any(row.costs for row in self.table.rows):
            return
        names = self.table.test_sets
        columns = [
            (f"{row.name}\npublished", [" / ".join(f"{v:.2f}" for v in row.costs.get(n, ())) or "-" for n in names])
            for row in self.table.rows
            if row.costs
        ]
        runs = [
            (f"{group.label}\nlast round", [pruned_and_sent(group, name) for name in names]) for group in self.groups
        ]
        title = "pruned, percent / received and sent, GiB per client, as model.accounting counts"
        yield from (f"{self.table.name}: {title}", "", table_in_parts(names, columns, "client", always=runs), "")

    def _side_by_side(self, names: Sequence[str]) -> str:
        """Return a table with a column per row of the paper; each part of it has the runs' columns."""
        published = [self._published(row).column for row in self.table.rows if row.scores]
        runs = [line.column for group in self.groups for line in self._of_run(group)]
        return table_in_parts(names, published, "data set", always=runs)

    def _one_below_another(self) -> list[list[str]]:
        """Return a line per row of the paper, each followed by runs' lines; runs of other methods come last."""
        below: dict[int, list[_Line]] = {}
        last: list[_Line] = []
        for group in self.groups:
            for line in self._of_run(group):
                position = self._position(self.matches[group], line)
                (last if position is None else below.setdefault(position, [])).append(line)
        lines: list[_Line] = []
        for position, row in enumerate(self.table.rows):
            lines += [self._published(row)] if row.scores else []
            lines += below.get(position, [])
        return [line.line for line in [*lines, *last] if set(line.cells) != {"-"}]

    def _position(self, match: Match | None, line: _Line) -> int | None:
        """Return the row below which a line stands: of the matched run's rows the one with the line's model."""
        if match is None:
            return None
        rows = list(self.table.rows)
        of_run = [row for row in rows if row.scores and match.name in self._names_of(row)]
        of_model = [row for row in of_run if (row.client or row.model) == line.model]
        return rows.index((of_model or [match.row])[0])

    def _names_of(self, row: TableRow) -> list[str]:
        return [f"{paper.key}/{name}" for paper, name in (find_run(self.paper, run) for run in row.runs)]

    @property
    def _numbers(self) -> list[str]:
        """The metrics of the cells of most test sets."""
        if self.metric not in (*self.table.metrics, "mAP"):
            names = ", ".join(sorted(self.table.metrics))
            raise ConfigError(f"--metric: {self.paper.key}/{self.table.name} has no {self.metric}; choose from {names}")
        special = {self.paper.test_sets[name].metric for name in self.table.test_sets} - {"rank1"}
        return [m for m in dict.fromkeys((self.metric, "rank1")) if m in self.table.metrics - special]

    @property
    def _unit(self) -> str:
        """The meaning of the cells."""
        special = {name: self._metrics(name) for name in self.table.test_sets if self._metrics(name) != self._numbers}
        texts = [" / ".join(LABELS.get(m, m) for m in metrics) for metrics in (self._numbers, *special.values())]
        return f"{texts[0]} in percent" + "".join(f"; {name}: {t}" for name, t in zip(special, texts[1:], strict=True))

    def _metrics(self, name: str) -> list[str]:
        metric = self.paper.test_sets[name].metric
        return self._numbers if metric == "rank1" else [metric]

    def _published(self, row: TableRow) -> _Line:
        label = row.name + self.footnotes.mark(row)
        marks = {name: mark for name, mark, _ in impossible_numbers(self.paper, row)}
        cells = []
        for name in self.table.test_sets:
            scores, digits = row.scores.get(name, {}), self._digits(name)
            texts = [f"{scores[m]:.{digits}f}" if m in scores else "-" for m in self._metrics(name)]
            if name in row.spread:
                texts[0] += f" ± {row.spread[name]:.{digits}f}"
            cells.append(" / ".join(texts) + marks.get(name, "") if scores else "-")
        return _Line(label, row.model, "published", cells)

    def _of_run(self, group: RunGroup) -> Iterator[_Line]:
        is_loud = any(reason for run in group.runs for reason in not_comparable(run))
        paper, names = self.paper.content, self.table.test_sets
        metrics = {n: [paper["mAP"] if metric == "mAP" else metric for metric in self._metrics(n)] for n in names}
        for model_kind, client in self._models(group):
            for rule in self.rules[group]:
                below = f"/{client}" if client else ""
                cells = [group.cell(f"test/{model_kind}/{n}{below}", metrics[n], rule, self._digits(n)) for n in names]
                yield _Line(group.label, client or model_kind, rule.name, cells, is_loud)

    def _digits(self, name: str) -> int:
        digits = self.paper.test_sets[name].digits
        return self.table.digits if digits is None else digits

    def _models(self, group: RunGroup) -> list[tuple[str, str]]:
        """Return kind and client of the table's models that the group has; models with equal scores appear once.

        If all rows of a kind are those of single clients, the mean over clients is left out.
        """
        kinds, rows = group.kinds(Rule()), [(row.model, row.client) for row in self.table.rows]
        models = [model for model in dict.fromkeys([(group.runs[0].primary, ""), *rows]) if model[0] in kinds]
        columns: dict[str, tuple[str, str]] = {}
        for model_kind, client in sorted(models, key=lambda model: kinds.index(model[0])):
            metrics = [(name, self.paper.test_sets[name].metric) for name in self.table.test_sets]
            paths = [f"test/{model_kind}/{name}/{client}/{metric}".replace("//", "/") for name, metric in metrics]
            scores = [group.values(path, Rule()).tolist() for path in paths]
            if any(scores) or not client:
                columns.setdefault(repr(scores), (model_kind, client))
        means = {model_kind for model_kind, client in rows if not client}
        without_mean = {model_kind for model_kind, client in columns.values() if client} - means
        return [model for model in columns.values() if model[1] or model[0] not in without_mean]

    def _figures_only(self) -> Iterator[str]:
        for row in self.table.rows:
            if not row.scores:
                yield f"  {row.name}: {row.status}, no numbers are printed; {row.note}"

    def _legend(self) -> Iterator[str]:
        yield from (f"[{number}] {remark}" for remark, number in self.footnotes.items())
        for row in self.table.rows:
            yield from (
                f"{mark} {name}, {row.name}: {reason}" for name, mark, reason in impossible_numbers(self.paper, row)
            )
        yield from (f"- {note}" for note in (*self.paper.content.get("notes", ()), *self.table.notes))
        if "mAP" in self._numbers and self.paper.content["mAP"] != "mAP":
            yield f"- mAP of the runs is {self.paper.content['mAP']}"
        shown = dict.fromkeys(rule.name for group in self.groups for rule in self.rules[group])
        yield from (f"- {CHOSEN_BY[name]}" for name in shown if name != "best3")
        for group in self.groups:
            rules = self.rules[group]
            if rules[-1].name == "best3":
                yield from (f"- {run.folder}: {rules[-1].describe(run)}; chosen on test data" for run in group.runs)
            elif self.paper.content["rule"] == "best3":
                yield f"- {group.label}: the paper's rule best3 is not shown; it needs three evaluations"
            yield from self._differences(group)
        lines = (*splits(self.groups), *unequal_evaluation(self.groups), *work(self.groups))
        yield from (f"- {line}" for line in lines)
        yield from self._figures_only()

    def _differences(self, group: RunGroup) -> Iterator[str]:
        is_tested = any(rule.name == "tested" for rule in self.rules[group])
        yield from verdict_lines(group.label, group.runs, self.matches[group], is_tested)
        if _FOLDERS in (group.runs[0].setting("data.source") or ()):
            yield "    its data sets are folders whose names are not checked"
