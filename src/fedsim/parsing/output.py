"""Output to the terminal; each rank of a run is a separate process."""

from __future__ import annotations

import os
import sys

_RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")


def rank_of_this_process() -> int:
    """This process's rank, also before process groups exist or Lightning is imported."""
    lightning = sys.modules.get("lightning.fabric.utilities.rank_zero")
    if lightning is not None:  # initialised from the same variables, and kept up to date
        return int(lightning.rank_zero_only.rank)
    return next((int(os.environ[name]) for name in _RANKS if name in os.environ), 0)


def print_text(text: str) -> None:
    """Print a command's output immediately."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
