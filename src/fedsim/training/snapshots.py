"""Local models of a round, before they are averaged: an evaluation scores them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fedsim.core.store import ClientStore


class Snapshots:
    """Keeps the local models of one round in a store, with a place for each of its clients."""

    def __init__(self, store: ClientStore) -> None:
        self._store = store
        self._places: dict[str, str] = {}

    @staticmethod
    def places(num_clients: int) -> list[str]:
        """Return the names of the places in the store."""
        return [str(number) for number in range(num_clients)]

    def begin(self, clients: Sequence[str]) -> None:
        """Begin a round of these clients: their models replace those of the last round."""
        self._places = dict(zip(clients, self.places(len(clients)), strict=True))

    def keep(self, client: str, model: Tensor) -> None:
        """Keep a client's whole model [N]."""
        self._store.write(self._places[client], {"model": model})

    def of(self, client: str) -> Tensor:
        """Return the model that a client had after training, in host memory [N]."""
        return self._store.read(self._places[client])["model"]
