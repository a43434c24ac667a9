"""``fedsim fit --seeds 0 1 2``: the same run with several seeds, one after another or in parallel, and their spread."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedsim.core.checks import SEED
from fedsim.core.errors import ConfigError, RunsFailedError
from fedsim.core.paths import run_folder
from fedsim.parsing.command_line import options_in
from fedsim.parsing.options import check_options
from fedsim.report import report
from fedsim.settings.table import setting_at
from fedsim.sweep.local import SweepRun, check_names, outcome_of
from fedsim.sweep.running import execute_runs, refuse_elsewhere
from fedsim.sweep.sampling import Sample

GIVES_SEEDS = "--seeds gives the seeds"
_METRIC = "val/mAP"


def run(words: Sequence[str]) -> str:
    """Run ``fedsim fit ... --seeds N... [--parallel N]``, and return the report on its runs.

    Raises:
        ConfigError: if an option is wrong.
        RunsFailedError: if a run failed; all other runs are finished.
    """
    options, seeds, parallel = seeds_and_parallel(words)
    if not seeds:
        raise ConfigError("--seeds: give the seeds, such as --seeds 0 1 2; --parallel needs them")
    refuse_options(options, {"seed_everything": GIVES_SEEDS})
    runs = runs_of_seeds(options, seeds)
    finish(runs, parallel)
    return report([str(sweep_run.folder) for sweep_run in runs])


def seeds_and_parallel(words: Sequence[str]) -> tuple[list[str], list[int], int]:
    """Return the words without ``--seeds`` and ``--parallel``, each seed once, and the number of parallel runs."""
    options, seeds = take_numbers(list(words), "--seeds")
    for seed in seeds:
        SEED.check(seed, "--seeds")
    options, parallel = take_numbers(options, "--parallel")
    if len(parallel) > 1 or 0 in parallel:
        raise ConfigError("--parallel: give the number of parallel runs, 1 or more")
    return options, list(dict.fromkeys(seeds)), parallel[0] if parallel else 1


def refuse_options(words: Sequence[str], reasons: Mapping[str, str]) -> None:
    """Raise ConfigError for an option that one of several runs cannot have, or that fit lacks.

    ``reasons``: option -> why these runs have none, beside those that no run of several has.
    """
    for option, _ in options_in(words):
        if reason := reasons.get(option) or setting_at(option).facts.of_one_run:
            raise ConfigError(f"--{option}: leave it out: {reason}")
    check_options(words, "fit")


def finish(runs: Sequence[SweepRun], parallel: int) -> None:
    """Execute runs; raise RunsFailedError, with the reason of the first one, if any failed."""
    for sweep_run in runs:
        check_names(sweep_run.command)
    results = execute_runs(runs, _METRIC, parallel)
    failed = [result for result in results if result.code]
    if failed:
        logs, first = ", ".join(str(result.run.log) for result in failed), outcome_of(failed[0], _METRIC)
        raise RunsFailedError(
            f"{len(failed)} of {len(results)} runs failed; call again to repeat only those ({logs}); the first {first}"
        )
    refuse_elsewhere(results, runs)


def runs_of_seeds(words: Sequence[str], seeds: Sequence[int]) -> list[SweepRun]:
    """Return one run per seed. Its folder is named after the seed and a hash of the options.

    The folders are in ``--run_dir``, by default in ``runs/NAME-seeds``; NAME is that of the last config or the paper's
    row.
    """
    options, root = take_folder(words, "seeds")
    mark = mark_of(options)
    return [
        run_in(root / f"seed{seed}-{mark}", [*options, f"--seed_everything={seed}"], {"seed": seed}) for seed in seeds
    ]


def run_in(folder: Path, options: Sequence[str], sample: Sample) -> SweepRun:
    """Return the run of a fit in this folder; if there is such a folder, the fit is continued."""
    arguments = [*options, f"--run_dir={folder}", *(["--ckpt_path=last"] if folder.is_dir() else [])]
    return SweepRun(sample, (sys.executable, "-m", "fedsim", "fit", *arguments), folder)


def take_folder(words: Sequence[str], suffix: str) -> tuple[list[str], Path]:
    """Return the words without ``--run_dir``, and the folder of all runs: that one, or ``runs/NAME-KIND``.

    NAME is that of the last config or the paper's row.
    """
    options, folders = take_values(words, "--run_dir")
    if folders:
        return options, run_folder(folders[-1], "run_dir")
    named = [*take_values(words, "--config")[1], *take_values(words, "--paper")[1]]
    return options, Path("runs") / f"{Path(named[-1]).stem if named else 'fit'}-{suffix}"


def mark_of(options: Sequence[str]) -> str:
    """Return eight digits by which runs with other options have other folders."""
    return hashlib.sha256("\0".join(options).encode()).hexdigest()[:8]


def take_numbers(words: list[str], option: str) -> tuple[list[str], list[int]]:
    """Return the words without an option and its numbers, and the numbers."""
    options, values = take_list(words, option)
    numbers = [value for value in values or () if value]
    if values is not None and not (numbers and all(value.isdecimal() for value in numbers)):
        raise ConfigError(
            f"{option}: {' '.join(numbers) or 'nothing'} is not a list of integers >= 0; give such as {option} 0 1 2"
        )
    return options, [int(value) for value in numbers]


def take_list(words: Sequence[str], option: str) -> tuple[list[str], list[str] | None]:
    """Return the words without an option and its values, ``a b`` or ``=a,b``, and these; None without the option."""
    places = [position for position, word in enumerate(words) if word.partition("=")[0] == option]
    if len(places) > 1:
        raise ConfigError(f"{option}: is given twice; give it once, with all values")
    if not places:
        return list(words), None
    [start] = places
    if words[start] != option:
        return [*words[:start], *words[start + 1 :]], words[start].partition("=")[2].split(",")
    end = next((end for end in range(start + 1, len(words)) if words[end].startswith("--")), len(words))
    return [*words[:start], *words[end:]], list(words[start + 1 : end])


def take_values(words: Sequence[str], option: str) -> tuple[list[str], list[str]]:
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
