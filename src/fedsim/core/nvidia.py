"""NVIDIA's driver on this machine, read from its files, and the reasons why torch cannot use its GPUs.

Nothing here imports torch, so that a torch that does not load hides no fact.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

GPUS = Path("/proc/driver/nvidia/gpus")
"""contains a folder domain:bus:device.function for each GPU (README of NVIDIA's driver)"""

_DRIVERS = {"11": 450, "12": 525, "13": 580}
"""CUDA libraries -> the oldest driver that they work with: NVIDIA's table of minor version compatibility"""


_TOO_OLD, _UNKNOWN = 35, 999
_FAILURES = {  # code of CUDA -> cause, and remedy
    _TOO_OLD: ("the NVIDIA driver is too old for torch's CUDA", "update it, or install torch for an older CUDA"),
    100: ("the NVIDIA driver gives this process no GPU", "give the job or the container a GPU"),
    802: ("NVIDIA's fabric manager does not run", "start it (systemctl start nvidia-fabricmanager)"),
    803: ("the driver's libraries and its kernel module have different versions", "restart the machine"),
    804: ("CUDA's compatibility libraries do not support this GPU", "remove cuda-compat from LD_LIBRARY_PATH"),
    _UNKNOWN: ("the NVIDIA driver fails", "restart the machine; dmesg may show the reason"),
}
_NO_LIBRARY = "none"
_START = f"""
import ctypes
try:
    driver = ctypes.CDLL("libcuda.so.1")
except OSError:
    raise SystemExit(print("{_NO_LIBRARY}"))
version = ctypes.c_int()
driver.cuDriverGetVersion(ctypes.byref(version))
print(driver.cuInit(0), version.value // 1000)
"""
_PATIENCE = 120.0
"""seconds for a driver that starts; one without persistence mode needs some for each GPU"""


class Unseen(NamedTuple):
    """Why torch sees no GPU."""

    cause: str
    remedy: str
    is_hidden: bool = False
    """whether GPUs are hidden on purpose"""


def failure_in(message: str) -> Unseen | None:
    """Return the cause and remedy that belong to torch's message about a CUDA that does not start; None: unknown.

    >>> failure_in("Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized").remedy
    'start it (systemctl start nvidia-fabricmanager)'
    """
    numbers = {"driver on your system is too old": _TOO_OLD, "Found no NVIDIA driver": 100, "no CUDA-capable": 100}
    code = next((number for phrase, number in numbers.items() if phrase in message), 0)
    if match := re.search(r"[Ee]rror (\d+)", message):
        code = int(match[1])
    return _failure(code) if code in _FAILURES else None


@cache
def why_cuda_fails(cuda: str) -> Unseen | None:
    """Return the reason why CUDA does not start, asked of the driver by a process of its own; None: it starts.

    NVIDIA's management library, by which torch counts GPUs, works with any driver. A start in this process would come
    before a rank has its GPU, and make forks impossible.

    Args:
        cuda: version of torch's CUDA libraries.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-IS", "-c", _START], capture_output=True, text=True, timeout=_PATIENCE, check=False
        )
    except subprocess.TimeoutExpired:
        return _failure(_UNKNOWN)
    if done.stdout.strip() == _NO_LIBRARY:
        return Unseen("the NVIDIA driver's library libcuda.so.1 is missing", "install the driver, or run docker --gpus")
    if done.returncode:  # the driver has ended the process
        return _failure(_UNKNOWN)
    code, newest = map(int, done.stdout.split())
    if code == 0:
        code = _TOO_OLD if newest < int(cuda.partition(".")[0]) else 0
    return _failure(code) if code else None


def _failure(code: int) -> Unseen:
    cause, remedy = _FAILURES.get(code, _FAILURES[_UNKNOWN])
    return Unseen(f"{cause} (CUDA's error {code})", remedy)


def nvidia_driver(root: Path = Path("/")) -> str:
    """Return the version of the kernel's NVIDIA driver; empty without one."""
    for name in ("proc/driver/nvidia/version", "sys/module/nvidia/version"):
        with suppress(OSError):
            if version := re.search(r"\b\d{3,}\.\d+(?:\.\d+)*", (root / name).read_text()):
                return version[0]
    return ""


def gpus_of_driver(gpus: Path = GPUS) -> int:
    """Return the number of GPUs that the driver has, also those that this process may not use."""
    return len(list(gpus.glob("*")))


def visible_gpus(environ: Mapping[str, str] = os.environ, gpus: Path = GPUS) -> int:
    """Return the number of GPUs without calling CUDA, whose count may differ for partitioned GPUs (MIG)."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return gpus_of_driver(gpus)
    names = (name.strip() for name in visible.split(","))
    return len(list(itertools.takewhile(lambda name: name and not name.startswith("-"), names)))  # as CUDA counts


def why_unseen(torch_version: str, cuda: str | None, driver: str, on_bus: int, visible: str | None) -> Unseen:
    """Return the reason why torch sees no GPU.

    Args:
        torch_version: of torch.
        cuda: version of torch's CUDA libraries; None: it is built for CPUs.
        driver: its version; empty: none is loaded.
        on_bus: number of NVIDIA GPUs in the machine.
        visible: CUDA_VISIBLE_DEVICES; None: it is not set.

    >>> why_unseen("2.15.0+cu132", "13.2", "535.104.05", 8, None).cause
    'the NVIDIA driver 535.104.05 is too old for CUDA 13.2, with which torch is built'
    """
    oldest = _DRIVERS.get((cuda or "").partition(".")[0], 0)
    if visible is not None and visible.strip() in ("", "-1"):
        return Unseen(f"CUDA_VISIBLE_DEVICES is {visible!r}: it hides all GPUs", "unset it", is_hidden=True)
    if cuda is None:
        return Unseen(f"torch {torch_version} is built for CPUs", "install torch with CUDA (pytorch.org)")
    if driver and int(driver.partition(".")[0]) < oldest:
        cause = f"the NVIDIA driver {driver} is too old for CUDA {cuda}, with which torch is built"
        remedy = f"update the driver to {oldest} or later, or install torch for an older CUDA (pytorch.org)"
        return Unseen(cause, remedy)
    if not driver and not on_bus:
        return Unseen("there is no NVIDIA GPU in this machine", "use a machine with one")
    if not driver:
        cause = "there is an NVIDIA GPU, but no NVIDIA driver"
        return Unseen(cause, f"install the driver, {oldest} or later")
    cause = f"the NVIDIA driver {driver} is loaded, but torch finds no GPU"
    remedy = "give the job a GPU (--gpus-per-node), or the container (docker --gpus all, apptainer --nv)"
    return Unseen(cause, remedy)
