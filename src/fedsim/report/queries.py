"""Scores of single queries, as ``fedsim.evaluation.query_file`` writes them; read without torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedsim.core.errors import DataError

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Queries:
    """One kind of model on the Q queries of one test set."""

    scores: dict[str, Floats]
    """metric -> [Q] fractions of 1; NaN if a query does not count"""
    pids: NDArray[np.int64]
    """[Q] identity"""
    num_splits: int
    """number of random splits; their queries are concatenated"""
    cmc: Floats
    """[ranks] share of queries with a match among the first 1, 2, ... images; empty for classification"""


@dataclass(frozen=True, eq=False)
class QueryFile:
    """All kinds of models and test sets of one evaluation."""

    round_: int
    """from 1"""
    results: dict[str, Queries]
    """``kind/set`` -> results"""


def read_queries(path: Path) -> QueryFile | None:
    """Read a file of single queries' scores; return None without a file; raise DataError if it cannot be read."""
    if not path.is_file():
        return None
    try:
        with np.load(path) as file:  # never a pickle: that is numpy's default
            arrays = {name: file[name] for name in file.files}
        results = {}
        for name in arrays:
            model, _, last = name.rpartition("/")
            if last == "cmc":
                of_set = model.partition("/")[2]
                scores = {
                    metric: arrays[f"{model}/{metric}"].astype(np.float64)
                    for metric in ("mAP", "mAP_trapezoid", "rank1", "top1")
                    if f"{model}/{metric}" in arrays
                }
                splits = len(arrays[f"{of_set}/splits"])
                results[model] = Queries(scores, arrays[f"{of_set}/pids"], splits, arrays[name].astype(np.float64))
                _check(results[model], model)
        return QueryFile(int(arrays["round"]), results)
    except Exception as error:  # numpy's and zip's readers raise many types for damaged files
        raise DataError(f"{path}: cannot be read ({error}); remove it, or evaluate again") from error


def _check(queries: Queries, name: str) -> None:
    """Raise ValueError if the arrays of one test set do not fit together."""
    if queries.pids.ndim != 1 or queries.pids.dtype.kind not in "iu" or queries.cmc.ndim != 1:
        raise ValueError(f"{name} has arrays of another shape or type")
    if not queries.scores or any(scores.shape != queries.pids.shape for scores in queries.scores.values()):
        raise ValueError(f"{name} has other numbers of scores than of queries")
