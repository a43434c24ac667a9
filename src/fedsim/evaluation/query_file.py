"""Scores of single queries as a small file, from which a report draws CMC curves and intervals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedsim.core.files import replacing
from fedsim.evaluation.ranking import Floats, Ints
from fedsim.evaluation.summary import MAX_NAMES, Curve


@dataclass(frozen=True)
class QueryResults:
    """Scores of one kind of model on the Q queries of one data set; of several random splits, one after the other."""

    scores: Mapping[str, Floats]
    """mAP, mAP_trapezoid, rank1 (or top1) -> [Q] fractions of 1; NaN where a query does not count. Of several clients'
    own models on the same queries, their mean"""
    pids: Ints
    """[Q] identity"""
    splits: tuple[int, ...]
    """number of queries of each split; one number where there is one split"""
    cmc: tuple[float, ...]
    """share of queries whose first match is among the first 1, 2, ... images; empty for classification"""


def mean_results(members: list[QueryResults]) -> QueryResults:
    """Return the mean over several models' results on the same queries."""
    first = members[0]
    if len(members) == 1:
        return first
    scores = {name: np.mean([one.scores[name] for one in members], axis=0) for name in first.scores}
    return QueryResults(scores, first.pids, first.splits, tuple(np.mean([one.cmc for one in members], axis=0).tolist()))


def write_queries(path: Path, results: Mapping[Curve, QueryResults], round_: int) -> None:
    """Write the results on test sets, of round ``round_`` from 1; nothing where there are none, or very many sets.

    Arrays of the npz file, K a kind of model and S a test set: ``round`` (int); ``K/S/mAP``, ``K/S/mAP_trapezoid``,
    ``K/S/rank1`` or ``K/S/top1`` (float32 [Q]), ``K/S/cmc`` (float64 [ranks]); ``S/pids`` (int64 [Q]) and ``S/splits``
    (int64 [number of splits]).
    """
    of_tests = {(kind, name): found for (split, kind, name), found in results.items() if split == "test"}
    if not of_tests or len({name for _, name in of_tests}) > MAX_NAMES:
        path.unlink(missing_ok=True)  # of an earlier evaluation
        return
    arrays: dict[str, np.ndarray] = {"round": np.array(round_)}
    for (kind, name), found in of_tests.items():
        arrays |= {f"{kind}/{name}/{metric}": values.astype(np.float32) for metric, values in found.scores.items()}
        arrays[f"{kind}/{name}/cmc"] = np.array(found.cmc)
        arrays |= {f"{name}/pids": found.pids, f"{name}/splits": np.array(found.splits, dtype=np.int64)}
    with replacing(path) as partial, partial.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)
