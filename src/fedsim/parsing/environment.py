"""Variables by which launchers describe a process: checked before Lightning and torch read them without a message."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping

from fedsim.core.errors import ConfigError

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
