"""Steps of a command before the slow imports that parse its line."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

from fedsim.core import spares
from fedsim.core.errors import ConfigError, FedSimError
from fedsim.core.nvidia import GPUS, visible_gpus
from fedsim.core.paths import expanded
from fedsim.core.run_lock import WAYS, RunLock
from fedsim.parsing.output import rank_of_this_process

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


def refuse_used_folder(settings: Mapping[str, Any]) -> None:
    """Refuse a fit whose ``run_dir`` has the results of a run, if it neither continues nor replaces that.

    Only what is certain before the imports is refused here; the fit itself looks again, after its other checks.

    Args:
        settings: those of the command line and its config files.

    Raises:
        ConfigError: naming the folder and the ways on.
    """
    run_dir, may_go_on = settings.get("run_dir"), settings.get("overwrite") or settings.get("ckpt_path")
    if run_dir is None or may_go_on or "print_config" in settings or rank_of_this_process() > 0:
        return
    try:
        folder = Path(expanded(str(run_dir), "run_dir"))
        is_used = (folder / "summary.json").is_file()
    except (FedSimError, OSError, ValueError):  # the fit names the mistake
        return
    if is_used:
        RunLock(folder).look()
        raise ConfigError(f"run_dir: {folder} holds a run already; {WAYS}")


_NUMBERS = (
    "RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE",
    "MASTER_PORT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RESTART_COUNT", "JSM_NAMESPACE_RANK",
    "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK",
)  # fmt: skip
_OF_SLURM = (
    "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NNODES", "SLURM_JOB_ID", "SLURM_STEP_ID",
    "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES", "SLURM_NTASKS_PER_NODE",
)  # fmt: skip
"""read where SLURM_NTASKS or SLURM_PROCID is set"""
_OF_OTHERS = (
    "FEDSIM_LAUNCHER", "TORCHELASTIC_RUN_ID", "SLURM_STEP_ID", "LSB_JOBID", "OMPI_COMM_WORLD_SIZE", "PMI_RANK",
)  # fmt: skip
"""set in each of the processes that another one has started together"""
_SIZES = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS")
_BELOW = (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE"), ("GROUP_RANK", "GROUP_WORLD_SIZE"))
"""a rank's number, and the number of ranks"""
_LAST_PORT = 2**16 - 1
_MOST = 2**31 - 1
"""of C's int, in which torch keeps these numbers"""


def check_environment(environ: MutableMapping[str, str] = os.environ) -> None:
    """Check the variables of launchers; empty ones are removed, as if never set.

    Raises:
        ConfigError: for the first one that cannot be; its message begins with the variable's name.
    """
    is_slurm = "SLURM_NTASKS" in environ or "SLURM_PROCID" in environ
    for name in (*_NUMBERS, *(_OF_SLURM if is_slurm else ())):
        if not environ.get(name, "0").strip():
            del environ[name]
        elif name in environ:
            _check_number(name, environ[name])
    for name, size in _BELOW:
        if name in environ and size in environ and int(environ[name]) >= int(environ[size]):
            raise ConfigError(
                f"{name}: is {environ[name]}, but {size} is {environ[size]}, and ranks are counted from 0; "
                "unset both, or let a launcher such as torchrun set them"
            )


def is_alone(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether no other process reports the errors of this one, although a variable may give it another rank than 0.

    Launchers and users who start ranks also say where these meet.
    """
    return not any(name in environ for name in _OF_OTHERS) and not {"MASTER_ADDR", "MASTER_PORT"} <= environ.keys()


def _check_number(name: str, value_text: str) -> None:
    digits = value_text.strip()
    is_number = digits.isascii() and digits.isdigit() and len(digits) <= len(str(_MOST))
    number = int(digits) if is_number else -1
    if name == "MASTER_PORT" and not 1 <= number <= _LAST_PORT:
        raise ConfigError(
            f"{name}: {_shown(value_text)} is no port; export a free one from 1024 to {_LAST_PORT}, or unset it"
        )
    if not (name in _SIZES) <= number <= _MOST:
        least = "from 1" if name in _SIZES else "from 0"
        raise ConfigError(
            f"{name}: {_shown(value_text)} is not a whole number {least}; unset this variable of the environment, or "
            "let a launcher such as torchrun set it"
        )


def _shown(value_text: str) -> str:
    return (value_text if len(value_text) <= 40 else value_text[:37] + "...") if value_text.strip() else "an empty text"
