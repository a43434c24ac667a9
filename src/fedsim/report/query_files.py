"""Files about single queries in a run directory: rows as CSV, beside the pictures that show them."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from fedsim.core.errors import DataError
from fedsim.core.files import replacing
from fedsim.core.names import printable
from fedsim.report.confusion import KEYS, confusion_block, confusion_matrices
from fedsim.report.layout import Block

Row = dict[str, str | float]
Chosen = Literal["worst", "best"] | Sequence[str]
"""the queries with the lowest or the highest average precision, or the names of their files"""

FOLDER = "queries"
"""of a run directory: NAME.csv and NAME.png of a test set, see ``fedsim report --queries``"""
CONFUSION = "confusion"
"""name of the files about domain confusion"""


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows with the same keys as CSV."""
    with replacing(path) as partial, partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(rows[0])
        writer.writerows([printable(str(value)) for value in row.values()] for row in rows)


def query_block(rows: Sequence[Mapping[str, Any]], label: str = "") -> Block:
    """Return a line per query of a test set, with the first image of its list."""
    first = rows[0]
    title = "\n".join(filter(None, [label, f"{first['data set']}, {first['model']} {first['owner']}".strip(), "query"]))
    headers = [title, "identity", "AP", "first\nmatch", "first image", "identity", "distance", "right"]
    lines = []
    for row in (row for row in rows if int(row["rank"]) == 1):
        precision = float(row["AP"])
        lines.append(
            [
                f"{row['query']}",
                f"{row['identity']} c{row['camera']}",
                "-" if math.isnan(precision) else f"{100 * precision:.1f}",
                str(row["first match"]) if int(row["first match"]) else "-",
                f"{row['image']}",
                f"{row['identity of image']} c{row['camera of image']}",
                f"{float(row['distance']):.3f}",
                "yes" if int(row["is match"]) else "no",
            ]
        )
    tidy = list(first), [[printable(str(value)) for value in row.values()] for row in rows]
    return Block(printable_all(headers), [printable_all(line) for line in lines], tidy=tidy)


def printable_all(texts: Sequence[str]) -> list[str]:
    """Return texts of which each line can be printed."""
    return ["\n".join(map(printable, text.split("\n"))) for text in texts]


def query_tables(folder: Path) -> Iterator[tuple[str, list[Block]]]:
    """Yield the name of each file of a run directory about single queries, and its tables.

    Raises:
        DataError: if a file cannot be read.
    """
    for path in sorted((folder / FOLDER).glob("*.csv")):
        try:
            with path.open(newline="", encoding="utf-8") as file:
                rows = list(csv.DictReader(file))
            if path.stem == CONFUSION and set(rows[0]) == set(KEYS):
                yield path.stem, [confusion_block(confusion) for confusion in confusion_matrices(rows)]
            else:
                yield path.stem, [query_block(rows)]
        except (OSError, ValueError, KeyError, IndexError, TypeError, csv.Error) as error:
            raise DataError(
                f"{path}: cannot be read ({error}); remove it, or repeat fedsim report --queries"
            ) from error
