"""The processor cores that a process may use."""

from __future__ import annotations

import hashlib
import os
import socket
from contextlib import suppress
from pathlib import Path


def usable_cores(root: Path = Path("/")) -> float:
    """Return the cores that this process may use, by its affinity and its container's quota."""
    cores = float(len(os.sched_getaffinity(0)))
    with suppress(OSError, ValueError):
        quota, period = (root / "sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, int(quota) / int(period))  # "max": no quota, no int
    return cores


def name_of_cores() -> int:
    """Return 48 bits, exact in float64, that are equal for processes with the same cores of the same machine."""
    name = f"{socket.gethostname()} {sorted(os.sched_getaffinity(0))}"
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big")
