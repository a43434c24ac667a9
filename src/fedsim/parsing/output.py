"""Output to the terminal; each rank of a run is a separate process."""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping

from fedsim.core.errors import ConfigError

_RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")
_NUMBERS = (
    *_RANKS, "WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE",
    "TORCHELASTIC_MAX_RESTARTS", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS",
    "SLURM_NNODES", "SLURM_STEP_NUM_NODES",
)  # fmt: skip
"""variables of launchers that fedsim, Lightning or torch read as numbers"""


def check_rank_variables(environ: MutableMapping[str, str] = os.environ) -> None:
    """Check the variables that give this process its place among ranks; empty ones are removed, as if never set.

    Raises:
        ConfigError: if one is not a number.
    """
    for name in _NUMBERS:
        text = environ.get(name)
        if text is None:
            continue
        if not text.strip():
            del environ[name]
        elif not (text.isascii() and text.strip().isdecimal()):
            raise ConfigError(f"{name}: {text!r} in the environment is not a number; unset it, or use a launcher")


def rank_of_this_process() -> int:
    """This process's rank, also before process groups exist or Lightning is imported."""
    lightning = sys.modules.get("lightning.fabric.utilities.rank_zero")
    if lightning is not None:  # initialised from the same variables, and kept up to date
        return int(lightning.rank_zero_only.rank)
    texts = (os.environ.get(name, "").strip() for name in _RANKS)
    return next((int(text) for text in texts if text.isascii() and text.isdecimal()), 0)


def print_text(text: str) -> None:
    """Print a command's output immediately."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
