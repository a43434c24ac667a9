"""Runs beside published numbers, with everything that keeps them from being the same experiment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fedsim.core.errors import ConfigError, DataError
from fedsim.report.layout import mean_and_spread, table_in_parts
from fedsim.report.published import Paper, Row, Table, doubts_about, read_paper
from fedsim.report.rules import Rule
from fedsim.report.runs import KINDS, Group, Run

__all__ = ["closest_table", "compare_with", "not_comparable"]

_DRAWN = "SyntheticReID"
_FOLDERS = "MarketFolders"
_LABELS = {"rank1": "rank-1", "rank5": "rank-5", "rank10": "rank-10"}


def compare_with(which: str, groups: Sequence[Group], metric: str, rule: Rule, is_given: bool) -> str:
    """Return the table of a paper that holds the row closest to each group's settings, with the runs beside it.

    Args:
        which: a paper, or one table of it: ``003``, ``003/table4``; ``papers/`` may stand before it.
        groups: the runs.
        metric: the first number of each cell; ``mAP`` is the one that the paper means.
        rule: of the runs' scores, beside the last evaluation.
        is_given: whether somebody asked for this rule; otherwise it is the paper's, where runs have enough evaluations.

    Raises:
        ConfigError: if there is no such paper or table, or the paper has no such metric.
        DataError: if a table and the runs have no test set in common.
    """
    key, _, name = which.removeprefix("papers/").partition("/")
    paper = read_paper(key)
    if name:
        chosen = [_find(paper, name)]
    else:
        closest = {closest_table(paper, group.runs[0]).name for group in groups}
        chosen = [table for table in paper.tables if table.name in closest]
    rules = {group: _rules(paper, group, rule, is_given) for group in groups}
    texts = [_Comparison(paper, table, groups, metric, rules).text() for table in chosen]
    others = [f"{key}/{table.name}" for table in paper.tables if table not in chosen]
    warnings = [f"NOT COMPARABLE: {text}" for group in groups for text in not_comparable(group.runs[0])]
    parts = [f"Paper {key}: {paper.title}\n{paper.source}", *warnings, *texts, *warnings]
    return "\n\n".join([*parts, f"other tables: {', '.join(others)}"] if others else parts)


def _find(paper: Paper, name: str) -> Table:
    for table in paper.tables:
        if table.name == name:
            return table
    names = ", ".join(table.name for table in paper.tables)
    raise ConfigError(f"--compare: paper {paper.key} has no {name}; choose from {names}")


def closest_table(paper: Paper, run: Run) -> Table:
    """Return the table with the row whose settings are nearest to a run's; of equals the one that says most."""

    def distance(table: Table) -> tuple[tuple[bool, int], int, int]:
        nearest = _closest_row(table, run).distance(run)
        return nearest, -len(set(table.test_sets) & set(run.test_sets)), -len(table.metrics)

    return min((table for table in paper.tables if table.test_sets), key=distance)


def _closest_row(table: Table, run: Run) -> Row:
    return min((row for row in table.rows if row.scores), key=lambda row: row.distance(run))


def not_comparable(run: Run) -> Iterator[str]:
    """Yield why no number of a run says anything about a paper."""
    if not run.config:
        yield f"{run.folder} holds no config.yaml, so its data and settings are not known"
    if run.setting("data.dry_run"):
        yield f"{run.folder} is a DRY RUN on small drawn stand-ins of the data sets (data.dry_run)"
    if _DRAWN in _sources(run):
        yield f"{run.folder} has SYNTHETIC DATA, drawn people ({_DRAWN})"
    if not run.summary["finished"]:
        yield f"{run.folder} is NOT FINISHED: it ends with round {run.summary['rounds']}"
    if (limit := run.setting("data.limit_client_batches")) is not None:
        yield f"{run.folder} trained on A PART OF THE DATA (data.limit_client_batches: {limit})"


def _sources(run: Run) -> set[str]:
    found = run.setting("data.source")
    sources = found if isinstance(found, list) else [found]
    return {str(source.get("class_path")).rpartition(".")[2] for source in sources if isinstance(source, dict)}


def _rules(paper: Paper, group: Group, rule: Rule, is_given: bool) -> list[Rule]:
    """The last evaluation, and what else is asked for, or the paper does and the runs allow."""
    other = rule if is_given else replace(rule, name=paper.rule)
    if other.name == "last":
        return [other]
    if not is_given and any(not other.can_choose(run) for run in group.runs):
        return [Rule()]
    return [Rule(), other]


