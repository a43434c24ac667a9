"""The clients of a rank, of any number: each is made when it is first asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from fedsim.data.datamodule import FederatedDataModule
from fedsim.training.batch import ClientImages
from fedsim.training.client import Client

KEPT = 1000
"""clients that stay in memory"""


class LazyClients(Mapping[str, Client]):
    """Name -> client, for the clients that a rank may train.

    The :data:`KEPT` clients that were used last stay in memory, so that all clients of a small federation do. The
    others are made again at their next session: everything that lasts is in the store, or in the federation's settings.

    Args:
        names: of the clients.
        make: makes a client with its images.
        images_of: makes a client's images, which are not open yet.
    """

    def __init__(
        self,
        names: Iterable[str],
        make: Callable[[str, ClientImages], Client],
        images_of: Callable[[str], ClientImages],
    ) -> None:
        self._names, self._make, self._images_of = dict.fromkeys(names), make, images_of
        self._made: dict[str, Client] = {}
        """the clients in memory; the one that was used last is at the end"""
        self._decoded: dict[str, ClientImages] = {}
        """images in memory that took time to decode; they stay when their client does not"""
        self._data: FederatedDataModule | None = None
        """opens the images of the clients; None: a run that trains no client"""
        self.limit_batches: float | None = None
        """of every client; see FederatedDataModule.limit_client_batches"""

    def __getitem__(self, name: str) -> Client:
        if name not in self._names:
            raise KeyError(name)
        client = self._made.pop(name, None) or self._make(name, self._decoded.get(name) or self._images_of(name))
        if client.limit_batches != self.limit_batches:  # setting an attribute of a module is slow
            client.limit_batches = self.limit_batches
        self._made[name] = client
        if len(self._made) > KEPT:
            del self._made[next(iter(self._made))]
        return client

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def open_images(self, names: Iterable[str], data: FederatedDataModule) -> None:
        """Open the images of few clients, and all that must be decoded; :meth:`to_train` opens the others."""
        self._data = data
        for name in names:
            if len(self) <= KEPT:
                self[name].images.open(data.open_train)
            elif any(map(data.must_decode, (images := self._images_of(name)).lists)):
                images.open(data.open_train)
                self._decoded[name] = images

    def to_train(self, name: str) -> Client:
        """Return a client whose images are open, for a session."""
        client = self[name]
        if not client.images.is_open and self._data is not None:
            client.images.open(self._data.open_train)
        return client
