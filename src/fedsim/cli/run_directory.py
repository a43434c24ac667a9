"""The directory of one run: what a fit may do with what it finds there."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from fedsim.core.errors import ConfigError, DataError
from fedsim.core.files import make_folder, replacing
from fedsim.core.versions import current_version
from fedsim.evaluation.query_file import write_queries
from fedsim.federation.callbacks.summary import QUERIES_FILE, versions
from fedsim.federation.callbacks.tracking import MLFLOW_ID_FILE, RUN_ID_FILE
from fedsim.federation.federation import Federation
from fedsim.report.runs import metrics_files
from fedsim.strategy.checkpoint_files import find_version, read_checkpoint

log = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"
TESTS = "tests"
"""Folder with the scores of fedsim test: one file per checkpoint."""


def default_run_dir(method: str, seed: int) -> str:
    """Return where a run goes that is not told: runs/METHOD-seedN, or the folder of a draw of W&B's agent."""
    return folder_of_draw() or f"runs/{method.rpartition('.')[2].lower()}-seed{seed}"


def folder_of_draw() -> str | None:
    """Return where a draw of W&B's agent goes: the same place when the server has it repeated; None for other runs."""
    sweep, run = os.environ.get("WANDB_SWEEP_ID"), os.environ.get("WANDB_RUN_ID")
    return f"runs/sweep-{sweep}/{run}" if sweep and run else None


def find_checkpoint(given: str, run_dir: Path, fitting: bool) -> Path | None:
    """Return the checkpoint that ``--ckpt_path`` means; None if a fit asks for its ``last`` one before there is one.

    Args:
        given: ``last`` or ``best``, of ``run_dir``; a checkpoint, or a run directory, see :func:`checkpoint_at`.
        run_dir: of this run.
        fitting: whether it is to be continued.

    Raises:
        DataError: if there is none.
    """
    if given not in ("last", "best"):
        return checkpoint_at(Path(given), fitting)
    found = _named(run_dir, given)
    if found is None and not (fitting and given == "last"):
        raise DataError(f"{run_dir / CHECKPOINTS}: there is no {given} checkpoint; does run_dir name a run?")
    return found


class Settled(NamedTuple):
    """The checkpoint that a command has taken."""

    path: Path | None
    """None: a fit begins"""
    line: str = ""
    """describes it"""
    round_: int = 0
    """from 1"""


def settle_checkpoint(given: str, run_dir: Path, fitting: bool, max_epochs: int | None) -> Settled:
    """Return the checkpoint that ``--ckpt_path`` means, see :func:`find_checkpoint`.

    Raises:
        DataError: if there is none that can be read.
        ConfigError: if it has more rounds than a fit wants: the config of the run would then no longer be true of it.
    """
    path = find_checkpoint(given, run_dir, fitting)
    if path is None:
        log.info("%s has no checkpoint yet: the run begins", run_dir)
        return Settled(None)
    checkpoint = read_checkpoint(path)
    done = rounds_done(checkpoint)
    wanted = math.inf if max_epochs is None or max_epochs == -1 or not fitting else max_epochs
    if wanted < done:
        raise ConfigError(f"trainer.max_epochs: {wanted}, but {path} has {done} rounds already; give more than these")
    if wanted == done:
        log.info("nothing to train: %s is of round %d, the last; to go on, raise trainer.max_epochs", path, done)
    return Settled(path, describe_checkpoint(path, checkpoint), _progress(checkpoint)["started"])


def checkpoint_at(path: Path, fitting: bool = False) -> Path:
    """Return the checkpoint of a run directory: for a fit the last one, else the best one, or the last if none is best.

    A checkpoint is returned as it is.

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
    """Say in one line which checkpoint, a dictionary of Lightning's, a command has taken."""
    states = [state for state in checkpoint.get("callbacks", {}).values() if isinstance(state, dict)]
    names = (path.name, path.parent.name)  # one of its versions may have been given
    # the name of the best one without folders: the run directory may have been moved
    by = [s["monitor"] for s in states if s.get("monitor") and Path(s.get("best_model_path") or "none").name in names]
    which = f", best by {by[0]}" if by else ", last" if "last.ckpt" in names else ""
    return f"checkpoint {path}: round {_progress(checkpoint)['started']}{which}"


