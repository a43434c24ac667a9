"""From scores of single models on single data sets to named metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

__all__ = ["ACCURACIES", "MAX_NAMES", "METRICS", "METRICS_OF", "Curve", "Kind", "Row", "few_names", "summarise"]

Kind = Literal["global", "local", "personalised", "ensemble"]

Curve = tuple[Literal["val", "test"], Kind, str]
"""Split, kind of model, domain."""

METRICS = ("rank1", "rank5", "rank10", "mAP", "mAP_trapezoid", "mINP")

ACCURACIES = ("top1",)
"""Metrics of classification."""

METRICS_OF: dict[str, tuple[str, ...]] = {"retrieval": METRICS, "classification": ACCURACIES}
"""Task -> what models are scored by."""

MAX_NAMES = 50
"""Clients or data sets that loggers hear of by name; more curves than this are no help to anybody."""


class Row(NamedTuple):
    """One model on one query/gallery set."""

    kind: Kind
    domain: str
    client: str | None
    """whose model; None: the global model of :attr:`arch`, or all clients' (``ensemble``)"""
    arch: str
    owner: int
    """the rank that hosts the client, or writes the files"""


def summarise(
    split: str,
    rows: list[Row],
    values: list[NDArray[np.float64]],
    unseen: Set[str],
    primary: Kind,
    num_clients: int,
    names: Sequence[str] = METRICS,
) -> dict[str, float]:
    """Name the scores, and add means.

    Args:
        split: ``val`` or ``test``.
        rows: what was scored.
        values: per row [trials, metrics]; several trials are random splits of one data set.
        unseen: domains on which nobody trains.
        primary: the kind of model that the method delivers.
        num_clients: of the federation.
        names: of the metrics.

    Returns:
        ``split/kind/domain/metric`` -> fraction of 1, with ``metric_std`` beside it where there are several random
        splits; ``domain`` is also ``seen`` and ``unseen``; and ``split/metric``, the primary model's mean over seen
        domains.
    """
    metrics: dict[str, float] = {}
    for kind in get_args(Kind):
        clients = {row.client for row in rows if row.kind == kind}
        means: dict[str, NDArray[np.float64]] = {}
        for domain in dict.fromkeys(row.domain for row in rows if row.kind == kind):
            same = [v for row, v in zip(rows, values, strict=True) if row.kind == kind and row.domain == domain]
            trials = np.mean(same, axis=0)  # over clients
            means[domain] = trials.mean(axis=0)
            if len(trials) > 1:
                metrics |= _named(f"{split}/{kind}/{domain}", trials.std(axis=0, ddof=1), names, "_std")
        # a mean over the local models of a sample of clients would stand beside means over all of them
        if not (kind == "local" and len(clients) < num_clients):
            means |= _means_over_domains(means, unseen)
        for domain, mean in means.items():
            metrics |= _named(f"{split}/{kind}/{domain}", mean, names)
    seen = f"{split}/{primary}/seen"
    return metrics | {f"{split}/{m}": metrics[f"{seen}/{m}"] for m in names if f"{seen}/{m}" in metrics}


def few_names(scores: Mapping[str, float]) -> dict[str, float]:
    """Return the scores that are worth a curve each: without single data sets, if those are more than MAX_NAMES.

    Args:
        scores: see :func:`summarise`.
    """
    domains = {key.split("/")[2] for key in scores if key.count("/") == 3} - {"seen", "unseen"}
    if len(domains) <= MAX_NAMES:
        return dict(scores)
    return {key: value for key, value in scores.items() if key.count("/") < 3 or key.split("/")[2] not in domains}


def _means_over_domains(scores: dict[str, NDArray[np.float64]], unseen: Set[str]) -> dict[str, NDArray[np.float64]]:
    groups = {"seen": [s for d, s in scores.items() if d not in unseen],
              "unseen": [s for d, s in scores.items() if d in unseen]}  # fmt: skip
    return {name: np.mean(members, axis=0) for name, members in groups.items() if members}


def _named(prefix: str, scores: NDArray[np.float64], names: Sequence[str], suffix: str = "") -> dict[str, float]:
    return {f"{prefix}/{metric}{suffix}": float(value) for metric, value in zip(names, scores, strict=True)}
