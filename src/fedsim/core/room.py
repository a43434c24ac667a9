"""Room in memory and on disks, and the processor cores that a process may use."""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Room:
    """Space of a file system or of memory, bytes."""

    where: str
    free: int
    total: int
    problem: str = ""
    """error, if it cannot be written to; empty: none"""


def memory_room(root: Path = Path("/")) -> Room:
    """Return the host's memory, or the container's share of it."""
    lines = (root / "proc/meminfo").read_text().splitlines()
    kib = {name: int(amount.split()[0]) for name, _, amount in (line.partition(":") for line in lines)}
    total, free = 1024 * kib["MemTotal"], 1024 * kib["MemAvailable"]
    with suppress(OSError, ValueError):
        limit = int((root / "sys/fs/cgroup/memory.max").read_text())
        used = int((root / "sys/fs/cgroup/memory.current").read_text())
        total, free = min(total, limit), min(free, limit - used)
    return Room("memory", free, total)


def room_of(folder: Path) -> Room:
    """Return the room of the file system of a folder, which need not exist; nothing is created."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    usage = shutil.disk_usage(existing)
    problem = ""
    if not existing.is_dir():
        problem = f"{existing} is a file"
    elif not os.access(existing, os.W_OK | os.X_OK):
        problem = f"{existing} cannot be written"
    return Room(str(existing), usage.free, usage.total, problem)


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
