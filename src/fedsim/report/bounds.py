"""Bounds of mean average precision for a given CMC: a check of published numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Literal, NamedTuple


class Interval(NamedTuple):
    """A closed interval, in percent."""

    low: float
    high: float

    def holds(self, value: float, tolerance: float = 0.0) -> bool:
        """Return whether ``value`` is inside, up to ``tolerance``."""
        return self.low - tolerance <= value <= self.high + tolerance


def one_match_bounds(
    cmc: Mapping[int, float], definition: Literal["rectangular", "trapezoid"] = "rectangular", gallery: float = math.inf
) -> Interval:
    """Return the interval in which mAP lies when every query has one match.

    A match at rank r has the average precision 1 / r (trapezoid: 1 / (2 r), and 1 for r = 1). The CMC gives the
    number of matches between two ranks. For ranks 1, 5 and 10, rectangular, in an infinite gallery:
    ``R1 + (R5 - R1) / 5 + (R10 - R5) / 10 <= mAP <= R1 + (R5 - R1) / 2 + (R10 - R5) / 6 + (100 - R10) / 11``.
    This also holds for means over several splits or rounds.

    ``cmc`` is rank -> share of the queries with their match up to this rank, in percent; it must contain rank 1.
    ``gallery`` is the number of gallery images, the last rank.

    >>> one_match_bounds({1: 50.0, 5: 60.0, 10: 70.0})
    Interval(low=53.0, high=59.39393939393939)
    """
    factor = 1.0 if definition == "rectangular" else 0.5
    points: list[tuple[float, float]] = [*sorted(cmc.items()), (gallery, 100.0)]
    low = high = cmc[1]
    for (rank, share), (next_rank, next_share) in pairwise(points):
        low += factor * (next_share - share) / next_rank  # all these matches at the last rank
        high += factor * (next_share - share) / (rank + 1)  # all at the first rank
    return Interval(low, high)
