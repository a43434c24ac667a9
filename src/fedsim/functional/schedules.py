"""Learning rates as functions of the round, so that no state has to be saved or resumed."""

from __future__ import annotations

import math
from collections.abc import Sequence


def step_factor(round_: int, step: int, gamma: float) -> float:
    """``gamma ** floor(t / step)`` for the global round t = 0, 1, ...

    >>> [step_factor(t, step=40, gamma=0.5) for t in (0, 39, 40, 80)]
    [1.0, 1.0, 0.5, 0.25]
    """
    return float(gamma ** (round_ // step))


def milestone_factor(round_: int, milestones: Sequence[int], gamma: float) -> float:
    """``gamma ** k``, k the number of ``milestones`` that the global round t = 0, 1, ... has reached.

    >>> [milestone_factor(t, milestones=(40, 70), gamma=0.5) for t in (0, 39, 40, 70, 200)]
    [1.0, 1.0, 0.5, 0.25, 0.25]
    """
    return float(gamma ** sum(round_ >= milestone for milestone in milestones))


def cosine_factor(round_: int, num_rounds: int) -> float:
    """Half a cosine from 1 at round 0 towards 0 at ``num_rounds`` (Loshchilov and Hutter, ICLR 2017), then 0.

    >>> round(cosine_factor(5, 10), 6)
    0.5
    """
    return 0.5 * (1 + math.cos(math.pi * min(round_ / num_rounds, 1.0)))


def warmup_factor(round_: int, num_rounds: int, start: float) -> float:
    """Linear from ``start`` at round 0 to 1 at ``num_rounds`` (Goyal et al., 2017), then 1.

    >>> [warmup_factor(t, num_rounds=4, start=0.0) for t in (0, 2, 4, 9)]
    [0.0, 0.5, 1.0, 1.0]
    """
    if round_ >= num_rounds:
        return 1.0
    return start + (1 - start) * round_ / num_rounds
