"""Writing to the terminal, where each rank of a run is a process of its own."""

from __future__ import annotations

import os
import sys

_RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")


def rank_of_this_process() -> int:
    """This process's rank, also before there are process groups, and where Lightning is not imported."""
    lightning = sys.modules.get("lightning.fabric.utilities.rank_zero")
    if lightning is not None:  # it has read the same variables, and knows better since
        return int(lightning.rank_zero_only.rank)
    return next((int(os.environ[name]) for name in _RANKS if name in os.environ), 0)


def say(text: str) -> None:
    """Write what a command prints, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
