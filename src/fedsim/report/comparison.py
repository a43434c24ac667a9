"""Runs beside published numbers, with everything that keeps them from being the same experiment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

from fedsim.core.errors import ConfigError, DataError
from fedsim.papers.files import Paper, list_papers, read_paper
from fedsim.papers.published import Table, TableRow, TestSet
from fedsim.report.bounds import one_match_bounds
from fedsim.report.groups import RunGroup
from fedsim.report.layout import Block, table_in_parts, table_of_lines
from fedsim.report.rules import Rule
from fedsim.report.runs import Run

_DRAWN = "SyntheticReID"
_FOLDERS = "MarketFolders"
_FEW = 2
"""Groups of runs that may stand beside each column of a paper."""

_CMC = {1: "rank1", 5: "rank5", 10: "rank10"}
_LABELS = {"rank1": "rank-1", "rank5": "rank-5", "rank10": "rank-10"}


def compare_with(which: str, groups: Sequence[RunGroup], metric: str, rule: Rule, is_given: bool) -> str:
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
    paper, given = find_table(which)
    names = {given.name} if given else {closest_table(paper, group.runs[0]).name for group in groups}
    chosen = [table for table in paper.tables if table.name in names]
    rules = {group: _rules(paper, group, rule, is_given) for group in groups}
    texts = [_Comparison(paper, table, groups, metric, rules).text() for table in chosen]
    others = [f"{paper.key}/{table.name}" for table in paper.tables if table.name not in names]
    warnings = list(_warnings(groups))
    parts = [f"Paper {paper.key}: {paper.content['title']}\n{paper.content['source']}", *warnings, *texts, *warnings]
    return "\n\n".join([*parts, f"other tables: {', '.join(others)}"] if others else parts)


def tables_beside(which: str | None, groups: Sequence[RunGroup], metric: str, rule: Rule) -> list[tuple[str, Block]]:
    """Return a paper's tables with the runs below their rows, each with its title, for a page.

    ``which`` names a paper, or one table of it; None: all papers with a test set of the runs. Raises what
    :func:`compare_with` does for a paper that is named.
    """
    own = {name for group in groups for name in group.runs[0].test_sets} - {"seen", "unseen"}
    found = []
    for paper, given in [find_table(which)] if which else [find_table(key) for key in list_papers()]:
        names = {given.name} if given else {closest_table(paper, group.runs[0]).name for group in groups}
        rules = {group: _rules(paper, group, rule, is_given=False) for group in groups}
        for table in (table for table in paper.tables if table.name in names):
            if which is None and not own & set(table.test_sets):
                continue
            title = f"Paper {paper.key}, {table.name}: {table.title}"
            found.append((title, _Comparison(paper, table, groups, metric if which else "mAP", rules).block()))
    return found


def find_table(which: str) -> tuple[Paper, Table | None]:
    """Return the paper that ``which`` names, and maybe one table of it; raise ConfigError if there is none."""
    key, _, name = which.removeprefix("papers/").partition("/")
    paper = read_paper(key, "--compare")
    found = next((table for table in paper.tables if table.name == name), None)
    if name and found is None:
        names = ", ".join(table.name for table in paper.tables)
        raise ConfigError(f"--compare: paper {paper.key} has no {name}; choose from {names}")
    return paper, found


def closest_table(paper: Paper, run: Run) -> Table:
    """Return the table with the row whose settings are nearest to a run's; of equals the one that says most."""

    def distance(table: Table) -> tuple[tuple[bool, int], int, int]:
        nearest = _closest_row(table, run).distance(run)
        return nearest, -len(set(table.test_sets) & set(run.test_sets)), -len(table.metrics)

    return min((table for table in paper.tables if table.test_sets), key=distance)


def _closest_row(table: Table, run: Run) -> TableRow:
    return min((row for row in table.rows if row.scores), key=lambda row: row.distance(run))


