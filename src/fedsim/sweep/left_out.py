"""``fedsim sweep --left_out a b --seeds 0 1``: a grid of methods without each data set, and one page of all runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fedsim.core.checks import SEED
from fedsim.core.errors import ConfigError
from fedsim.core.names import check_name
from fedsim.report import report
from fedsim.report.leave_one_out import UNSEEN
from fedsim.sweep.local import Result, label_of, options_that_differ
from fedsim.sweep.sampling import Parameter, Sample, Sweep

__all__ = ["UNSEEN", "repeated", "repetitions", "report_left_out"]

_SEED = "seed_everything"


def repeated(sweep: Sweep, left_out: Sequence[str], seeds: Sequence[int]) -> Sweep:
    """Return a sweep each of whose runs leaves out each data set, with each seed; they replace those of the sweep.

    Without both the sweep is returned as it is.

    Raises:
        ConfigError: if a value is wrong or given twice, or the sweep is no grid.
    """
    grids: dict[str, tuple[Any, ...]] = {}
    for option, name, values in (("--left_out", UNSEEN, left_out), ("--seeds", _SEED, seeds)):
        for value in values:
            if values.count(value) > 1:
                raise ConfigError(f"{option}: {value} is given twice; give it once")
        if values and (sweep.method != "grid" or sweep.is_search):
            raise ConfigError(f"{option}: {sweep.name} chooses its runs, and cannot repeat them; give a plain grid")
        if values:
            grids[name] = tuple([value] if name == UNSEEN else value for value in values)
    for value in left_out:
        check_name(value, "--left_out")
    for seed in seeds:
        SEED.check(seed, "--seeds")
    parameters = {name: Parameter(distribution="categorical", values=values) for name, values in grids.items()}
    return replace(sweep, parameters={**sweep.parameters, **parameters})


def repetitions(sweep: Sweep, left_out: Sequence[str], seeds: Sequence[int]) -> dict[str, dict[str, list[Any]]]:
    """Return the parameters of a sweep file by which a sweep of :func:`repeated` has other values than its file."""
    names = [*([UNSEEN] if left_out else []), *([_SEED] if seeds else [])]
    return {name: {"values": [*sweep.parameters[name].values]} for name in names}


def report_left_out(results: Sequence[Result], page: str | None) -> str:
    """Return the tables of ``fedsim report --left_out`` for finished runs; empty if they leave out one set or none.

    Methods have the names of the settings in which they differ, and several seeds are compared with the first method.

    Args:
        results: the runs, those of the first method first.
        page: file of the same page as HTML.
    """
    differing = options_that_differ(results)
    if UNSEEN not in differing:
        return ""
    shown = [name for name in differing if name not in (UNSEEN, _SEED)]
    labels = labels_of([result.run.sample for result in results], shown)
    runs = [f"{label}={result.run.folder}" if label else str(result.run.folder)
            for label, result in zip(labels, results, strict=True)]  # fmt: skip
    return report(runs, left_out=True, significance=_SEED in differing, html=page)


def labels_of(samples: Sequence[Sample], shown: Sequence[str]) -> list[str]:
    """Return a name for each run by its settings ``shown``; of different settings, names differ."""
    labels = [label_of(sample, shown) for sample in samples]
    if len(set(labels)) < len({str([sample[name] for name in shown]) for sample in samples}):
        labels = [" ".join(f"{name}={sample[name]}" for name in shown) for sample in samples]
    return [re.sub("[=/]", " ", label) for label in labels]  # signs of NAME=FOLDER
