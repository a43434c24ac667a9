"""The directory of one run: what a fit may do with what it finds there."""

from __future__ import annotations

import shutil
from pathlib import Path

from fedsim.core.errors import ConfigError

__all__ = ["metrics_files", "prepare_for_fit"]


def prepare_for_fit(folder: Path, overwrite: bool, ckpt_path: str | None) -> None:
    """Make ``folder`` ready for a fit; call it on the first rank only.

    A run is continued by a checkpoint of its own: its metrics so far are kept as ``metrics-1.csv``, ``metrics-2.csv``
    and so on. Otherwise a run that is there is replaced if ``overwrite`` says so, and never mixed with the new one.

    Args:
        folder: the run directory.
        overwrite: whether a run in it may be replaced.
        ckpt_path: the checkpoint to continue from, of this run or another, or None.

    Raises:
        ConfigError: if a run is there and neither continued nor to be replaced.
    """
    if ckpt_path is not None and folder.resolve() in Path(ckpt_path).resolve().parents:
        metrics = folder / "metrics.csv"
        if metrics.exists():
            metrics.rename(folder / f"metrics-{len(metrics_files(folder))}.csv")
        return
    if not (folder / "summary.json").exists():
        return
    if not overwrite:
        raise ConfigError(
            f"run_dir: {folder} holds a run already; give another --run_dir, --overwrite true to replace it, "
            f"or --ckpt_path {folder}/checkpoints/last.ckpt to continue it"
        )
    for path in (*metrics_files(folder), folder / "summary.json", *(folder / "checkpoints").glob("*.ckpt")):
        path.unlink()
    shutil.rmtree(folder / "features", ignore_errors=True)


def metrics_files(folder: Path) -> list[Path]:
    """Return the metrics files of a run: those of resumed parts in their order, then ``metrics.csv``."""
    parts = sorted(folder.glob("metrics-*.csv"), key=lambda path: int(path.stem.partition("-")[2]))
    return [*parts, *folder.glob("metrics.csv")]
