"""Printed numbers that cannot be: cells of one experiment that differ, and mean average precision beyond its bounds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Literal, NamedTuple

from fedsim.core.metrics import OF_RANKS
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


class Interval(NamedTuple):
    """A closed interval, in percent."""

    low: float
    high: float

    def holds(self, value: float, tolerance: float = 0.0) -> bool:
        """Return whether ``value`` is inside, up to ``tolerance``."""
        return self.low - tolerance <= value <= self.high + tolerance


def one_match_bounds(
    cmc: Mapping[int, float], definition: Literal["rectangular", "trapezoid"] = "rectangular", gallery: float = math.inf
) -> Interval:
    """Return the interval in which mAP lies when every query has one match.

    A match at rank r has the average precision 1 / r (trapezoid: 1 / (2 r), and 1 for r = 1). The CMC gives the
    number of matches between two ranks. For ranks 1, 5 and 10, rectangular, in an infinite gallery:
    ``R1 + (R5 - R1) / 5 + (R10 - R5) / 10 <= mAP <= R1 + (R5 - R1) / 2 + (R10 - R5) / 6 + (100 - R10) / 11``.
    This also holds for means over several splits or rounds.

    ``cmc`` is rank -> share of the queries with their match up to this rank, in percent; it must contain rank 1.
    ``gallery`` is the number of gallery images, the last rank.

    >>> one_match_bounds({1: 50.0, 5: 60.0, 10: 70.0})
    Interval(low=53.0, high=59.39393939393939)
    """
    factor = 1.0 if definition == "rectangular" else 0.5
    points: list[tuple[float, float]] = [*sorted(cmc.items()), (gallery, 100.0)]
    low = high = cmc[1]
    for (rank, share), (next_rank, next_share) in pairwise(points):
        low += factor * (next_share - share) / next_rank  # all these matches at the last rank
        high += factor * (next_share - share) / (rank + 1)  # all at the first rank
    return Interval(low, high)


def impossible_numbers(paper: Paper, row: TableRow) -> Iterator[tuple[str, str, str]]:
    """Yield the impossible numbers of a row: test set, mark and reason.

    The mark is ``!`` if no definition of average precision gives the number, and ``~`` if the trapezoid gives it and
    rectangles do not.
    """
    digits = paper.content["digits"]
    for name, scores in row.scores.items():
        cmc = {rank: scores[metric] for rank, metric in OF_RANKS.items() if metric in scores}
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
        reason = (
            f"mAP {scores['mAP']:.{digits}f}, but with one match per query it lies in {rectangles.low:.2f} to "
            f"{rectangles.high:.2f} (rectangles), {trapezoid.low:.2f} to {trapezoid.high:.2f} (trapezoid)"
        )
        yield name, "~" if trapezoid.holds(scores["mAP"], one_unit) else "!", reason
