"""Cells of printed tables that are one experiment and have different numbers, side by side."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fedsim.papers.files import Paper, read_paper
from fedsim.papers.published import Scores, TableRow

_CLOSE = 0.1
"""points, of a printed mean and the mean of printed numbers: both are rounded to one decimal"""


class Cell(NamedTuple):
    """A printed row of some table."""

    place: str
    """PAPER/TABLE"""
    row: TableRow
    digits: int
    """decimals, as printed"""

    def text(self, data_set: str) -> str:
        """Return the place, the row's name and the numbers of a data set."""
        numbers = " / ".join(f"{value:.{self.digits}f}" for value in self.row.scores[data_set].values())
        return f"{self.place}, {self.row.name}: {numbers}"


def contradictions_in(paper: Paper) -> Iterator[tuple[list[Cell], list[str], str]]:
    """Yield for each contradiction that a paper's file lists: the rows, the data sets that differ, and the reason."""
    for entry in paper.content.get("contradictions", ()):
        cells = [find_cell(paper, name) for name in entry["rows"]]
        yield cells, differing_sets(cells[0].row.scores, cells[1].row.scores), entry["note"]


def find_cell(paper: Paper, name: str) -> Cell:
    """Return the row that ``TABLE/ROW``, or ``PAPER/TABLE/ROW`` of another paper, names."""
    key, _, below = name.partition("/")
    if key.isdecimal():
        paper, name = read_paper(key), below
    table_name, _, row_name = name.partition("/")
    table = next(table for table in paper.tables if table.name == table_name)
    row = next(row for row in table.rows if row.name == row_name)
    return Cell(f"{paper.key}/{table_name}", row, table.digits)


def differing_sets(first: Scores, second: Scores) -> list[str]:
    """Return the data sets of the first table with other numbers in the second one.

    Versions of CUHK03 count as one data set here: papers copy rows from one to the other.

    >>> table = {"viper": {"mAP": 1.0}, "cuhk03": {"mAP": 2.0}}
    >>> differing_sets(table, {"viper": {"mAP": 1.0}, "cuhk03np": {"mAP": 3.0}})
    ['cuhk03']
    """
    by_family = {_family(name): scores for name, scores in second.items()}
    return [name for name, scores in first.items() if by_family.get(_family(name), scores) != scores]


def lines_of(paper: Paper) -> Iterator[str]:
    """Yield a line per contradicting cell: both places with their numbers, and the reason."""
    for cells, data_sets, note in contradictions_in(paper):
        for name in data_sets:
            texts = [cell.text(_own_name(cell, name)) for cell in cells]
            yield f"{name}: {'; '.join(texts)} ({note})"
    for table in paper.tables:
        for row in table.rows:
            if (contradiction := wrong_mean(row)) is not None:
                yield f"mean: {paper.key}/{table.name}, {row.name}: {contradiction}"


def wrong_mean(row: TableRow) -> str | None:
    """Return the printed mean and that of the printed columns if they contradict each other."""
    scores = list(row.scores.values())
    if not row.mean or not scores:
        return None
    means = [sum(of_set[metric] for of_set in scores) / len(scores) for metric in scores[0]]
    if all(abs(mean - printed) <= _CLOSE for mean, printed in zip(means, row.mean, strict=True)):
        return None
    printed, computed = (" / ".join(f"{value:.1f}" for value in values) for values in (row.mean, means))
    return f"{printed} is printed, its columns give {computed}"


def _family(name: str) -> str:
    return "cuhk03" if name == "cuhk03np" else name


def _own_name(cell: Cell, name: str) -> str:
    return next(data_set for data_set in cell.row.scores if _family(data_set) == _family(name))
