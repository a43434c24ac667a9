"""The directory of one run: its checkpoints, its scores, and files of earlier fits in it."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedsim.core.errors import DataError
from fedsim.core.files import replacing
from fedsim.core.paths import RUN, expanded
from fedsim.core.readable import has_file
from fedsim.core.replaced_run import CHECKPOINTS, TESTS, bring_back, bring_back_at, run_around
from fedsim.core.run_lock import RunLock
from fedsim.evaluation.summary import write_queries
from fedsim.federation.callbacks.summary import versions
from fedsim.federation.federation import Federation
from fedsim.parsing.agent_words import folder_of_sweep_run
from fedsim.parsing.command_line import options_in
from fedsim.parsing.output import rank_of_this_process
from fedsim.settings.identity import sealed
from fedsim.strategy import run_checkpoints
from fedsim.strategy.checkpoint_files import find_version, read_checkpoint

log = logging.getLogger(__name__)


def default_run_dir(method: str, seed: int) -> str:
    """Return the default run directory: runs/METHOD-seedN, or the folder of a run that W&B's agent has started."""
    return folder_of_sweep_run() or f"runs/{method.rpartition('.')[2].lower()}-seed{seed}"


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
        return run_checkpoints.checkpoint_at(Path(RUN.check(checkpoint, "--ckpt_path")), fitting)
    bring_back_at(run_dir)
    path = run_checkpoints.checkpoint_named(run_dir, checkpoint)
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
    """its content without the clients' private states"""
    resumed: run_checkpoints.Resumed | None = None
    """of a fit that has something to train"""


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
    done = run_checkpoints.rounds_done(content)
    trains = not fitting or run_checkpoints.check_rounds(path, done, max_epochs)
    if not trains:
        log.info("nothing to train: %s is of round %d, the last; to continue, raise trainer.max_epochs", path, done)
    resumed = run_checkpoints.resumed_at(path, content) if fitting and trains else None
    return Settled(
        path, describe_checkpoint(path, content), run_checkpoints.progress_of(content)["started"], content, resumed
    )


def describe_checkpoint(path: Path, checkpoint: Mapping[str, Any]) -> str:
    """Return a line on the checkpoint, a dictionary of Lightning's, that a command uses."""
    states = [state for state in checkpoint.get("callbacks", {}).values() if isinstance(state, dict)]
    names = (path.name, path.parent.name)  # the path may be that of one of its versions
    # the name of the best one without folders: the run directory may have been moved
    by = [s["monitor"] for s in states if s.get("monitor") and Path(s.get("best_model_path") or "none").name in names]
    suffix = f", best by {by[0]}" if by else ", last" if "last.ckpt" in names else ""
    return f"checkpoint {path}: round {run_checkpoints.progress_of(checkpoint)['started']}{suffix}"


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
        look_for_fit(Path(run_dir) if run_dir is not None else run_around(Path(checkpoint)) or Path(checkpoint))
    path = find_checkpoint(checkpoint, Path(run_dir or "."), command == "fit")
    config = None if path is None else find_version(path) / "config.yaml"
    if path is None or config is None:
        return list(args)
    if not has_file(config):
        raise DataError(f"{path}: has no config.yaml (the run was not started by fedsim fit); give --config")
    options = ["--config", str(config)]
    owner = run_around(path)
    if run_dir is None and owner is not None:
        options += ["--run_dir", str(owner)]
    return [*options, *args]


def look_for_fit(run_dir: Path) -> None:
    """Raise ConfigError if another fit runs in the folder, and changes its files while they are read."""
    if rank_of_this_process() == 0:  # which will have the lock when other ranks start
        RunLock(run_dir).look()
        bring_back(run_dir)


def keep_scores(run_dir: Path | None, scored: Settled, model: Federation, conditions: Mapping[str, Any]) -> str:
    """Write the scores of ``fedsim test`` to ``tests/CHECKPOINT.json``, those of single queries to an npz file there.

    The folder is in ``run_dir``, or, where none was given, in the run directory that holds the checkpoint.
    ``conditions``: the ``settings`` of the test, nested as in config.yaml, and the identity of its ``data``. Returns a
    line on the result: without a writable disk, the test has its scores only on the terminal.
    """
    assert scored.path is not None, "a test has a checkpoint"
    parents = scored.path.absolute().parents
    owner = run_dir or run_around(scored.path)
    if owner is None:
        return "scores are kept in a run directory, but the checkpoint is in none; name it with --run_dir"
    # the path may be that of one of its versions
    named = next((part for part in (scored.path, *parents) if part.suffix == ".ckpt"), scored.path)
    path = owner / TESTS / f"{named.stem}.json"
    content = {
        "checkpoint": scored.line,
        "round": scored.round_,
        "metrics": model.scores,
        **conditions,
        "versions": versions(),
        "written": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    try:
        with replacing(path) as partial:
            partial.write_text(json.dumps(sealed(content), indent=2) + "\n")
        write_queries(path.with_suffix(".npz"), model.evaluator.queries, scored.round_)
    except OSError as error:
        return f"{path}: the scores are not kept ({error.strerror})"
    return f"wrote {path}"


def _path_option(args: Sequence[str], name: str) -> str | None:
    """Return the last value of an option on a command line, a path; None if it is not given, or null."""
    value_text = dict(options_in(args)).get(name, "null")
    return None if value_text in ("null", "none") else expanded(value_text, name)
