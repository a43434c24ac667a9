"""The printed row, and the paper's run, that a run is closest to: compared as whole configurations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fedsim.papers.files import Config, Paper
from fedsim.papers.published import Table, TableRow
from fedsim.papers.resolved_rows import find_run, resolved_row
from fedsim.report.differences import Difference, Differences, differences_from, method_of, source_classes
from fedsim.report.runs import Run


class Match(NamedTuple):
    """A printed row of a run's method, and the paper's run of it with the fewest differences."""

    row: TableRow
    name: str
    """of the paper's run: PAPER/ROW"""
    differences: Differences

    @property
    def distance(self) -> int:
        """The number of settings that differ."""
        return len(self.differences.listed)

    def lines(self, label: str) -> Iterator[str]:
        """Yield lines on the run with this label: its closest row, settings that differ, and unknown ones."""
        if self.distance:
            yield f"- {label} is closest to '{self.row.name}' ({self.name}); settings that differ: {self.distance}"
        else:
            yield f"- {label} has all settings of '{self.row.name}' ({self.name})"
        yield from (f"    {line}" for line in self.differences.lines())
        if unknown := self.differences.unknown:
            yield f"    not in its config, which another version wrote: {', '.join(unknown)}"


def closest_row(paper: Paper, table: Table, run: Run) -> Match | None:
    """Return the printed row with scores that has a run of the same method with the fewest differences.

    In a table of left-out data sets, these are runs that leave out the same one. None: no row of the table is of this
    method, or the run's settings are not known.
    """
    method = method_of(run.config)
    matches = [
        Match(row, f"{of_paper.key}/{name}", _differences(row, config, run))
        for row in table.rows
        if row.scores and method is not None
        for of_paper, name in (find_run(paper, text) for text in row.runs)
        if method_of(config := resolved_row(of_paper, name)) == method
        if not table.left_out or config["data"]["unseen"] == run.setting("data.unseen")
    ]
    return min(matches, key=lambda match: match.distance, default=None)


def closest_table(paper: Paper, run: Run) -> Table:
    """Return the table with the row closest to a run, of those with a test set of the run if there are any."""

    def distance(table: Table) -> tuple[bool, bool, int, int, int]:
        match = closest_row(paper, table, run)
        shared = len(set(table.test_sets) & set(run.test_sets))
        return not shared, match is None, 0 if match is None else match.distance, -shared, -len(table.metrics)

    return min((table for table in paper.tables if table.test_sets), key=distance)


def _differences(row: TableRow, config: Config, run: Run) -> Differences:
    """Return the differences of the settings, and of the clients if the run's data sets are of other classes."""
    differences = differences_from(config, run.config)
    if source_classes(config) & source_classes(run.config):
        return differences
    return differences._replace(listed=(*differences.listed, *_clients(row, run)))


def _clients(row: TableRow, run: Run) -> Iterator[Difference]:
    """Yield the data sets that have clients in one of the two experiments only."""
    if row.clients and frozenset(run.seen) not in row.clients:
        published = min(row.clients, key=lambda sets: len(sets ^ set(run.seen)))
        for name in sorted(published ^ set(run.seen)):
            texts = (f"without client {name}", f"with client {name}")
            yield Difference("data.source", *(texts if name in published else texts[::-1]))
