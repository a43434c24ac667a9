"""Which client has which architecture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping


class Architectures(Mapping[str, str]):
    """Client -> name of its architecture, of all clients and alike on all ranks.

    Readers hold this one object, so that they see when a client changes its backbone. Only
    :class:`~fedsim.federation.adaptive_backbones.BackboneLadder` writes to it.

    >>> archs = Architectures({"town0": "resnet", "town1": "resnet"})
    >>> archs.assign("town1", "mobilenet")
    >>> archs["town1"], archs.count("resnet")
    ('mobilenet', 1)
    """

    def __init__(self, archs: Mapping[str, str]) -> None:
        self._archs = dict(archs)

    def __getitem__(self, client: str) -> str:
        return self._archs[client]

    def __iter__(self) -> Iterator[str]:
        return iter(self._archs)

    def __len__(self) -> int:
        return len(self._archs)

    def assign(self, client: str, arch: str) -> None:
        """Give a client another architecture."""
        self._archs[client] = arch

    def count(self, arch: str) -> int:
        """Return how many clients have an architecture."""
        return Counter(self._archs.values())[arch]
