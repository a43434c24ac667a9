"""The file with the numbers of a run's rounds, ``metrics.csv``: its rows, and those of runs of earlier versions.

Earlier versions began a new file at each start, and kept the older ones as ``metrics-1.csv``, ``metrics-2.csv`` and so
on.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from pathlib import Path

from fedsim.core.errors import DataError
from fedsim.core.files import replacing
from fedsim.core.readable import has_file

METRICS_FILE = "metrics.csv"
Row = dict[str, str]
"""name -> number as text, empty if the row has none; ``epoch`` is the round, from 0"""


def metrics_files(folder: Path) -> list[Path]:
    """Return the metrics files of a run: those of its earlier starts in order, then ``metrics.csv``.

    Other files, such as a user's metrics-old.csv, are not the run's. Raises DataError if one cannot be read.
    """
    names = (re.fullmatch(r"metrics-([1-9][0-9]{0,8})\.csv", path.name) for path in folder.glob("metrics-*.csv"))
    numbers = sorted(int(name[1]) for name in names if name)
    return [path for path in (*(folder / f"metrics-{n}.csv" for n in numbers), folder / METRICS_FILE) if has_file(path)]


def rows_before(folder: Path, rounds: int) -> list[Row]:
    """Return the rows of a run's first ``rounds`` rounds, each round as its last start has logged it.

    Raises:
        DataError: if a file is no log of rounds.
    """
    kept: list[Row] = []
    for path in metrics_files(folder):
        rows = _read(path)
        first = min((int(row["epoch"]) for row in rows), default=rounds)
        kept = [row for row in kept if int(row["epoch"]) < first] + rows  # a later start has repeated the others
    return [row for row in kept if int(row["epoch"]) < rounds]


def _read(path: Path) -> list[Row]:
    """Return the rows of a file, each with a round; an empty file has none."""
    try:
        with path.open(newline="") as file:
            rows = [{name: value or "" for name, value in row.items() if name} for row in csv.DictReader(file)]
        for row in rows:
            int(row["epoch"])
    except (ValueError, KeyError, TypeError, csv.Error) as error:
        raise DataError(f"{path}: is not a log of fedsim fit ({error}); was it edited?") from error
    return rows


def write_rows(path: Path, rows: Sequence[Row]) -> list[str]:
    """Write rows into a file, in one step; return their names in the order of the columns."""
    names = sorted({name for row in rows for name in row})
    with replacing(path) as partial, partial.open("w", newline="") as file:
        writer = csv.DictWriter(file, names, restval="")
        writer.writeheader()
        writer.writerows(rows)
    return names
