"""Start the other ranks early, before the slow imports that parse the command line."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedsim.core import spares
from fedsim.core.nvidia import GPUS, visible_gpus

_FEW = 8
"""this many ranks are started early on any machine; more than two per core may be a typo and could fill the memory"""

_PROGRAM = """
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
from fedsim.core.collector import imports_without_collection
from fedsim.core.quick_end import prepare_quick_end
from fedsim.core.spares import become_rank
prepare_quick_end()
with imports_without_collection():
    import fedsim.cli.fit
become_rank()
from fedsim.__main__ import command
sys.exit(command())
"""


def start_ranks(settings: Mapping[str, Any]) -> None:
    """Start the other ranks of this machine, which import modules while this rank does, and print their number."""
    if not spares.may_start():
        return
    ranks = ranks_asked_for(settings)
    if 1 < ranks <= max(2 * (os.cpu_count() or 1), _FEW):
        spares.start(ranks - 1, _PROGRAM)
        sys.stderr.write(f"starting {ranks} ranks\n")
        sys.stderr.flush()


def ranks_asked_for(settings: Mapping[str, Any], environ: Mapping[str, str] = os.environ, gpus: Path = GPUS) -> int:
    """Return the number of ranks that ``trainer.devices`` requests.

    Return 1 if the number cannot be determined yet, and for mistakes, which the parser reports. Too small a number does
    no harm: the missing ranks are started later.

    Args:
        settings: those of the command line and its config files.
        environ: environment variables; CUDA_VISIBLE_DEVICES limits the GPUs.
        gpus: the folder with one folder per GPU.
    """
    devices = str(settings.get("trainer.devices", "auto"))
    if devices in ("auto", "-1") and settings.get("trainer.accelerator", "auto") in ("auto", "gpu", "cuda"):
        return max(visible_gpus(environ, gpus), 1)
    return int(devices) if devices.isdigit() else 1
