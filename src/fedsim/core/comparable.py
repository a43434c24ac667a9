"""The order of scores by which something is chosen."""

from __future__ import annotations

import math


def comparable(score: float) -> float:
    """Return a score to choose by: one that is not a number, of a model that has diverged, is below all others.

    Without it ``max`` and ``min`` choose by the place of the NaN.

    >>> max([math.nan, 0.2, 0.1], key=comparable)
    0.2
    """
    return -math.inf if math.isnan(score) else score
