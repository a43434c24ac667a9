"""Cells, and tables that fit the terminal; the scores of one evaluation."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from tabulate import tabulate

if TYPE_CHECKING:
    from torch import Tensor

_GAP = 2


def mean_and_spread(values: NDArray[np.float64], digits: int = 1) -> str:
    """Write the mean over seeds, with the standard deviation where there are several.

    >>> mean_and_spread(np.array([40.0, 42.0]))
    '41.0+-1.4'
    """
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    return f"{values.mean():.{digits}f}+-{values.std(ddof=1):.{digits}f}"


def table_in_parts(
    names: Sequence[str],
    columns: Sequence[tuple[str, Sequence[str]]],
    corner: str,
    always: Sequence[tuple[str, Sequence[str]]] = (),
) -> str:
    """Write a table, cut into several below each other where it is wider than the terminal.

    Args:
        names: of the rows.
        columns: header, which may have several lines, and one cell per row.
        corner: header of the names.
        always: columns that stand in every part, at the right.
    """
    widest = shutil.get_terminal_size((100, 24)).columns
    left = _width((corner, names)) + sum(_GAP + _width(column) for column in always)
    parts: list[list[tuple[str, Sequence[str]]]] = [[]]
    for column in columns:
        if parts[-1] and left + sum(_GAP + _width(c) for c in (*parts[-1], column)) > widest:
            parts.append([])
        parts[-1].append(column)
    return "\n\n".join(_table(names, [*part, *always], corner) for part in parts)


def table_of_lines(headers: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Write a table of texts: three that describe a line, then its numbers."""
    alignment = ("left",) * 3 + ("right",) * (len(headers) - 3)
    return tabulate(lines, headers=headers, disable_numparse=True, colalign=alignment)


def _width(column: tuple[str, Sequence[str]]) -> int:
    header, cells = column
    return max(len(text) for text in (*header.splitlines(), *cells, ""))


def _table(names: Sequence[str], columns: Sequence[tuple[str, Sequence[str]]], corner: str) -> str:
    rows = [[name, *cells] for name, *cells in zip(names, *(cells for _, cells in columns), strict=True)]
    headers = [corner, *(header for header, _ in columns)]
    return tabulate(rows, headers=headers, disable_numparse=True, colalign=("left", *["right"] * len(columns)))


def score_table(scores: Mapping[str, Tensor], metrics: Sequence[str]) -> str:
    """Return a line per data set and kind of model, as fedsim validate and fedsim test print them.

    ``scores``: ``split/kind/domain/metric`` -> fraction of 1, one number each; others are left out.
    """
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for key, value in scores.items():
        if key.count("/") == 3:
            _, kind, domain, metric = key.split("/")
            rows.setdefault((domain, kind), {})[metric] = f"{100 * float(value):.1f}"
    table = [
        [*of, *(cells[m] + (f"+-{cells[f'{m}_std']}" if f"{m}_std" in cells else "") for m in metrics)]
        for of, cells in rows.items()
    ]  # with the spread over random splits, where there are several
    alignment = ("left", "left", *["right"] * len(metrics))
    return tabulate(table, headers=["data set", "model", *metrics], disable_numparse=True, colalign=alignment)
