"""``fedsim fit --seeds 0 1 2``: the same run with several seeds, one after another or in parallel, and their spread."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path

from fedsim.core.errors import ConfigError, DrawsFailedError
from fedsim.core.files import expanded
from fedsim.parsing.options import check_options
from fedsim.report import report
from fedsim.sweep.local import SweepRun
from fedsim.sweep.running import execute_runs

_METRIC = "val/mAP"
_REFUSED = {
    "--seed_everything": "--seeds gives the seeds",
    "--ckpt_path": "the same command continues unfinished runs",
    "--overwrite": "remove the folder to start again",
}


def run(words: Sequence[str]) -> str:
    """Run ``fedsim fit ... --seeds N... [--parallel N]``, and return the report on its runs.

    Raises:
        ConfigError: if an option is wrong.
        DrawsFailedError: if a run failed; all other runs are finished.
    """
    options, seeds = _taken(list(words), "--seeds")
    options, parallel = _taken(options, "--parallel")
    if not seeds:
        raise ConfigError("--seeds: give the seeds, such as --seeds 0 1 2; --parallel needs them")
    if len(parallel) > 1 or 0 in parallel:
        raise ConfigError("--parallel: give the number of parallel runs, 1 or more")
    for word in options:
        if (reason := _REFUSED.get(word.partition("=")[0])) is not None:
            raise ConfigError(f"{word.partition('=')[0]}: leave it out: {reason}")
    check_options(options, "fit")
    runs = runs_of_seeds(options, list(dict.fromkeys(seeds)))
    results = execute_runs(runs, _METRIC, parallel[0] if parallel else 1)
    failed = [result for result in results if result.code]
    if failed:
        logs = ", ".join(str(result.run.log) for result in failed)
        raise DrawsFailedError(f"{len(failed)} of {len(results)} runs failed; call again to repeat only those ({logs})")
    return report([str(sweep_run.folder) for sweep_run in runs])


def runs_of_seeds(words: Sequence[str], seeds: Sequence[int]) -> list[SweepRun]:
    """Return one run per seed. Its folder is named after the seed and a hash of the options.

    The folders are in ``--run_dir``, by default in ``runs/NAME-seeds``; NAME is that of the last config or the paper's
    row.
    """
    options, folders = _with_values(words, "--run_dir")
    named = [*_with_values(words, "--config")[1], *_with_values(words, "--paper")[1]]
    root = (
        Path(expanded(folders[-1], "run_dir"))
        if folders
        else Path("runs") / f"{Path(named[-1]).stem if named else 'fit'}-seeds"
    )
    mark = hashlib.sha256("\0".join(options).encode()).hexdigest()[:8]
    runs = []
    for seed in seeds:
        folder = root / f"seed{seed}-{mark}"
        arguments = [*options, f"--seed_everything={seed}", f"--run_dir={folder}"]
        arguments += ["--ckpt_path=last"] if folder.is_dir() else []
        runs.append(SweepRun({"seed": seed}, (sys.executable, "-m", "fedsim", "fit", *arguments), folder))
    return runs


def _taken(words: list[str], option: str) -> tuple[list[str], list[int]]:
    """Return the words without an option and its numbers, and the numbers."""
    places = [i for i, word in enumerate(words) if word.partition("=")[0] == option]
    if len(places) > 1:
        raise ConfigError(f"{option}: is given twice; give it once")
    if not places:
        return words, []
    [start] = places
    values = [value for value in words[start].partition("=")[2].split(",") if value]
    end = start + 1
    while end < len(words) and not values and not words[end].startswith("--"):
        end += 1
    values = values or words[start + 1 : end]
    if not values or not all(value.isdecimal() for value in values):
        raise ConfigError(f"{option}: {' '.join(values) or 'nothing'} is not a list of integers >= 0")
    return words[:start] + words[end:], [int(value) for value in values]


def _with_values(words: Sequence[str], option: str) -> tuple[list[str], list[str]]:
    """Return the words without a repeatable option and its values, and the values in order."""
    remaining, values = list[str](), list[str]()
    queue = iter(words)
    for word in queue:
        name, is_joined, value = word.partition("=")
        if name == option:
            values.append(value if is_joined else next(queue, ""))
        else:
            remaining.append(word)
    return remaining, values