def doubts_about(paper: Paper, row: TableRow) -> Iterator[tuple[str, str, str]]:
    """Yield what a row's numbers cannot be: a test set, a mark, and why.

    The mark is ``!`` where no definition of average precision gives the number, and ``~`` where the trapezoid does and
    rectangles do not.
    """
    digits = paper.content["digits"]
    for name, scores in row.scores.items():
        cmc = {rank: scores[metric] for rank, metric in _CMC.items() if metric in scores}
        if any(more < less for less, more in pairwise(cmc.values())):
            yield name, "!", "a CMC cannot fall"
        test_set = paper.test_sets[name]
        if not (test_set.one_match and "mAP" in scores and 1 in cmc):
            continue
        one_unit = 10.0**-digits  # half for the bound's rounded terms, half for mAP's
        rectangles = one_match_bounds(cmc, "rectangular", test_set.gallery)
        trapezoid = one_match_bounds(cmc, "trapezoid", test_set.gallery)
        if rectangles.holds(scores["mAP"], one_unit):
            continue
        why = (
            f"mAP {scores['mAP']:.{digits}f}, but with one match per query it lies in {rectangles.low:.2f} to "
            f"{rectangles.high:.2f} (rectangles), {trapezoid.low:.2f} to {trapezoid.high:.2f} (trapezoid)"
        )
        yield name, "~" if trapezoid.holds(scores["mAP"], one_unit) else "!", why


def not_comparable(run: Run) -> Iterator[str]:
    """Yield why no number of a run says anything about a paper; the run is the subject of the sentence."""
    if not run.config:
        yield "holds no config.yaml, so its data and settings are not known"
    if run.setting("data.dry_run"):
        yield "is a DRY RUN on small drawn stand-ins of the data sets (data.dry_run)"
    if _DRAWN in _sources(run):
        yield f"has SYNTHETIC DATA, drawn people ({_DRAWN})"
    if not run.summary["finished"]:
        yield f"is NOT FINISHED: it ends with round {run.summary['rounds']}"
    if (limit := run.setting("data.limit_client_batches")) is not None:
        yield f"trained on A PART OF THE DATA (data.limit_client_batches: {limit})"


def _warnings(groups: Sequence[RunGroup]) -> Iterator[str]:
    """A line per reason, with the runs that it holds for."""
    members: dict[str, list[RunGroup]] = {}
    for group in groups:
        for reason in not_comparable(group.runs[0]):
            members.setdefault(reason, []).append(group)
    for reason, same in members.items():
        each = f"each of {', '.join(group.label for group in same)}"
        yield f"NOT COMPARABLE: {same[0].runs[0].folder if len(same) == 1 else each} {reason}"


def _sources(run: Run) -> set[str]:
    found = run.setting("data.source")
    sources = found if isinstance(found, list) else [found]
    return {str(source.get("class_path")).rpartition(".")[2] for source in sources if isinstance(source, dict)}


def _rules(paper: Paper, group: RunGroup, rule: Rule, is_given: bool) -> list[Rule]:
    """The last evaluation, and what else is asked for, or the paper does and the runs allow."""
    other = rule if is_given else replace(rule, name=paper.content["rule"])
    if other.name == "last":
        return [other]
    if not is_given and any(not other.can_choose(run) for run in group.runs):
        return [Rule()]
    return [Rule(), other]


class _Line(NamedTuple):
    """The scores of one model: a column of the table, or a line where there are many runs."""

    label: str
    model: str
    source: str
    """``published``, or the rule"""
    cells: list[str]
    """per test set"""
    is_loud: bool = False
    """whether it is not comparable"""

    @property
    def column(self) -> tuple[str, list[str]]:
        """Header and cells."""
        lines = [*(["NOT COMPARABLE"] if self.is_loud else []), self.label, self.model, self.source]
        return "\n".join(lines), self.cells

    @property
    def line(self) -> list[str]:
        """What describes it, and cells."""
        return [self.label, self.model, self.source + (", NOT COMPARABLE" if self.is_loud else ""), *self.cells]


