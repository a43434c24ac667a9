"""The clients' links and devices, and how long a round would take on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fedsim.core.errors import ConfigError

__all__ = ["ClientHardware", "Hardware"]

_POSITIVE = ("down_mbit", "up_mbit", "images_per_second")


@dataclass(frozen=True, kw_only=True)
class ClientHardware:
    """Link and device of one client, where they differ from the others'; null keeps the common value."""

    down_mbit: float | None = None
    """see Hardware"""
    up_mbit: float | None = None
    """see Hardware"""
    latency_ms: float | None = None
    """see Hardware"""
    images_per_second: float | None = None
    """see Hardware"""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Links and devices of the clients, for simulated seconds; training does not depend on them."""

    down_mbit: float
    """bandwidth from the server to a client, megabit (1e6 bits) per second; .inf: downloads take no time"""
    up_mbit: float
    """bandwidth from a client to the server, megabit per second; .inf: uploads take no time"""
    latency_ms: float = 0.0
    """milliseconds that a client's round takes longer, whatever is sent; once for both directions"""
    images_per_second: float
    """images that a client trains on per second, over all local epochs; .inf: training takes no time"""
    clients: dict[str, ClientHardware] = field(default_factory=dict)
    """client -> what differs"""

    def __post_init__(self) -> None:
        """Check the ranges."""
        _check("model.hardware", self.__dict__)
        for name, own in self.clients.items():
            _check(f"model.hardware.clients.{name}", own.__dict__)

    def speed(self, client: str) -> float:
        """Return the images per second that a client trains on."""
        own = self.clients.get(client, ClientHardware())
        return self.images_per_second if own.images_per_second is None else own.images_per_second

    def seconds(self, client: str, received: int, images: float, sent: int) -> float:
        """Return the seconds of a client's round: latency, download, training, upload.

        Args:
            client: its name.
            received: bytes.
            images: images trained on, over all local epochs.
            sent: bytes.
        """
        own = self.clients.get(client, ClientHardware())
        down = self.down_mbit if own.down_mbit is None else own.down_mbit
        up = self.up_mbit if own.up_mbit is None else own.up_mbit
        latency = self.latency_ms if own.latency_ms is None else own.latency_ms
        training = images / self.speed(client)
        return latency / 1e3 + 8 * received / (down * 1e6) + training + 8 * sent / (up * 1e6)


def _check(where: str, numbers: Mapping[str, float | None]) -> None:
    for name in _POSITIVE:
        value = numbers[name]
        if value is not None and not value > 0:
            raise ConfigError(f"{where}.{name}: {value} is not positive; .inf takes no time")
    latency = numbers["latency_ms"]
    if latency is not None and not 0 <= latency < float("inf"):
        raise ConfigError(f"{where}.latency_ms: {latency} is not a number of milliseconds from 0")
