"""``fedsim fit --seeds 0 1 2``: the same run with several seeds, in turn or side by side, and their spread."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path

from fedsim.core.errors import ConfigError, DrawsFailedError
from fedsim.parsing.options import check_options
from fedsim.report import report
from fedsim.sweep.local import SweepRun
from fedsim.sweep.running import run_jobs

_METRIC = "val/mAP"
_REFUSED = {
    "--seed_everything": "--seeds says the seeds",
    "--ckpt_path": "the same call continues the runs that are not finished",
    "--overwrite": "remove the folder to begin anew",
}


def run(words: Sequence[str]) -> str:
    """Run ``fedsim fit ... --seeds N... [--parallel N]``, and return the report on the runs.

    Raises:
        ConfigError: if an option cannot be meant.
        DrawsFailedError: if a run failed; the others are finished.
    """
    rest, seeds = _taken(list(words), "--seeds")
    rest, parallel = _taken(rest, "--parallel")
    if not seeds:
        raise ConfigError("--seeds: give the seeds, such as --seeds 0 1 2; --parallel needs them, too")
    if len(parallel) > 1 or 0 in parallel:
        raise ConfigError("--parallel: give one number of runs at once, 1 or more")
    for word in rest:
        if (why := _REFUSED.get(word.partition("=")[0])) is not None:
            raise ConfigError(f"{word.partition('=')[0]}: leave it out: {why}")
    check_options(rest, "fit")
    jobs = plan_seeds(rest, list(dict.fromkeys(seeds)))
    results = run_jobs(jobs, _METRIC, parallel[0] if parallel else 1, noun="run")
    failed = [result for result in results if result.code]
    if failed:
        logs = ", ".join(str(result.job.log) for result in failed)
        raise DrawsFailedError(f"{len(failed)} of {len(results)} runs failed; call again to repeat only those ({logs})")
    return report([str(job.folder) for job in jobs])


def plan_seeds(words: Sequence[str], seeds: Sequence[int]) -> list[SweepRun]:
    """Return a job per seed. Its folder is named after the seed and a hash of the options, so that others get theirs.

    Folders are in ``--run_dir``, or in ``runs/NAME-seeds`` after the last config or the paper's row.
    """
    options, folders = _with_values(words, "--run_dir")
    named = [*_with_values(words, "--config")[1], *_with_values(words, "--paper")[1]]
    root = Path(folders[-1]) if folders else Path("runs") / f"{Path(named[-1]).stem if named else 'fit'}-seeds"
    mark = hashlib.sha256("\0".join(options).encode()).hexdigest()[:8]
    jobs = []
    for seed in seeds:
        folder = root / f"seed{seed}-{mark}"
        own = [*options, f"--seed_everything={seed}", f"--run_dir={folder}"]
        own += ["--ckpt_path=last"] if folder.is_dir() else []
        jobs.append(SweepRun({"seed": seed}, (sys.executable, "-m", "fedsim", "fit", *own), folder))
    return jobs


def _taken(words: list[str], option: str) -> tuple[list[str], list[int]]:
    """Take an option and its numbers out; return the other words, and the numbers."""
    places = [i for i, word in enumerate(words) if word.partition("=")[0] == option]
    if len(places) > 1:
        raise ConfigError(f"{option}: is there twice")
    if not places:
        return words, []
    [start] = places
    values = [value for value in words[start].partition("=")[2].split(",") if value]
    end = start + 1
    while end < len(words) and not values and not words[end].startswith("--"):
        end += 1
    values = values or words[start + 1 : end]
    if not values or not all(value.isdecimal() for value in values):
        raise ConfigError(f"{option}: {' '.join(values) or 'nothing'} is no list of numbers, 0 or more each")
    return words[:start] + words[end:], [int(value) for value in values]


def _with_values(words: Sequence[str], option: str) -> tuple[list[str], list[str]]:
    """Return the words without an option of one value, and its values, in their order."""
    rest, values = list[str](), list[str]()
    queue = iter(words)
    for word in queue:
        name, is_joined, value = word.partition("=")
        if name == option:
            values.append(value if is_joined else next(queue, ""))
        else:
            rest.append(word)
    return rest, values
