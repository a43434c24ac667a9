"""The directory of one run: what a fit may do with what it finds there."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedsim.core.errors import ConfigError, DataError
from fedsim.core.versions import current_version
from fedsim.federation.callbacks.tracking import RUN_ID_FILE
from fedsim.strategy.checkpoint_files import find_version

log = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"


def default_run_dir(method: str, seed: int) -> str:
    """Return where a run goes that is not told: runs/METHOD-seedN, or the folder of a draw of W&B's agent.

    Args:
        method: the method's class path.
        seed: of the run.
    """
    return folder_of_draw() or f"runs/{method.rpartition('.')[2].lower()}-seed{seed}"


def folder_of_draw() -> str | None:
    """Return where a draw of W&B's agent goes: the same place when the server has it repeated; None for other runs."""
    sweep, run = os.environ.get("WANDB_SWEEP_ID"), os.environ.get("WANDB_RUN_ID")
    return f"runs/sweep-{sweep}/{run}" if sweep and run else None


def find_checkpoint(given: str, run_dir: Path, fitting: bool) -> Path | None:
    """Return the checkpoint that ``--ckpt_path`` means.

    Args:
        given: ``last``, ``best``, a checkpoint, or a run directory.
        run_dir: of this run, where ``last`` and ``best`` are.
        fitting: of a run directory, a fit takes the last checkpoint; see :func:`checkpoint_at`.

    Returns:
        a path; None if a fit asks for the ``last`` checkpoint of a run that has none yet, and so begins.

    Raises:
        DataError: if there is none.
    """
    if given not in ("last", "best"):
        return checkpoint_at(Path(given), fitting)
    found = _named(run_dir, given)
    if found is None and not (fitting and given == "last"):
        raise DataError(f"{run_dir / CHECKPOINTS}: there is no {given} checkpoint; does run_dir name a run?")
    return found


def checkpoint_at(path: Path, fitting: bool = False) -> Path:
    """Return the checkpoint of a run directory: for a fit the last one, else the best one, or the last if none is best.

    Args:
        path: a run directory; or a checkpoint, which is returned as it is.
        fitting: whether it is to be continued.

    Raises:
        DataError: if there is none.
    """
    if not (path / CHECKPOINTS).is_dir():
        find_version(path)
        return path
    found = (None if fitting else _named(path, "best")) or _named(path, "last")
    if found is None:
        raise DataError(f"{path / CHECKPOINTS}: there is no checkpoint; is this the directory of a run?")
    return found


def _named(folder: Path, which: str) -> Path | None:
    """Return ``last.ckpt`` or ``best.ckpt``; for ``last`` of a run with names of its own, the newest."""
    complete = [p for p in (folder / CHECKPOINTS).glob("*.ckpt") if p.is_file() or current_version(p) is not None]
    path = folder / CHECKPOINTS / f"{which}.ckpt"
    if path in complete or which == "best":
        return path if path in complete else None
    return max(complete, key=lambda p: p.stat().st_mtime, default=None)


def describe_checkpoint(path: Path, checkpoint: Mapping[str, Any]) -> str:
    """Say in one line which checkpoint a command has taken.

    Args:
        path: of the checkpoint.
        checkpoint: Lightning's dictionary, in which its callbacks tell what they keep.
    """
    states = [state for state in checkpoint.get("callbacks", {}).values() if isinstance(state, dict)]
    names = (path.name, path.parent.name)  # one of its versions may have been given
    by = [state["monitor"] for state in states if state.get("monitor") and _best_of(state) in names]
    which = f", best by {by[0]}" if by else ", last" if "last.ckpt" in names else ""
    return f"checkpoint {path}: round {_progress(checkpoint)['started']}{which}"


def _best_of(state: Mapping[str, Any]) -> str:
    """Return the name of a callback's best checkpoint, without folders: the run directory may have been moved."""
    return Path(state.get("best_model_path") or "none").name


def rounds_done(checkpoint: Mapping[str, Any]) -> int:
    """Return after how many rounds a fit goes on from a checkpoint."""
    return _progress(checkpoint)["processed"]


