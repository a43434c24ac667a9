"""The clients' links and devices, and the simulated duration of a round on them."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from typing import Annotated

from fedsim.core.arguments import Section
from fedsim.core.checks import within
from fedsim.core.names import check_name
from fedsim.settings.facts import Facts

_RATE = Facts(may_be_infinite=True)


@dataclass(frozen=True, kw_only=True)
class ClientHardware(Section, option="model.hardware.clients.NAME"):
    """Settings of :class:`Hardware` in which one client differs; null keeps the common value."""

    down_mbit: Annotated[float | None, _RATE] = None
    up_mbit: Annotated[float | None, _RATE] = None
    latency_ms: float | None = None
    images_per_second: Annotated[float | None, _RATE] = None


@dataclass(frozen=True, kw_only=True)
class Hardware(Section, option="model.hardware"):
    """Links and devices of the clients, for simulated seconds. Training depends on them only with ``model.timing``."""

    down_mbit: Annotated[float, _RATE]
    """bandwidth from the server to a client, megabit (1e6 bits) per second; .inf: downloads take no time"""
    up_mbit: Annotated[float, _RATE]
    """bandwidth from a client to the server, megabit per second; .inf: uploads take no time"""
    latency_ms: float = 0.0
    """milliseconds added to a client's round, once for both directions"""
    images_per_second: Annotated[float, _RATE]
    """images that a client trains on per second, over all local epochs; .inf: training takes no time"""
    clients: Annotated[
        dict[str, ClientHardware],
        Facts(expected="the fields of each client, such as {town0: {up_mbit: 8}}", overrides="model.hardware"),
    ] = field(default_factory=dict)
    """client -> its own values"""

    def __post_init__(self) -> None:
        """Check the ranges."""
        for name in self.clients:
            check_name(name, "model.hardware.clients", "use the name of a client")
        sections: dict[str, ClientHardware | Hardware] = {"model.hardware": self}
        sections |= {f"model.hardware.clients.{name}": hardware for name, hardware in self.clients.items()}
        for section, numbers in sections.items():
            rates = {name: getattr(numbers, name) for name in ("down_mbit", "up_mbit", "images_per_second")}
            finite = {name: rate for name, rate in rates.items() if rate != math.inf}
            within(section, "[1e-6, 1e12]", "; use .inf for no time", **finite)
            within(section, "[0, 1e9]", latency_ms=numbers.latency_ms)

    def speed(self, client: str) -> float:
        """Return the images per second that a client trains on."""
        return self._of(client).images_per_second

    def seconds(self, client: str, received: int, images: float, sent: int) -> float:
        """Return the seconds of a client's round: latency, download, training, upload.

        ``received`` and ``sent`` are bytes; ``images`` are those of all local epochs.
        """
        device = self._of(client)
        training = images / device.images_per_second
        download, upload = 8 * received / (device.down_mbit * 1e6), 8 * sent / (device.up_mbit * 1e6)
        return device.latency_ms / 1e3 + download + training + upload

    def checksum(self) -> int:
        """Return a number of 48 bits that is the same for the same values, whole numbers or not."""
        values = asdict(self)
        clients = sorted((name, *map(_number, of_client.values())) for name, of_client in values.pop("clients").items())
        canonical = repr([*map(_number, values.values()), *clients])
        return int.from_bytes(sha256(canonical.encode()).digest()[:6], "big")

    def _of(self, client: str) -> Hardware:
        if client not in self.clients:
            return self
        values = asdict(self.clients.get(client, ClientHardware()))
        return replace(self, clients={}, **{name: value for name, value in values.items() if value is not None})


def _number(value: float | None) -> float | None:
    return None if value is None else float(value)
