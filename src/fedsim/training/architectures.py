"""Which client has which architecture."""

from __future__ import annotations


class Architectures(dict[str, str]):
    """Client -> name of its architecture, of all clients and alike on all ranks.

    Readers hold this one object, so that they see when a client changes its backbone. Only
    :class:`~fedsim.federation.adaptive_backbones.AdaptiveBackbones` writes to it.

    >>> archs = Architectures({"town0": "resnet", "town1": "resnet"})
    >>> archs.assign("town1", "mobilenet")
    >>> archs["town1"], archs.count("resnet")
    ('mobilenet', 1)
    """

    def assign(self, client: str, arch: str) -> None:
        """Give a client another architecture."""
        self[client] = arch

    def count(self, arch: str) -> int:
        """Return how many clients have an architecture."""
        return list(self.values()).count(arch)