@dataclass
class _Comparison:
    """One table of a paper and the runs beside it."""

    paper: Paper
    table: Table
    groups: Sequence[RunGroup]
    metric: str
    rules: Mapping[RunGroup, list[Rule]]
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
        numbers, test_sets = self._numbers, self.paper.test_sets
        names = [name + self._mark(test_sets[name]) for name in self.table.test_sets]
        if len(self.groups) <= _FEW:
            table = self._side_by_side(names, numbers)
        else:
            table = table_of_lines(["method", "model", "scores", *names], self._one_below_another(numbers))
        unit = f"{' / '.join(_LABELS.get(n, n) for n in numbers)} in percent"
        return "\n".join([f"{title}; {unit}", "", table, "", *self._costs(), *self._legend()])

    def block(self) -> Block:
        """Return the paper's rows, below each the runs that are closest to it, and what is to be said about them."""
        names = [name + self._mark(self.paper.test_sets[name]) for name in self.table.test_sets]
        lines = self._one_below_another(self._numbers)
        unit = f"{' / '.join(_LABELS.get(n, n) for n in self._numbers)} in percent"
        notes = [f"{self.paper.content['title']}; {self.paper.content['source']}", unit, *_warnings(self.groups)]
        return Block(["method", "model", "scores", *names], lines, (*notes, *self._legend()), num_left=3)

    def _costs(self) -> Iterator[str]:
        """What clients have pruned and sent: a column per row of the paper that prints it, and per group of runs."""
        if not any(row.costs for row in self.table.rows):
            return
        names = self.table.test_sets
        columns = [
            (f"{row.name}\npublished", [" / ".join(f"{v:.2f}" for v in row.costs.get(n, ())) or "-" for n in names])
            for row in self.table.rows
            if row.costs
        ]
        runs = [(f"{group.label}\nlast round", [group.costs(name) for name in names]) for group in self.groups]
        what = "pruned, percent / received and sent, GiB per client, as model.accounting counts"
        yield from (f"{self.table.name}: {what}", "", table_in_parts(names, columns, "client", always=runs), "")

    def _side_by_side(self, names: Sequence[str], numbers: Sequence[str]) -> str:
        """A column per row of the paper, and the runs' columns beside each."""
        published = [self._published(row, numbers).column for row in self.table.rows if row.scores]
        runs = [line.column for group in self.groups for line in self._of_run(group, numbers)]
        return table_in_parts(names, published, "data set", always=runs)

    def _one_below_another(self, numbers: Sequence[str]) -> list[list[str]]:
        """A line per row of the paper, below each the runs that are closest to it, last those of other methods."""
        closest = {group: _closest_row(self.table, group.runs[0]) for group in self.groups}
        others = [group for group, row in closest.items() if row.distance(group.runs[0])[0]]
        lines: list[_Line] = []
        for row in self.table.rows:
            if row.scores:
                lines.append(self._published(row, numbers))
            own = [group for group in self.groups if closest[group] is row and group not in others]
            lines += [line for group in own for line in self._of_run(group, numbers)]
        lines += [line for group in others for line in self._of_run(group, numbers)]
        return [line.line for line in lines if set(line.cells) != {"-"}]

    @property
    def _numbers(self) -> list[str]:
        """What stands in a cell."""
        if self.metric not in (*self.table.metrics, "mAP"):
            names = ", ".join(sorted(self.table.metrics))
            raise ConfigError(f"--metric: {self.paper.key}/{self.table.name} has no {self.metric}; choose from {names}")
        return [m for m in dict.fromkeys((self.metric, "rank1")) if m in self.table.metrics]

    def _mark(self, of: TableRow | TestSet) -> str:
        """Return the mark of a footnote with the note."""
        text = of.note if of.status == "ok" else f"{of.status}: {of.note}"
        return f" [{self.footnotes.setdefault(text, len(self.footnotes) + 1)}]" if of.note else ""

    def _published(self, row: TableRow, numbers: Sequence[str]) -> _Line:
        label = row.name + self._mark(row)
        marks = {name: mark for name, mark, _ in doubts_about(self.paper, row)}
        cells = []
        for name in self.table.test_sets:
            scores, digits = row.scores.get(name, {}), self._digits(name)
            texts = [f"{scores[m]:.{digits}f}" if m in scores else "-" for m in numbers]
            if name in row.spread:
                texts[0] += f" ± {row.spread[name]:.{digits}f}"
            cells.append(" / ".join(texts) + marks.get(name, "") if scores else "-")
        return _Line(label, row.model, "published", cells)

    def _of_run(self, group: RunGroup, numbers: Sequence[str]) -> Iterator[_Line]:
        is_loud = any(not_comparable(group.runs[0]))
        paper, names = self.paper.content, self.table.test_sets
        metrics = [paper["mAP"] if metric == "mAP" else metric for metric in numbers]
        for kind, client in self._models(group):
            for rule in self.rules[group]:
                below = f"/{client}" if client else ""
                cells = [group.cell(f"test/{kind}/{n}{below}", metrics, rule, self._digits(n)) for n in names]
                yield _Line(group.label, client or kind, rule.name, cells, is_loud)

    def _digits(self, name: str) -> int:
        digits = self.paper.test_sets[name].digits
        return self.table.digits if digits is None else digits

    def _models(self, group: RunGroup) -> list[tuple[str, str]]:
        """The table's models that the group has, by kind and client; one whose scores are the global one's stands once.

        Where the table's rows of a kind are of single clients, the mean over clients is none of them.
        """
        kinds, rows = group.kinds(Rule()), [(row.model, row.client) for row in self.table.rows]
        wanted = [of for of in dict.fromkeys([(group.runs[0].primary, ""), *rows]) if of[0] in kinds]
        columns: dict[str, tuple[str, str]] = {}
        for kind, client in sorted(wanted, key=lambda of: kinds.index(of[0])):
            paths = [f"test/{kind}/{name}/{client}/rank1".replace("//", "/") for name in self.table.test_sets]
            scores = [group.values(path, Rule()).tolist() for path in paths]
            if any(scores) or not client:
                columns.setdefault(repr(scores), (kind, client))
        alone = {kind for kind, client in columns.values() if client} - {kind for kind, client in rows if not client}
        return [of for of in columns.values() if of[1] or of[0] not in alone]

    def _figures_only(self) -> Iterator[str]:
        for row in self.table.rows:
            if not row.scores:
                yield f"  {row.name}: {row.status}, no numbers are printed; {row.note}"

    def _legend(self) -> Iterator[str]:
        yield from (f"[{number}] {text}" for text, number in self.footnotes.items())
        for row in self.table.rows:
            yield from (f"{mark} {name}, {row.name}: {why}" for name, mark, why in doubts_about(self.paper, row))
        yield from (f"- {note}" for note in (*self.paper.content.get("notes", ()), *self.table.notes))
        if "mAP" in self._numbers and self.paper.content["mAP"] != "mAP":
            yield f"- mAP of the runs is {self.paper.content['mAP']}"
        for group in self.groups:
            rules = self.rules[group]
            if rules[-1].name == "best3":
                yield from (f"- {run.folder}: {rules[-1].describe(run)}; chosen on test data" for run in group.runs)
            elif self.paper.content["rule"] == "best3":
                yield f"- {group.label}: the paper's rule best3 is not shown; it needs three evaluations"
            yield self._differences(group)
        yield from self._figures_only()

    def _differences(self, group: RunGroup) -> str:
        run = group.runs[0]
        row = _closest_row(self.table, run)
        differences = row.differences(run)
        if _FOLDERS in _sources(run):
            differences.append("its data sets are folders whose names nobody has checked")
        what = f"differs in {'; '.join(differences)}" if differences else "has the published settings, as far as listed"
        return f"- {group.label} is closest to '{row.name}' and {what}"
