"""Rows that clients add to tables of the server, each client as many as it has; ranks exchange them exactly."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedsim.strategy.strategy import FederatedStrategy
from fedsim.training.messages import Report, Signals, Upload


class RowsOfRound:
    """The rows that this rank's clients send in a round; ``columns``: table -> its number of columns."""

    def __init__(self, columns: Mapping[str, int]) -> None:
        self.columns = columns
        self._sent: dict[str, Mapping[str, Tensor]] = {}

    @property
    def counts(self) -> tuple[str, ...]:
        """Names of the numbers of :meth:`facts`."""
        return tuple(map(count_of, self.columns))

    def facts(self, upload: Upload) -> Signals:
        """Return how many rows an upload has for each table, by :attr:`counts`."""
        return {count_of(name): float(len(upload.rows.get(name, ()))) for name in self.columns}

    def add(self, client: str, upload: Upload) -> None:
        """Keep the rows of a client until the exchange: copies, as its next session may change them."""
        if upload.rows:
            self._sent[client] = {name: rows.detach().clone() for name, rows in upload.rows.items()}

    def joined(self, reports: Mapping[str, Report], strategy: FederatedStrategy) -> dict[str, Tensor]:
        """Return table -> rows [n, columns] float32 of all ranks' clients with ``reports``, in the order of these.

        Every rank knows the counts of all clients. One rank fills a row, the others hold zero, so the sum is exact.
        """
        tables = {}
        for name, columns in self.columns.items():
            counts = [int(report.traffic[count_of(name)]) for report in reports.values()]
            table = torch.zeros(sum(counts), columns, device=strategy.root_device)
            for client, place in zip(reports, table.split(counts), strict=True):
                if len(place) and client in self._sent:
                    place.copy_(self._sent[client][name])
            tables[name] = strategy.sum_(table).add_(0.0)  # -0 becomes 0 also on a single rank
        return tables


def count_of(table: str) -> str:
    """Return the name of the number of rows that a client sends for a table, among those that decide its bytes."""
    return f"rows of {table}"
