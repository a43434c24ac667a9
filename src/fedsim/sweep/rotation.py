"""``fedsim fit --left_out a b c``: the same run once without each of these data sets, and one table of all of them.

``fedsim fit --paper 005/table1_fedpav``, a row of a table of left-out data sets, is the same for the paper's data sets.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from fedsim.core.errors import ConfigError
from fedsim.core.names import check_name, file_names
from fedsim.papers.files import Paper, rotation_in
from fedsim.report import report
from fedsim.sweep.local import SweepRun
from fedsim.sweep.seeds import (
    GIVES_SEEDS,
    finish,
    mark_of,
    refuse_options,
    run_in,
    seeds_and_parallel,
    take_folder,
    take_list,
    take_values,
)

_OPTION = "--left_out"


def run(words: Sequence[str]) -> str:
    """Run ``fedsim fit ... --left_out SET... [--seeds N...] [--parallel N]``, and return one table of the runs.

    Raises:
        ConfigError: if an option is wrong.
        RunsFailedError: if a run failed; all other runs are finished.
    """
    options, seeds, parallel = seeds_and_parallel(words)
    options, data_sets = take_list(options, _OPTION)
    if data_sets == []:
        raise ConfigError(f"{_OPTION}: names no data set; give two or more, such as {_OPTION} a b c")
    rotation = rotation_in(options)
    if rotation is not None and data_sets:
        raise ConfigError(f"{_OPTION}: {rotation[0].key}/{rotation[1]} gives the left-out data sets; leave it out")
    reasons = {"data.unseen": f"{_OPTION} gives the data sets that are left out"}
    refuse_options(options, reasons | ({"seed_everything": GIVES_SEEDS} if seeds else {}))
    by_set = _options_of_paper(options, rotation) if rotation else _options_of_sets(options, data_sets or ())
    runs = runs_of_rotation(options, by_set, seeds)
    finish(runs, parallel)
    folders = [str(sweep_run.folder) for sweep_run in runs]
    return report(folders, left_out=True, compare=None if rotation is None else table_of_rotation(*rotation))


def runs_of_rotation(words: Sequence[str], by_set: dict[str, list[str]], seeds: Sequence[int]) -> list[SweepRun]:
    """Return a run per left-out data set and seed, in folders with these in their names.

    Args:
        words: the options that all runs share, which may have ``--run_dir``, the folder of all runs.
        by_set: left-out data set -> the options of its runs.
        seeds: empty: the config's own.
    """
    options, root = take_folder(words, "left-out")
    mark, files = mark_of(options), file_names(by_set)
    runs = []
    for name, seed in product(by_set, seeds or (None,)):
        arguments, _ = take_values(by_set[name], "--run_dir")  # the folder is that of all runs
        words_of_seed = [] if seed is None else [f"--seed_everything={seed}"]
        folder = root / "-".join([files[name], *([] if seed is None else [f"seed{seed}"]), mark])
        sample = {"left_out": name} | ({} if seed is None else {"seed": seed})
        runs.append(run_in(Path(folder), [*arguments, *words_of_seed], sample))
    return runs


def _options_of_sets(options: Sequence[str], data_sets: Sequence[str]) -> dict[str, list[str]]:
    if len(data_sets) < 2:
        unseen = json.dumps(list(data_sets))
        raise ConfigError(f"{_OPTION}: a rotation needs two data sets or more; for one, give --data.unseen='{unseen}'")
    for name in data_sets:
        check_name(name, _OPTION)
        if data_sets.count(name) > 1:
            raise ConfigError(f"{_OPTION}: {name} is given twice; give each data set once")
    return {name: [*options, f"--data.unseen={json.dumps([name])}"] for name in data_sets}


def _options_of_paper(options: Sequence[str], rotation: tuple[Paper, str]) -> dict[str, list[str]]:
    paper, name = rotation
    without, _ = take_values(options, "--paper")
    return {data_set: [f"--paper={paper.key}/{row}", *without] for data_set, row in paper.rotations[name].items()}


def table_of_rotation(paper: Paper, name: str) -> str:
    """Return PAPER/TABLE: the table of left-out data sets in which the row is printed; else one with its columns."""
    runs = set(paper.runs_of(name))
    tables = [table for table in paper.tables if table.left_out]
    printed = [table for table in tables if any(runs & {*row.runs} for row in table.rows)]
    whole = [table for table in tables if set(paper.rotations[name]) <= {*table.test_sets}]
    return f"{paper.key}/{(printed or whole)[0].name}"
