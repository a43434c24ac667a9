"""The metrics of a model on a data set, and the order of scores.

A rank that is added to ``RANKS`` is one in all scores, files and reports.
"""

from __future__ import annotations

import math

RANKS = (1, 5, 10)
"""ranks k of a CMC curve whose shares are metrics: queries with a match among the first k images"""
OF_RANKS = {rank: f"rank{rank}" for rank in RANKS}
OF_PRECISION = ("mAP", "mAP_trapezoid", "mINP")
METRICS = (*OF_RANKS.values(), *OF_PRECISION)
"""of retrieval"""
ACCURACIES = ("top1",)
"""of classification"""
METRICS_OF = {"retrieval": METRICS, "classification": ACCURACIES}
"""task -> names of its metrics"""
MEANS = ("seen", "unseen")
"""means over the test sets on which clients train, and over all others, beside the names of test sets"""
KINDS = ("global", "local", "personalised", "ensemble")
"""kinds of models, in the order of tables"""
LABELS = {**{name: f"rank-{rank}" for rank, name in OF_RANKS.items()}, "top1": "top-1"}
"""metric -> its name in tables and pictures, if that is another"""


def comparable(score: float) -> float:
    """Return a score to choose by: one that is not a number, of a model that has diverged, is below all others.

    Without it ``max`` and ``min`` choose by the place of the NaN.

    >>> max([math.nan, 0.2, 0.1], key=comparable)
    0.2
    """
    return -math.inf if math.isnan(score) else score


def score_text(score: float | None) -> str:
    """Write a score of a trial as a table shows it.

    >>> score_text(0.25), score_text(math.nan), score_text(None)
    ('0.2500', 'diverged', '-')
    """
    return "-" if score is None else "diverged" if math.isnan(score) else f"{score:.4f}"
