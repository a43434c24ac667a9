"""The directory of one run: its checkpoints, its scores, and files of earlier fits in it."""

from __future__ import annotations

import json
import logging
import math
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from fedsim.core.errors import ConfigError, DataError
from fedsim.core.files import expanded, make_folder, replacing
from fedsim.core.names import file_name
from fedsim.core.run_lock import RunLock
from fedsim.evaluation.query_file import write_queries
from fedsim.federation.callbacks.summary import QUERIES_FILE, versions
from fedsim.federation.callbacks.tracking import MLFLOW_ID_FILE, RUN_ID_FILE
from fedsim.federation.federation import Federation
from fedsim.inference.checkpoints import CHECKPOINTS, checkpoint_at, checkpoint_named
from fedsim.parsing.output import rank_of_this_process
from fedsim.report.runs import metrics_files, next_metrics_file, read_json
from fedsim.strategy.checkpoint_files import find_version, read_checkpoint

log = logging.getLogger(__name__)

TESTS = "tests"
"""Folder with the scores of fedsim test: one file per checkpoint."""
_ASIDE = "replaced-"  # begin of the name of a folder with a run that is about to be removed


def default_run_dir(method: str, seed: int) -> str:
    """Return the default run directory: runs/METHOD-seedN, or the folder of a run that W&B's agent has started."""
    return folder_of_sweep_run() or f"runs/{method.rpartition('.')[2].lower()}-seed{seed}"


def folder_of_sweep_run() -> str | None:
    """Return the folder of a run of W&B's agent, the same one if the server repeats the run; None for other runs."""
    sweep, run = os.environ.get("WANDB_SWEEP_ID"), os.environ.get("WANDB_RUN_ID")
    return f"runs/sweep-{file_name(sweep)}/{file_name(run)}" if sweep and run else None


def find_checkpoint(checkpoint: str, run_dir: Path, fitting: bool) -> Path | None:
    """Return the checkpoint of ``--ckpt_path``; None if a fit is to continue from its ``last`` one, and has none yet.

    Args:
        checkpoint: ``last`` or ``best``, of ``run_dir``; a checkpoint, or a run directory, see :func:`checkpoint_at`.
        run_dir: directory of this run.
        fitting: whether the command is a fit, which continues the run.

    Raises:
        DataError: if there is none.
    """
    if checkpoint not in ("last", "best"):
        return checkpoint_at(Path(checkpoint), fitting)
    path = checkpoint_named(run_dir, checkpoint)
    if path is None and not (fitting and checkpoint == "last"):
        raise DataError(f"{run_dir / CHECKPOINTS}: there is no {checkpoint} checkpoint; does run_dir name a run?")
    return path


class Settled(NamedTuple):
    """The checkpoint that a command uses."""

    path: Path | None
    """None: a new fit"""
    line: str = ""
    """a description of the checkpoint"""
    round_: int = 0
    """from 1"""
    content: Mapping[str, Any] | None = None
    """what it holds without the clients' private states"""


def settle_checkpoint(checkpoint: str, run_dir: Path, fitting: bool, max_epochs: int | None) -> Settled:
    """Return the checkpoint of ``--ckpt_path``, see :func:`find_checkpoint`.

    Raises:
        DataError: if there is none that can be read.
        ConfigError: if it has more rounds than the fit's trainer.max_epochs: the run's config would not describe it.
    """
    path = find_checkpoint(checkpoint, run_dir, fitting)
    if path is None:
        log.info("%s has no checkpoint yet: the run begins", run_dir)
        return Settled(None)
    content = read_checkpoint(path)
    done = rounds_done(content)
    max_rounds = math.inf if max_epochs is None or max_epochs == -1 or not fitting else max_epochs
    if max_rounds < done:
        raise ConfigError(
            f"trainer.max_epochs: {max_rounds} is less than the {done} rounds of {path}; give a larger number"
        )
    if max_rounds == done:
        log.info("nothing to train: %s is of round %d, the last; to continue, raise trainer.max_epochs", path, done)
    return Settled(path, describe_checkpoint(path, content), _progress(content)["started"], content)


