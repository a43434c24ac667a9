"""The output of a command that trains or scores, at its end."""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning import Trainer

from fedsim.core.errors import NoResultError, RunStoppedError
from fedsim.core.metrics import METRICS_OF
from fedsim.core.replaced_run import PICTURES, QUERIES_FILE
from fedsim.federation.events import strategy_of, was_stopped
from fedsim.parsing.output import print_text
from fedsim.report import group_runs, report, score_table, traffic

log = logging.getLogger(__name__)


def end_fit(trainer: Trainer, run_dir: Path, begun: int, has_trained: bool = True, drop: float = 0.0) -> None:
    """Print a fit's results on the first rank.

    ``begun`` is the number of rounds before this start, or -1 if there was nothing left to train; ``drop`` is the share
    of clients that never answer.

    Raises:
        RunStoppedError: if a signal ended it.
        NoResultError: if no round was trained, or no client ever trained.
    """
    is_new = trainer.current_epoch > begun  # else results in the run directory are those of an older run
    if trainer.is_global_zero and is_new:
        _say_run(trainer, run_dir)
    if was_stopped(trainer):
        stop_signal = strategy_of(trainer).stop_signal
        assert stop_signal is not None, "a signal has stopped it"
        raise RunStoppedError(stop_signal)
    if not is_new:
        raise NoResultError(f"{run_dir}: no round was trained; see trainer.max_epochs, max_steps and max_time")
    if trainer.current_epoch and not has_trained:
        message = (
            f"{run_dir}: no client returned an update that counts in {trainer.current_epoch} rounds, so all scores are "
            "those of the initial model"
        )
        if drop == 1 and trainer.max_epochs == 1:  # configs/methods/random_guess.yaml, a baseline of paper 001
            log.warning("%s", message)
        else:
            raise NoResultError(f"{message}; see model.availability, model.selection and model.on_bad_update")


def _say_run(trainer: Trainer, run_dir: Path) -> None:
    """Print a fit's scores, or its traffic if there are none, and the names of its files."""
    if trainer.fast_dev_run:  # type: ignore[attr-defined] # Lightning's stub misses it
        print_text("trainer.fast_dev_run: a round was trained, and nothing is written")
        return
    summary = run_dir / "summary.json"
    final = (json.loads(summary.read_text())["final"] if summary.exists() else None) or {}
    kinds = {name.partition("/")[0] for name in final.get("metrics", {})}
    if "test" in kinds:
        print_text(report([str(run_dir)]))
    else:
        if "val" in kinds:
            print_text("no test scores: see model.evaluation.test_during_fit; fedsim test scores the best checkpoint")
        else:
            remedy = f"fedsim test --ckpt_path {shlex.quote(str(run_dir))} scores a checkpoint"
            print_text(f"no scores: nothing was evaluated; {remedy}")
        if summary.exists():
            print_text(traffic(group_runs([run_dir])))
    if summary.exists():
        names = ("config.yaml", "metrics.csv", "summary.json", "checkpoints", QUERIES_FILE, PICTURES)
        print_text(f"wrote {run_dir}: {', '.join(name for name in names if (run_dir / name).exists())}")


def say_scores(metrics: Mapping[str, Any], task: str) -> None:
    """Print the scores of a checkpoint."""
    print_text(score_table(metrics, METRICS_OF[task]))


def check_scores(metrics: Mapping[str, Any], command: str) -> None:
    """Raise NoResultError if a ``command`` had no images to score."""
    if not any(name.count("/") == 3 for name in metrics):
        sets = "validation sets (data.val, data.val_fraction)" if command == "validate" else "test sets (data.source)"
        raise NoResultError(f"{command}: there are no scores, as no client has {sets}; fedsim describe lists the data")
