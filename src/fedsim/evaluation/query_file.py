"""Scores of single queries as a small file: the source of a report's CMC curves and intervals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedsim.core.files import replacing
from fedsim.core.names import metric_name
from fedsim.evaluation.ranking import Floats, Ints
from fedsim.evaluation.summary import MAX_NAMES, Curve


@dataclass(frozen=True)
class QueryResults:
    """Scores of one kind of model on the Q queries of one data set; of several random splits, one after the other."""

    scores: Mapping[str, Floats]
    """mAP, mAP_trapezoid, rank1 (or top1) -> [Q] fractions of 1; NaN for a query that does not count. Of several
    clients' models on the same queries, their mean"""
    pids: Ints
    """[Q] identity"""
    splits: tuple[int, ...]
    """number of queries of each split"""
    cmc: tuple[float, ...]
    """share of queries whose first match is among the first 1, 2, ... images; empty for classification"""


def mean_results(members: list[QueryResults]) -> QueryResults:
    """Return the mean over several models' results on the same queries."""
    first = members[0]
    if len(members) == 1:
        return first
    scores = {name: np.mean([member.scores[name] for member in members], axis=0) for name in first.scores}
    cmc = np.mean([member.cmc for member in members], axis=0)
    return QueryResults(scores, first.pids, first.splits, tuple(cmc.tolist()))


def write_queries(path: Path, results: Mapping[Curve, QueryResults], round_: int) -> None:
    """Write the results on test sets, of round ``round_`` from 1; no file if there are no test sets, or very many.

    Arrays of the npz file, K a kind of model and S a test set: ``round`` (int); ``K/S/mAP``, ``K/S/mAP_trapezoid``,
    ``K/S/rank1`` or ``K/S/top1`` (float32 [Q]), ``K/S/cmc`` (float64 [ranks]); ``S/pids`` (int64 [Q]) and ``S/splits``
    (int64 [number of splits]). A slash in a name is ``%2F``.
    """
    of_tests = {(model_kind, name): of_set for (split, model_kind, name), of_set in results.items() if split == "test"}
    if not of_tests or len({name for _, name in of_tests}) > MAX_NAMES:
        path.unlink(missing_ok=True)  # of an earlier evaluation
        return
    arrays: dict[str, np.ndarray] = {"round": np.array(round_)}
    for (model_kind, name), of_set in of_tests.items():
        arrays |= {
            metric_name(model_kind, name, metric): values.astype(np.float32) for metric, values in of_set.scores.items()
        }
        arrays[metric_name(model_kind, name, "cmc")] = np.array(of_set.cmc)
        splits = np.array(of_set.splits, dtype=np.int64)
        arrays |= {metric_name(name, "pids"): of_set.pids, metric_name(name, "splits"): splits}
    with replacing(path) as partial, partial.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)