def describe_checkpoint(path: Path, checkpoint: Mapping[str, Any]) -> str:
    """Return a line on the checkpoint, a dictionary of Lightning's, that a command uses."""
    states = [state for state in checkpoint.get("callbacks", {}).values() if isinstance(state, dict)]
    names = (path.name, path.parent.name)  # the path may be that of one of its versions
    # the name of the best one without folders: the run directory may have been moved
    by = [s["monitor"] for s in states if s.get("monitor") and Path(s.get("best_model_path") or "none").name in names]
    kind = f", best by {by[0]}" if by else ", last" if "last.ckpt" in names else ""
    return f"checkpoint {path}: round {_progress(checkpoint)['started']}{kind}"


def rounds_done(checkpoint: Mapping[str, Any]) -> int:
    """Return the number of rounds after which a fit continues from a checkpoint."""
    return _progress(checkpoint)["processed"]


def _progress(checkpoint: Mapping[str, Any]) -> dict[str, int]:
    """Return Lightning's counts of rounds. A round in evaluation is started, and not yet processed."""
    return dict(checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"])


def with_own_config(command: str, args: Sequence[str]) -> list[str]:
    """Add the config of the checkpoint to a command line that names a checkpoint, but no config.

    The checkpoint's run directory is used, unless another one is given.

    >>> with_own_config("test", ["--config", "a.yaml", "--ckpt_path", "best"])
    ['--config', 'a.yaml', '--ckpt_path', 'best']
    """
    checkpoint, run_dir = (_path_option(args, name) for name in ("ckpt_path", "run_dir"))
    has_config = any(arg.partition("=")[0] in ("--config", "-c") for arg in args)
    if checkpoint is None or has_config or (checkpoint in ("last", "best") and run_dir is None):
        return list(args)
    if command == "fit":
        look_for_fit(Path(run_dir) if run_dir is not None else _owner(Path(checkpoint)) or Path(checkpoint))
    path = find_checkpoint(checkpoint, Path(run_dir or "."), command == "fit")
    config = None if path is None else find_version(path) / "config.yaml"
    if path is None or config is None:
        return list(args)
    if not config.is_file():
        raise DataError(f"{path}: has no config.yaml (the run was not started by fedsim fit); give --config")
    options = ["--config", str(config)]
    owner = _owner(path)
    if run_dir is None and owner is not None:
        options += ["--run_dir", str(owner)]
    return [*options, *args]


def _owner(path: Path) -> Path | None:
    """Return the run directory that holds a checkpoint; None if it is in none."""
    return next((parent.parent for parent in path.absolute().parents if parent.name == CHECKPOINTS), None)


def look_for_fit(run_dir: Path) -> None:
    """Raise ConfigError if another fit runs in the folder, and changes its files while they are read."""
    if rank_of_this_process() == 0:  # which will have the lock when other ranks start
        RunLock(run_dir).look()


def keep_scores(run_dir: Path | None, scored: Settled, model: Federation) -> str:
    """Write the scores of ``fedsim test`` to ``tests/CHECKPOINT.json``, those of single queries to an npz file there.

    The folder is in ``run_dir``, or, where none was given, in the run directory that holds the checkpoint. Returns a
    line on the result: without a writable disk, the test has its scores only on the terminal.
    """
    assert scored.path is not None, "a test has a checkpoint"
    parents = scored.path.absolute().parents
    owner = run_dir or _owner(scored.path)
    if owner is None:
        return "scores are kept in a run directory, but the checkpoint is in none; name it with --run_dir"
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


def _path_option(args: Sequence[str], name: str) -> str | None:
    """Return the last value of an option on a command line, a path; None if it is not given, or null."""
    text = _option(args, f"--{name}")
    return None if text in (None, "null", "none") else expanded(str(text), name)


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


def check_free(folder: Path, overwrite: bool, ckpt_path: str | None, restart: bool = False) -> None:
    """Raise ConfigError if the folder holds a run that a fit neither continues nor replaces; see prepare_for_fit."""
    summary = folder / "summary.json"
    if overwrite or not os.path.isdir(folder) or _continues(folder, ckpt_path):
        return
    if summary.exists():
        if restart and not read_json(summary).get("finished"):
            return
    elif restart or checkpoint_named(folder, "last") is None:
        return
    raise ConfigError(
        f"run_dir: {folder} holds a run already; give another --run_dir, --overwrite true to replace it, "
        "or --ckpt_path last to continue it"
    )


def prepare_for_fit(
    folder: Path,
    overwrite: bool,
    ckpt_path: str | None,
    restart: bool = False,
    begin: Callable[[], None] = lambda: None,
) -> None:
    """Make room for a fit in the run directory, and let it ``begin``; call it on the first rank only.

    A checkpoint in the folder continues its run: the metrics so far are kept as ``metrics-1.csv``, ``metrics-2.csv``
    and so on. Otherwise ``overwrite`` replaces a run in the folder; files of two runs are never mixed. With
    ``restart``, a run that was to be continued, but has no checkpoint, begins again unless it is finished.

    The older run is moved aside, and removed after ``begin``; if that fails, everything is back in its place.

    Raises:
        ConfigError: if the folder holds a run that is neither continued nor replaced.
    """
    check_free(folder, overwrite, ckpt_path, restart)
    aside = folder / f"{_ASIDE}{secrets.token_hex(4)}.tmp"
    if _continues(folder, ckpt_path):
        moves = [(path, next_metrics_file(folder)) for path in folder.glob("metrics.csv")]
    else:
        # a fit that begins again is still the same run of W&B or MLflow
        ids = () if restart and not overwrite else (RUN_ID_FILE, MLFLOW_ID_FILE)
        moves = [(path, aside / f"{i}-{path.name}") for i, path in enumerate(_files_of_run(folder, ids))]
    with _moved(moves):
        begin()
    for leftover in folder.glob(f"{_ASIDE}*.tmp"):  # also of a killed fit
        shutil.rmtree(leftover, ignore_errors=True)


def _continues(folder: Path, ckpt_path: str | None) -> bool:
    """Whether a checkpoint is one of the run in a folder."""
    return ckpt_path is not None and folder.resolve() in Path(ckpt_path).resolve().parents


def _files_of_run(folder: Path, ids: Sequence[str]) -> Iterator[Path]:
    """Yield the files and folders of a run, and the files of ``ids``; the summary, which marks a run, is the last."""
    summary, checkpoints = folder / "summary.json", [*(folder / CHECKPOINTS).glob("*.ckpt*")]
    is_run = summary.exists() or bool(checkpoints)  # else folders of these names are the user's
    names = (*ids, *((QUERIES_FILE, "features", "rankings", "maps", TESTS) if is_run else ()))
    metrics = metrics_files(folder) if is_run else folder.glob("metrics.csv")
    paths = [*metrics, *(folder / name for name in names), *checkpoints, summary]
    return (path for path in paths if os.path.lexists(path))


@contextmanager
def _moved(moves: Iterable[tuple[Path, Path]]) -> Iterator[None]:
    """Move files and folders for a block; move them back if it fails."""
    with ExitStack() as back:
        for source, target in moves:
            target.parent.mkdir(parents=True, exist_ok=True)
            source.rename(target)
            back.callback(_move_back, target, source)
        yield
        back.pop_all()


def _move_back(moved: Path, place: Path) -> None:
    if place.is_dir() and not place.is_symlink():  # of the new run
        shutil.rmtree(place, ignore_errors=True)
    moved.replace(place)
    with suppress(OSError):  # other things are in it, too
        moved.parent.rmdir()
