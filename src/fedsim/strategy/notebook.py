"""Notebooks: a single rank can run in them; they cannot start further ranks."""

from __future__ import annotations

import sys

from lightning.fabric.plugins import ClusterEnvironment

from fedsim.core.errors import ConfigError


def check_notebook(num_ranks: int, environment: ClusterEnvironment) -> None:
    """Raise ConfigError in a notebook that would have to start other ranks."""
    if num_ranks > 1 and hasattr(sys, "ps1") and not environment.creates_processes_externally:
        raise ConfigError(f"trainer.devices: a notebook cannot start {num_ranks} ranks; take 1, or run a script")
