"""NVIDIA's driver on this machine, read from its files, and the reasons why torch cannot use its GPUs.

Nothing here imports torch, so that a torch that does not load hides no fact.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

GPUS = Path("/proc/driver/nvidia/gpus")
"""contains a folder domain:bus:device.function for each GPU (README of NVIDIA's driver)"""

_DRIVERS = {"11": 450, "12": 525, "13": 580}
"""CUDA libraries -> the oldest driver that they work with: NVIDIA's table of minor version compatibility"""


class Unseen(NamedTuple):
    """Why torch sees no GPU."""

    cause: str
    remedy: str
    is_hidden: bool
    """whether GPUs are hidden on purpose"""


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
        return Unseen(f"CUDA_VISIBLE_DEVICES is {visible!r}: it hides all GPUs", "unset it", True)
    if cuda is None:
        return Unseen(f"torch {torch_version} is built for CPUs", "install torch with CUDA (pytorch.org)", False)
    if driver and int(driver.partition(".")[0]) < oldest:
        cause = f"the NVIDIA driver {driver} is too old for CUDA {cuda}, with which torch is built"
        remedy = f"update the driver to {oldest} or later, or install torch for an older CUDA (pytorch.org)"
        return Unseen(cause, remedy, False)
    if not driver and not on_bus:
        return Unseen("there is no NVIDIA GPU in this machine", "use a machine with one", False)
    if not driver:
        cause = "there is an NVIDIA GPU, but no NVIDIA driver"
        return Unseen(cause, f"install the driver, {oldest} or later", False)
    cause = f"the NVIDIA driver {driver} is loaded, but torch finds no GPU"
    remedy = "give the job a GPU (--gpus-per-node), or the container (docker --gpus all, apptainer --nv)"
    return Unseen(cause, remedy, False)