@dataclass
class _Comparison:
    """One table of a paper and the runs beside it."""

    paper: Paper
    table: Table
    groups: Sequence[Group]
    metric: str
    rules: Mapping[Group, list[Rule]]
    """of each group's columns"""
    footnotes: dict[str, int] = field(default_factory=dict)
    """text -> its number"""

    def text(self) -> str:
        """Return the table and all that is to be said about it."""
        title = f"{self.table.name}: {self.table.title}"
        if not self.table.test_sets:
            return "\n".join([title, *self._figures_only()])
        if not set(self.table.test_sets) & {name for group in self.groups for name in group.runs[0].test_sets}:
            raise DataError(
                f"--compare: {self.groups[0].runs[0].folder} has none of the test sets of {self.paper.key}/"
                f"{self.table.name}: {', '.join(self.table.test_sets)}"
            )
        numbers = self._numbers
        names = [self._name_of(name) for name in self.table.test_sets]
        published = [self._published(row, numbers) for row in self.table.rows if row.scores]
        table = table_in_parts(names, published, "data set", always=list(self._of_runs(numbers)))
        return "\n".join(
            [f"{title}; {' / '.join(_LABELS.get(n, n) for n in numbers)} in percent", "", table, "", *self._legend()]
        )

    @property
    def _numbers(self) -> list[str]:
        """What stands in a cell."""
        if self.metric not in (*self.table.metrics, "mAP"):
            names = ", ".join(sorted(self.table.metrics))
            raise ConfigError(f"--metric: {self.paper.key}/{self.table.name} has no {self.metric}; choose from {names}")
        return [m for m in dict.fromkeys((self.metric, "rank1")) if m in self.table.metrics]

    def _note(self, text: str) -> str:
        """Return the mark of a footnote."""
        return f" [{self.footnotes.setdefault(text, len(self.footnotes) + 1)}]" if text else ""

    def _name_of(self, name: str) -> str:
        test_set = self.paper.test_sets[name]
        prefix = f"{test_set.status}: " if test_set.status != "ok" else ""
        note = f"{prefix}{test_set.note}" if test_set.note else ""
        return f"{name}{self._note(note)}"

    def _published(self, row: Row, numbers: Sequence[str]) -> tuple[str, list[str]]:
        prefix = f"{row.status}: " if row.status != "ok" else ""
        header = f"{row.name}{self._note(prefix + row.note if row.note else '')}\n{row.model}\npublished"
        marks = {name: mark for name, mark, _ in doubts_about(self.paper, row)}
        cells = []
        for name in self.table.test_sets:
            scores = row.scores.get(name, {})
            texts = [f"{scores[m]:.{self.paper.digits}f}" if m in scores else "-" for m in numbers]
            cells.append(" / ".join(texts) + marks.get(name, "") if scores else "-")
        return header, cells

    def _of_runs(self, numbers: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
        for group in self.groups:
            loud = "NOT COMPARABLE\n" if any(not_comparable(group.runs[0])) else ""
            for kind in self._kinds(group):
                for rule in self.rules[group]:
                    cells = [self._cell(group, kind, name, rule, numbers) for name in self.table.test_sets]
                    yield f"{loud}{group.label}\n{kind}\n{rule.name}", cells

    def _kinds(self, group: Group) -> list[str]:
        """The table's kinds of models that the group has; a model whose scores are the global one's stands once."""
        primary = group.runs[0].primary
        wanted = [kind for kind in KINDS if kind in {primary, *(row.model for row in self.table.rows)}]
        columns: dict[str, str] = {}
        for kind in wanted:
            if kind in group.kinds(Rule()):
                names = self.table.test_sets
                scores = [group.values(f"test/{kind}/{name}/rank1", Rule()).tolist() for name in names]
                columns.setdefault(repr(scores), kind)
        return list(columns.values())

    def _cell(self, group: Group, kind: str, name: str, rule: Rule, numbers: Sequence[str]) -> str:
        found = [
            100 * group.values(f"test/{kind}/{name}/{self.paper.mean_precision if m == 'mAP' else m}", rule)
            for m in numbers
        ]
        return " / ".join(mean_and_spread(n, self.paper.digits) for n in found) if len(found[0]) else "-"

    def _figures_only(self) -> Iterator[str]:
        for row in self.table.rows:
            if not row.scores:
                yield f"  {row.name}: {row.status}, no numbers are printed; {row.note}"

    def _legend(self) -> Iterator[str]:
        yield from (f"[{number}] {text}" for text, number in self.footnotes.items())
        for row in self.table.rows:
            yield from (f"{mark} {name}, {row.name}: {why}" for name, mark, why in doubts_about(self.paper, row))
        yield from (f"- {note}" for note in (*self.paper.notes, *self.table.notes))
        if "mAP" in self._numbers and self.paper.mean_precision != "mAP":
            yield f"- mAP of the runs is {self.paper.mean_precision}"
        for group in self.groups:
            rules = self.rules[group]
            if rules[-1].name == "best3":
                yield from (f"- {run.folder}: {rules[-1].describe(run)}; chosen on test data" for run in group.runs)
            elif self.paper.rule == "best3":
                yield f"- {group.label}: the paper's rule best3 is not shown; it needs three evaluations"
            yield self._differences(group)
        yield from self._figures_only()

    def _differences(self, group: Group) -> str:
        run = group.runs[0]
        row = _closest_row(self.table, run)
        differences = row.differences(run)
        if _FOLDERS in _sources(run):
            differences.append("its data sets are folders whose names nobody has checked")
        what = f"differs in {'; '.join(differences)}" if differences else "has the published settings, as far as listed"
        return f"- {group.label} is closest to '{row.name}' and {what}"
