"""The files of a run in its directory when another fit continues or replaces it: all changes, or none."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fedsim.core.errors import ConfigError
from fedsim.core.replaced_run import drop_replaced, is_finished, move_aside, put_back, stands_alone
from fedsim.core.run_lock import WAYS
from fedsim.strategy.run_checkpoints import checkpoint_named


@dataclass(frozen=True)
class FolderStart:
    """How a fit begins in a run directory."""

    folder: Path
    overwrite: bool = False
    """replace a run in the folder"""
    ckpt_path: str | None = None
    """the checkpoint from which the fit continues"""
    rounds: int = 0
    """those of the checkpoint"""
    restart: bool = False
    """a run that was to be continued, but has no checkpoint, begins again unless it is finished"""
    ways: str = WAYS
    """the remedy in the message about a folder that is not free"""

    @property
    def continues(self) -> bool:
        """Whether the checkpoint is one of the run in the folder."""
        real_folder = os.path.realpath(self.folder)
        return self.ckpt_path is not None and Path(real_folder) in Path(os.path.realpath(self.ckpt_path)).parents

    def check_way(self, goes_on: str, replaces: str) -> None:
        """Raise ConfigError if the fit shall both continue and replace the run, with the options that say so."""
        if self.overwrite and (self.continues or self.restart):
            raise ConfigError(
                f"{replaces}: would replace the run in {self.folder}, with which {goes_on} goes on; give one of them"
            )

    def check_free(self) -> None:
        """Raise ConfigError if the folder holds a run that the fit neither continues nor replaces."""
        summary = self.folder / "summary.json"
        if self.overwrite or not os.path.isdir(self.folder) or self.continues:
            return
        if summary.exists():
            if self.restart and not is_finished(self.folder):
                return
        elif self.restart or checkpoint_named(self.folder, "last") is None:
            return
        raise ConfigError(f"run_dir: {self.folder} holds a run already; {self.ways}")

    def prepare(self, begin: Callable[[], None] = lambda: None) -> None:
        """Make room for the fit, and let it ``begin``; call it on the first rank only.

        A checkpoint in the folder continues its run; what ``begin`` changes last are its metrics. Otherwise
        ``overwrite`` replaces a run in the folder; files of two runs are never mixed. The older run is moved aside
        until :meth:`settle`; if ``begin`` fails, everything is back in its place.

        Raises:
            ConfigError: if the folder holds a run that is neither continued nor replaced.
        """
        self.check_free()
        if self.continues:
            begin()
            return
        keeps = self.overwrite and stands_alone(self.folder)
        # a fit that begins again is still the same run of W&B or MLflow
        move_aside(self.folder, with_ids=self.overwrite or not self.restart)
        try:
            begin()
        except BaseException:
            put_back(self.folder)
            raise
        if not keeps:
            drop_replaced(self.folder)

    def settle(self, ends: bool = False) -> None:
        """Remove the replaced run if the new one has a whole checkpoint, or ``ends``; for the first rank only."""
        if self.overwrite and (ends or stands_alone(self.folder)):
            drop_replaced(self.folder)
