"""From scores of single models on single data sets to named metrics; and scores of single queries as a small file.

That file is the source of a report's CMC curves and intervals.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from fedsim.core.files import replacing
from fedsim.core.metrics import METRICS
from fedsim.core.names import metric_name, metric_parts
from fedsim.evaluation.ranking import Floats, Ints

SplitName = Literal["val", "test"]
Kind = Literal["global", "local", "personalised", "ensemble"]

Curve = tuple[SplitName, Kind, str]
"""Split, kind of model, domain."""

MAX_NAMES = 50
"""Largest number of clients or data sets with curves of their own in loggers."""
MAX_LISTED = 1000
"""Largest number of clients or test sets that a run lists by name in its summary and its description."""


class ScoreRow(NamedTuple):
    """One model on one set of queries and gallery images."""

    kind: Kind
    domain: str
    client: str | None
    """owner of the model; None: the global model of :attr:`arch`, or all clients' models (``ensemble``)"""
    arch: str
    owner: int
    """the rank that owns the client, or writes the files"""


def summarise(
    split: str,
    rows: list[ScoreRow],
    values: list[NDArray[np.float64]],
    unseen: Set[str],
    primary: Kind,
    num_clients: int,
    names: Sequence[str] = METRICS,
) -> dict[str, float]:
    """Name the scores ``values`` of the models ``rows``, per row [trials, metrics], and add means.

    The result has ``split/kind/domain/metric`` -> fraction of 1, and ``metric_std`` if there are several trials, the
    random splits of one data set. ``domain`` is also ``seen`` and ``unseen``, the means over those; ``unseen`` domains
    have no client. ``split/metric`` is the ``primary`` (delivered) model's mean over seen domains. If several
    clients' models are scored on an unseen domain, ``split/kind/domain`` is their mean, and
    ``split/kind/domain/client`` has each, as long as these are at most ``MAX_NAMES``. A slash in a name becomes
    ``%2F``. The federation has ``num_clients``; ``names`` are those of the metrics.
    """
    metrics: dict[str, float] = {}
    single = [i for i, row in enumerate(rows) if row.client is not None and row.domain in unseen]
    for i in single if len(single) <= MAX_NAMES else ():
        row = rows[i]
        metrics |= _named(metric_name(split, row.kind, row.domain, row.client or ""), values[i].mean(axis=0), names)
    for model_kind in get_args(Kind):
        clients = {row.client for row in rows if row.kind == model_kind}
        means: dict[str, NDArray[np.float64]] = {}
        for domain in dict.fromkeys(row.domain for row in rows if row.kind == model_kind):
            members = [
                v for row, v in zip(rows, values, strict=True) if row.kind == model_kind and row.domain == domain
            ]
            trials = np.mean(members, axis=0)  # over clients
            means[domain] = trials.mean(axis=0)
            if len(trials) > 1:
                metrics |= _named(metric_name(split, model_kind, domain), trials.std(axis=0, ddof=1), names, "_std")
        # no mean over the local models of a sample of clients: means of other kinds are over all clients
        if not (model_kind == "local" and len(clients) < num_clients):
            means |= _means_over_domains(means, unseen)
        for domain, mean in means.items():
            metrics |= _named(metric_name(split, model_kind, domain), mean, names)
    seen = f"{split}/{primary}/seen"
    return metrics | {f"{split}/{m}": metrics[f"{seen}/{m}"] for m in names if f"{seen}/{m}" in metrics}


def score_rows(scores: Mapping[str, float]) -> list[dict[str, str | float]]:
    """Return the scores of :func:`summarise` as a table: a row per split, kind of model and data set.

    >>> score_rows({"test/global/town0/mAP": 0.5, "test/global/town0/rank1": 0.6, "test/mAP": 0.5})
    [{'split': 'test', 'model': 'global', 'data set': 'town0', 'mAP': 0.5, 'rank1': 0.6}]
    """
    rows: dict[tuple[str, ...], dict[str, str | float]] = {}
    for key, value in scores.items():
        if key.count("/") == 3 and key.startswith(("val/", "test/")):
            *titles, metric = metric_parts(key)
            row = rows.setdefault(tuple(titles), dict(zip(("split", "model", "data set"), titles, strict=True)))
            row[metric] = value
    return list(rows.values())


def few_names(scores: Mapping[str, float]) -> dict[str, float]:
    """Return the scores of :func:`summarise`, without single data sets if there are more than MAX_NAMES."""
    domains = {key.split("/")[2] for key in scores if key.count("/") == 3} - {"seen", "unseen"}
    if len(domains) <= MAX_NAMES:
        return dict(scores)
    return {key: value for key, value in scores.items() if key.count("/") < 3 or key.split("/")[2] not in domains}


def _means_over_domains(scores: dict[str, NDArray[np.float64]], unseen: Set[str]) -> dict[str, NDArray[np.float64]]:
    groups: dict[str, list[NDArray[np.float64]]] = {"seen": [], "unseen": []}
    for domain, score in scores.items():
        groups["unseen" if domain in unseen else "seen"].append(score)
    return {name: np.mean(members, axis=0) for name, members in groups.items() if members}


def _named(prefix: str, scores: NDArray[np.float64], names: Sequence[str], suffix: str = "") -> dict[str, float]:
    return {f"{prefix}/{metric}{suffix}": float(value) for metric, value in zip(names, scores, strict=True)}


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
