"""Opens the run directories of a report, each run once, with a line about each folder that is left out."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from fedsim.core.errors import ConfigError, DataError
from fedsim.core.paths import RUN
from fedsim.report.experiment import Experiment
from fedsim.report.runs import Run, metrics_files, read_run

STUDY_FILE = "trials.log"
"""in the folder of a search: Optuna's journal of its trials"""


def named_folder(argument: str) -> tuple[Path, str]:
    """Return the folder that an argument of a report names, and the name that it gives the run: ``Mine=runs/b``.

    A folder whose own name has the sign is meant as it is.

    Raises:
        ConfigError: if name or folder is empty.
    """
    name, sign, folder = argument.partition("=")
    if not sign or Path(argument).exists() or "/" in name:
        return Path(RUN.check(argument, "runs")), ""
    if not name.strip() or not folder:
        raise ConfigError(f"runs: {argument} is no run directory, and no name with one, such as Mine=runs/b")
    return Path(RUN.check(folder, "runs")), name.strip()


def open_runs(
    folders: Sequence[Path], unfinished: bool = False, names: Sequence[str] = ()
) -> tuple[list[Run], list[str]]:
    """Open run directories; return the runs, and a line for each folder that is left out.

    ``names`` are those of the runs in a report, one per folder, empty for none.

    Left out are runs without scores, unfinished runs if other runs are finished (``unfinished`` keeps them), and
    repeated runs with the same settings and seed: a repetition is the same run, not another sample.

    Raises:
        ConfigError: if no folder is given.
        DataError: if a folder is not a run directory, or no run is left.
    """
    if not folders:
        raise ConfigError("runs: give at least one run directory")
    runs, lines, seen, damaged = list[Run](), list[str](), set[str](), list[DataError]()
    for folder, name in zip(folders, names or [""] * len(folders), strict=True):
        if os.path.realpath(folder) in seen:
            lines.append(f"left out: {folder} is given twice; it counts once")
        elif is_begun(folder):
            lines.append(f"left out: {folder} has not finished its first round")
        else:
            runs += _whole(folder, name, lines, damaged)
        seen.add(os.path.realpath(folder))
    for run in runs:
        if not _has_scores(run):
            lines.append(f"left out: {run.folder} has no scores yet")
    scored = [run for run in runs if _has_scores(run)]
    done = [run for run in scored if run.summary["finished"]]
    if done and not unfinished:
        lines += [_not_finished(run) for run in scored if not run.summary["finished"]]
        scored = done
    kept = _once(scored, lines)
    if not kept and damaged:
        raise damaged[0]
    if not kept:
        message = f"{folders[0]}: the run has no scores yet; wait for its first evaluation"
        raise DataError(message if len(folders) == 1 else f"{message}; the other runs have none either")
    return kept, lines


def _whole(folder: Path, name: str, lines: list[str], damaged: list[DataError]) -> list[Run]:
    """Return the run in a folder; nothing and a line for a damaged run or a file. A folder of no run is an error."""
    if folder.is_file():
        damaged.append(DataError(f"{folder}: is a file; give the run directories of fedsim fit"))
        lines.append(f"left out: {folder} is a file, not a run directory")
        return []
    if not (folder / "summary.json").is_file():
        return [read_run(folder, name)]
    try:
        run = read_run(folder, name)
        run.check()
    except DataError as error:
        damaged.append(error)
        lines.append(f"left out: {folder} is damaged ({error})")
        return []
    return [run]


def is_begun(folder: Path) -> bool:
    """Whether a folder belongs to a run that has no results yet, or ended before its first ones."""
    has_begun = (folder / "config.yaml").is_file() or bool(metrics_files(folder))
    return has_begun and not (folder / "summary.json").is_file()


def _has_scores(run: Run) -> bool:
    return bool(run.test_sets)


def _not_finished(run: Run) -> str:
    rounds = run.summary["rounds"]
    return f"left out: {run.folder} is not finished, it has {rounds} rounds so far; --unfinished includes it"


def _once(runs: Sequence[Run], lines: list[str]) -> list[Run]:
    """Return one run of each configuration and seed, a finished and long one; add a line about each repetition."""
    kept: dict[tuple[Experiment, int], Run] = {}
    for run in sorted(runs, key=lambda run: (not run.summary["finished"], -run.summary["rounds"])):
        first = kept.setdefault((run.experiment._replace(end=""), run.summary["seed"]), run)
        if first is not run:
            seed = run.summary["seed"]
            lines.append(
                f"left out: {run.folder} has the settings and the seed {seed} of {first.folder}; both count as one run"
            )
    return [run for run in runs if run in kept.values()]
