"""The file with the numbers of a run's rounds, ``metrics.csv``: its rows, and those of runs of earlier versions.

Earlier versions began a new file at each start, and kept the older ones as ``metrics-1.csv``, ``metrics-2.csv`` and so
on.
"""

from __future__ import annotations

import csv
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedsim.core.errors import DataError
from fedsim.core.files import replacing
from fedsim.core.readable import has_file

METRICS_FILE = "metrics.csv"
Row = dict[str, str]
"""name -> number as text, empty if the row has none; ``epoch`` is the round, from 0"""


class RowsDigest:
    """A hash of rows that grows with them; the order of the columns, and empty ones, do not count.

    >>> of_writer, of_reader = RowsDigest([{"epoch": 0, "loss": 0.5}]), RowsDigest()
    >>> of_reader.add([{"loss": "0.5", "epoch": "0", "val/mAP": ""}])
    >>> of_writer.record() == of_reader.record()
    True
    """

    def __init__(self, rows: Iterable[Mapping[str, object]] = ()) -> None:
        self._hash, self._rows = hashlib.sha256(), 0
        self.add(rows)

    def add(self, rows: Iterable[Mapping[str, object]]) -> None:
        """Add rows; a number counts as its text in the file."""
        for row in rows:
            cells = sorted((name, str(value)) for name, value in row.items() if value not in (None, ""))
            self._hash.update(f"{cells}\n".encode(errors="surrogateescape"))
            self._rows += 1

    def record(self) -> dict[str, Any]:
        """Return the number of ``rows`` and their ``digest``, as ``summary.json`` has them."""
        return {"rows": self._rows, "digest": self._hash.hexdigest()[:16]}


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
        rows = read_rows(path)
        first = min((int(row["epoch"]) for row in rows), default=rounds)
        kept = [row for row in kept if int(row["epoch"]) < first] + rows  # a later start has repeated the others
    return [row for row in kept if int(row["epoch"]) < rounds]


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a file, each with a round; an empty file has none. Raises DataError if it is no log."""
    try:
        with path.open(newline="") as file:
            rows = [{name: value or "" for name, value in row.items() if name} for row in csv.DictReader(file)]
        for row in rows:
            numbers_in(row)
            if int(row["epoch"]) < 0:
                raise ValueError(f"epoch {row['epoch']}")
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        raise DataError(f"{path}: is not a log of fedsim fit ({error}); was it edited?") from error
    return rows


def numbers_in(row: Row) -> dict[str, float]:
    """Return the numbers of a row, without empty cells; raise ValueError if one is none."""
    return {name: float(value) for name, value in row.items() if value}


def write_rows(path: Path, rows: Sequence[Row]) -> list[str]:
    """Write rows into a file, in one step; return their names in the order of the columns."""
    names = sorted({name for row in rows for name in row})
    with replacing(path) as partial, partial.open("w", newline="") as file:
        writer = csv.DictWriter(file, names, restval="")
        writer.writeheader()
        writer.writerows(rows)
    return names
