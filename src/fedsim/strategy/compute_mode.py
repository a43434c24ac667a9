"""GPUs that take one process only: an administrator's setting, which NVIDIA's tools call the compute mode."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

_QUERY = ("nvidia-smi", "--query-gpu=pci.bus_id,compute_mode", "--format=csv,noheader")
_SECONDS = 20.0  # for a driver that answers slowly, as after a reset
_PIPES = "CUDA_MPS_PIPE_DIRECTORY"  # MPS's documentation has this variable and its default
_SHARING = "start NVIDIA's MPS (nvidia-cuda-mps-control -d), set the mode to Default (nvidia-smi -c DEFAULT), or "


def exclusive_gpus(listing: str) -> dict[int, str]:
    """Return the GPUs that do not take several processes: place in the machine, as ``address_of`` has it, -> mode.

    ``listing`` is nvidia-smi's, a GPU in each line. Lines of another form are left out.

    >>> exclusive_gpus("00000000:1B:00.0, Exclusive_Process")
    {6912: 'Exclusive_Process'}
    """
    modes = {}
    for line in listing.splitlines():
        bus_id, _, mode = (part.strip() for part in line.partition(","))
        parts = bus_id.partition(".")[0].split(":")
        if mode.startswith(("Exclusive", "Prohibited")) and len(parts) == 3:
            domain, bus, number = (int(part, 16) for part in parts)
            modes[(domain << 16) | (bus << 8) | number] = mode
    return modes


def read_listing() -> str:
    """Return nvidia-smi's list of GPUs and their compute modes; empty where it cannot be asked."""
    try:
        done = subprocess.run(_QUERY, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def has_mps(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether NVIDIA's MPS runs here: its server is the one process of a GPU, and the ranks are its clients.

    The control pipe of a daemon that was killed stays, without a reader.
    """
    try:
        os.close(os.open(Path(environ.get(_PIPES, "/tmp/nvidia-mps")) / "control", os.O_WRONLY | os.O_NONBLOCK))
    except PermissionError:  # a daemon of another user; CUDA will say whether it takes these ranks
        return True
    except OSError:  # there is no pipe, or no reader of it
        return False
    return True


def is_refused_by_mode(error: str) -> bool:
    """Whether CUDA refuses a process because of the compute mode, or because the GPU's one process is there already.

    >>> is_refused_by_mode("CUDA error: CUDA-capable device(s) is/are busy or unavailable")
    True
    """
    return "busy or unavailable" in error


def why_busy(ranks_per_device: int) -> str:
    """Return the likely reason why CUDA refuses a rank its GPU, with the remedy."""
    is_shared = ranks_per_device > 1
    owner = "another rank" if is_shared else "another process"
    instead = "leave ranks_per_device out" if is_shared else "choose other GPUs with trainer.devices"
    return f"is busy or unavailable: its compute mode may take one process, and {owner} has it; {_SHARING}{instead}"


def why_not_shared(address: int, listing: str, with_mps: bool) -> str | None:
    """Return why several processes cannot share a GPU, with the remedy; None if nothing is known against it."""
    mode = exclusive_gpus(listing).get(address)
    if mode is None or (with_mps and mode == "Exclusive_Process"):
        return None
    if mode == "Prohibited":
        return "its compute mode is Prohibited, which takes no process; choose other GPUs with trainer.devices"
    return f"its compute mode is {mode}, which takes one process; {_SHARING}leave ranks_per_device out"
