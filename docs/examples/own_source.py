"""A data source of your own: a CSV file with the columns client, part (train, query, gallery), file, person, camera."""

import csv
from collections import defaultdict
from pathlib import Path

import numpy as np

from fedsim.core.errors import DataError
from fedsim.data.images import Domain, ImageFiles, ReIDSource, Split


class TableOfImages(ReIDSource):
    """One data set for each name in the column client.

    Args:
        table: the CSV file; files are relative to its folder.
    """

    def __init__(self, table: str) -> None:
        self.table = Path(table).expanduser()

    def domains(self) -> list[Domain]:
        """List the data sets, sorted by name; no image is opened."""
        if not self.table.is_file():
            raise DataError(f"{self.table}: no such file; set data.source.table to your CSV file")
        rows = defaultdict(list)
        with self.table.open(newline="") as file:
            for row in sorted(csv.DictReader(file), key=lambda row: row["file"]):
                rows[row["client"], row["part"]].append(row)
        return [self._domain(name, rows) for name in sorted({client for client, _ in rows})]

    def _domain(self, name: str, rows: dict) -> Domain:
        train, query, gallery = (self._split(rows.get((name, part), [])) for part in ("train", "query", "gallery"))
        return Domain(name, train if len(train) else None, query, gallery)

    def _split(self, rows: list) -> Split:
        numbers = (np.array([int(row[key]) for row in rows], dtype=np.int64) for key in ("person", "camera"))
        return Split(ImageFiles([self.table.parent / row["file"] for row in rows]), *numbers)
