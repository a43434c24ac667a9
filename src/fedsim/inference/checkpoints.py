"""The checkpoints of a run directory."""

from __future__ import annotations

from pathlib import Path

from fedsim.core.errors import DataError
from fedsim.core.versions import current_version
from fedsim.strategy.checkpoint_files import find_version

CHECKPOINTS = "checkpoints"
"""folder of them"""


def checkpoint_at(path: Path, fitting: bool = False) -> Path:
    """Return the checkpoint of a run directory: the last one for a fit, else the best one, or the last if none is best.

    The path of a checkpoint is returned unchanged.

    Raises:
        DataError: if there is none.
    """
    if not (path / CHECKPOINTS).is_dir():
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
    files = (folder / CHECKPOINTS).glob("*.ckpt")
    complete = [path for path in files if path.is_file() or current_version(path) is not None]
    path = folder / CHECKPOINTS / f"{name}.ckpt"
    if path in complete or name == "best":
        return path if path in complete else None
    return max(complete, key=lambda p: p.stat().st_mtime, default=None)
