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
        self._open: dict[str, ClientImages] = {}
        """images in memory that took time to decode"""
        self._data: FederatedDataModule | None = None
        """opens the images of the clients; None: a run that trains no client"""
        self.limit_batches: float | None = None
        """of every client; see FederatedDataModule.limit_client_batches"""

    def __getitem__(self, name: str) -> Client:
        if name not in self._names:
            raise KeyError(name)
        client = self._made.pop(name, None) or self._make(name, self._images(name))
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
        """Open the images of few clients, and all that must be decoded; the others are opened in each session."""
        self._data = data
        if not self._are_few:
            self._made.clear()  # made by an evaluation, without their images
        for name in names:
            images = self[name].images if self._are_few else self._images_of(name)
            if self._are_few or any(map(data.must_decode, images.lists)):
                images.open(data.open_train)
                self._open[name] = images

    @property
    def _are_few(self) -> bool:
        """Whether all clients stay in memory."""
        return len(self._names) <= KEPT

    def _images(self, name: str) -> ClientImages:
        """Return a client's images, open if the run trains clients."""
        if (images := self._open.get(name)) is None:
            images = self._images_of(name)
            if self._data is not None and not self._are_few:
                images.open(self._data.open_train)
        return images
