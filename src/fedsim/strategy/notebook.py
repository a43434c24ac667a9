"""Notebooks: one rank runs in them; more cannot be started from there."""

from __future__ import annotations

import sys

from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher

from fedsim.core.errors import ConfigError


class OneRank(_SubprocessScriptLauncher):
    """Lightning's launcher where it has nobody to start: it needs no script to run again, so notebooks may use it."""

    @property
    def is_interactive_compatible(self) -> bool:
        """Whether Lightning accepts it in a notebook."""
        return True


def check_notebook(num_ranks: int, environment: ClusterEnvironment) -> None:
    """Raise ConfigError in a notebook that would have to start other ranks."""
    if num_ranks > 1 and hasattr(sys, "ps1") and not environment.creates_processes_externally:
        raise ConfigError(f"trainer.devices: a notebook cannot start {num_ranks} ranks; take 1, or run a script")
