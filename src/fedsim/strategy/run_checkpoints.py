"""The checkpoints of a run directory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fedsim.core.errors import ConfigError, DataError
from fedsim.core.readable import has_file, has_folder
from fedsim.core.replaced_run import CHECKPOINTS
from fedsim.core.versions import current_version
from fedsim.settings.changes import Change, changes_between
from fedsim.strategy.checkpoint_files import find_version


def checkpoint_at(path: Path, fitting: bool = False) -> Path:
    """Return the checkpoint of a run directory: the last one for a fit, else the best one, or the last if none is best.

    The path of a checkpoint is returned unchanged.

    Raises:
        DataError: if there is none.
    """
    if not has_folder(path / CHECKPOINTS):
        find_version(path)
        return path
    checkpoint = (None if fitting else checkpoint_named(path, "best")) or checkpoint_named(path, "last")
    if checkpoint is None:
        raise DataError(f"{path / CHECKPOINTS}: there is no checkpoint; is this the directory of a run?")
    return checkpoint


def checkpoint_named(folder: Path, name: str) -> Path | None:
    """Return ``last.ckpt`` or ``best.ckpt`` of a run directory; None if there is none.

    For ``last`` of a run whose checkpoints have other names, it is the newest one.
    """
    files = (folder / CHECKPOINTS).glob("*.ckpt") if has_folder(folder / CHECKPOINTS) else ()
    complete = [path for path in files if path.is_file() or (path.is_dir() and _is_whole(path))]
    path = folder / CHECKPOINTS / f"{name}.ckpt"
    if path in complete or name == "best":
        return path if path in complete else None
    return max(complete, key=lambda p: p.stat().st_mtime, default=None)


def _is_whole(path: Path) -> bool:
    """Return whether a folder is a checkpoint; raise DataError if it cannot be read."""
    return has_folder(path) and current_version(path) is not None


def rounds_done(checkpoint: Mapping[str, Any]) -> int:
    """Return the number of rounds after which a fit continues from a checkpoint."""
    return progress_of(checkpoint)["processed"]


def progress_of(checkpoint: Mapping[str, Any]) -> dict[str, int]:
    """Return Lightning's counts of rounds. A round in evaluation is started, and not yet processed."""
    return dict(checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"])


@dataclass(frozen=True)
class Resumed:
    """Rounds and settings of the run that a fit continues."""

    rounds: int
    """that its checkpoint has trained: one that is written within an evaluation has trained that round, too"""
    config: Mapping[str, Any] | None
    """the settings of the checkpoint; None: it has none"""

    def changes(self, config: Mapping[str, Any]) -> list[Change]:
        """Return the settings that the fit's own config changes."""
        return [] if self.config is None else changes_between(self.config, config, self.rounds)


def resumed_at(path: Path, checkpoint: Mapping[str, Any]) -> Resumed:
    """Return rounds and settings of the run whose checkpoint at ``path`` has this content."""
    file = find_version(path) / "config.yaml"
    try:
        config = _read_plain(file.read_text()) if has_file(file) else None
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise DataError(f"{file}: cannot be read as a config ({type(error).__name__}); was it edited?") from error
    return Resumed(progress_of(checkpoint)["started"], config if isinstance(config, Mapping) else None)


def _read_plain(yaml_text: str) -> Any:
    """Read the YAML of plain values that fedsim writes; raise ValueError for one that could expand without end."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(yaml_text, loader)):
        raise ValueError("aliases")
    return yaml.load(yaml_text, loader)


def check_rounds(path: Path, done: int, max_epochs: int | None) -> bool:
    """Return whether a fit of ``max_epochs`` rounds has something to train after the ``done`` ones of a checkpoint.

    Raises:
        ConfigError: if it has fewer rounds than the checkpoint: the run's config would not describe it.
    """
    most = math.inf if max_epochs is None or max_epochs == -1 else max_epochs
    if most < done:
        raise ConfigError(f"trainer.max_epochs: {most} is less than the {done} rounds of {path}; give a larger number")
    return most > done