def check_rounds(path: Path, done: int, wanted: int) -> None:
    """Say it if a fit that goes on from a checkpoint has nothing to train.

    Args:
        path: the checkpoint.
        done: its rounds.
        wanted: trainer.max_epochs.

    Raises:
        ConfigError: if it has more rounds than are wanted: the config of the run would then no longer be true of it.
    """
    if wanted < done:
        raise ConfigError(f"trainer.max_epochs: {wanted}, but {path} has {done} rounds already; give more than these")
    if wanted == done:
        log.info("nothing to train: %s is of round %d, the last; to go on, raise trainer.max_epochs", path, done)


def _progress(checkpoint: Mapping[str, Any]) -> dict[str, int]:
    """Lightning's count of rounds. One that is being evaluated has been started, and is not processed yet."""
    progress: dict[str, int] = checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]
    return progress


def with_own_config(command: str, args: Sequence[str]) -> list[str]:
    """Give a command that names a checkpoint, but no config, the config that the checkpoint was written with.

    The checkpoint's run directory is this run's, unless another one is given.

    >>> with_own_config("test", ["--config", "a.yaml", "--ckpt_path", "best"])
    ['--config', 'a.yaml', '--ckpt_path', 'best']
    """
    given, run_dir = _option(args, "--ckpt_path"), _option(args, "--run_dir")
    has_config = any(arg.partition("=")[0] in ("--config", "-c") for arg in args)
    if given in (None, "null", "none") or has_config or (given in ("last", "best") and run_dir is None):
        return list(args)
    path = find_checkpoint(str(given), Path(run_dir or "."), command == "fit")
    config = None if path is None else find_version(path) / "config.yaml"
    if path is None or config is None:
        return list(args)
    if not config.is_file():
        raise DataError(f"{path}: holds no config.yaml, so give --config (the run was not started by fedsim fit)")
    found = ["--config", str(config)]
    owner = next((parent.parent for parent in path.absolute().parents if parent.name == CHECKPOINTS), None)
    if run_dir is None and owner is not None:
        found += ["--run_dir", str(owner)]
    return [*found, *args]


def _option(args: Sequence[str], name: str) -> str | None:
    """Return the last value of an option on a command line."""
    value = None
    for position, arg in enumerate(args):
        if arg.startswith(f"{name}="):
            value = arg.partition("=")[2]
        elif arg == name and position + 1 < len(args):
            value = args[position + 1]
    return value


def prepare_for_fit(folder: Path, overwrite: bool, ckpt_path: str | None, restart: bool = False) -> None:
    """Make ``folder`` ready for a fit; call it on the first rank only.

    A run is continued by a checkpoint of its own: its metrics so far are kept as ``metrics-1.csv``, ``metrics-2.csv``
    and so on. Otherwise a run that is there is replaced if ``overwrite`` says so, and never mixed with the new one.

    Args:
        folder: the run directory.
        overwrite: whether a run in it may be replaced.
        ckpt_path: the checkpoint to continue from, of this run or another, or None.
        restart: whether the run was to be continued, but has no checkpoint: if it is not finished, it begins again.

    Raises:
        ConfigError: if a run is there and neither continued nor to be replaced.
    """
    if ckpt_path is not None and folder.resolve() in Path(ckpt_path).resolve().parents:
        metrics = folder / "metrics.csv"
        if metrics.exists():
            metrics.rename(folder / f"metrics-{len(metrics_files(folder))}.csv")
        return
    has_run = (folder / "summary.json").exists()
    if has_run and not overwrite and not (restart and not _is_finished(folder)):
        raise ConfigError(
            f"run_dir: {folder} holds a run already; give another --run_dir, --overwrite true to replace it, "
            "or --ckpt_path last to continue it"
        )
    if overwrite or not restart:  # a job that begins again is still the same W&B run
        (folder / RUN_ID_FILE).unlink(missing_ok=True)
    if not has_run:
        return
    for path in (*metrics_files(folder), folder / "summary.json"):
        path.unlink()
    for path in (folder / "features", *(folder / CHECKPOINTS).glob("*.ckpt*")):
        if path.is_file():
            path.unlink()
        shutil.rmtree(path, ignore_errors=True)


def _is_finished(folder: Path) -> bool:
    return bool(json.loads((folder / "summary.json").read_text()).get("finished"))


def metrics_files(folder: Path) -> list[Path]:
    """Return the metrics files of a run: those of resumed parts in their order, then ``metrics.csv``."""
    parts = sorted(folder.glob("metrics-*.csv"), key=lambda path: int(path.stem.partition("-")[2]))
    return [*parts, *folder.glob("metrics.csv")]