def rounds_done(checkpoint: Mapping[str, Any]) -> int:
    """Return after how many rounds a fit goes on from a checkpoint."""
    return _progress(checkpoint)["processed"]


def _progress(checkpoint: Mapping[str, Any]) -> dict[str, int]:
    """Lightning's count of rounds. One that is being evaluated has been started, and is not processed yet."""
    return dict(checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"])


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


def keep_scores(run_dir: Path | None, scored: Settled, model: Federation) -> str:
    """Write the scores of ``fedsim test`` to ``tests/CHECKPOINT.json``, those of single queries to the npz beside it.

    The folder is in ``run_dir``, or, where none was given, in the run directory that holds the checkpoint. Returns what
    to say of it: a test on a disk that cannot be written has its scores on the terminal all the same.
    """
    assert scored.path is not None, "a test has a checkpoint"
    parents = scored.path.absolute().parents
    owner = run_dir or next((parent.parent for parent in parents if parent.name == CHECKPOINTS), None)
    if owner is None:
        return "scores are kept in a run directory, which is not known; name it with --run_dir"
    named = next(
        (part for part in (scored.path, *parents) if part.suffix == ".ckpt"), scored.path
    )  # or a version of it
    path = owner / TESTS / f"{named.stem}.json"
    content = {
        "checkpoint": scored.line,
        "round": scored.round_,
        "metrics": model.scores,
        "evaluation": asdict(model.settings.evaluation),
        "versions": versions(),
        "written": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    try:
        with replacing(path) as partial:
            partial.write_text(json.dumps(content, indent=2) + "\n")
        write_queries(path.with_suffix(".npz"), model.evaluator.queries, scored.round_)
    except OSError as error:
        return f"{path}: the scores are not kept ({error.strerror})"
    return f"wrote {path}"


def _option(args: Sequence[str], name: str) -> str | None:
    """Return the last value of an option on a command line."""
    value = None
    for position, arg in enumerate(args):
        if arg.startswith(f"{name}="):
            value = arg.partition("=")[2]
        elif arg == name and position + 1 < len(args):
            value = args[position + 1]
    return value


def make_run_dir(folder: Path) -> None:
    """Make the folder of a run; raise ConfigError if it cannot be one."""
    make_folder(folder, "run_dir")


def prepare_for_fit(folder: Path, overwrite: bool, ckpt_path: str | None, restart: bool = False) -> None:
    """Make the run directory ready for a fit; call it on the first rank only.

    A run is continued by a checkpoint of its own: its metrics so far are kept as ``metrics-1.csv``, ``metrics-2.csv``
    and so on. Otherwise a run that is there is replaced if ``overwrite`` says so, and never mixed with the new one.
    With ``restart``, a run that was to be continued, but has no checkpoint, begins again unless it is finished.

    Raises:
        ConfigError: if a run is there and neither continued nor to be replaced.
    """
    if ckpt_path is not None and folder.resolve() in Path(ckpt_path).resolve().parents:
        metrics = folder / "metrics.csv"
        if metrics.exists():
            metrics.rename(folder / f"metrics-{len(metrics_files(folder))}.csv")
        return
    summary = folder / "summary.json"
    has_run = summary.exists()
    if has_run and not overwrite and not (restart and not json.loads(summary.read_text()).get("finished")):
        raise ConfigError(
            f"run_dir: {folder} holds a run already; give another --run_dir, --overwrite true to replace it, "
            "or --ckpt_path last to continue it"
        )
    if overwrite or not restart:  # a job that begins again is still the same run of W&B or MLflow
        for name in (RUN_ID_FILE, MLFLOW_ID_FILE):
            (folder / name).unlink(missing_ok=True)
    if not has_run:
        return
    for path in (*metrics_files(folder), summary):
        path.unlink()
    written = (QUERIES_FILE, "features", "rankings", "maps", TESTS)
    for path in (*(folder / name for name in written), *(folder / CHECKPOINTS).glob("*.ckpt*")):
        if path.is_file():
            path.unlink()
        shutil.rmtree(path, ignore_errors=True)
