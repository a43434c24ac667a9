"""Weights of answers to older models: plain numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping


def polynomial(staleness: int, a: float) -> float:
    """Return the factor ``(1 + s) ** -a`` of an answer that is ``staleness`` s steps of the server old.

    >>> polynomial(3, 0.5)
    0.5
    """
    factor: float = (1.0 + staleness) ** -a
    return factor


def hinge(staleness: int, a: float, b: int) -> float:
    """Return the factor 1 up to a ``staleness`` s of b, and ``1 / (a (s - b) + 1)`` beyond (Xie et al., 2019).

    >>> [hinge(s, 10.0, 4) for s in (0, 4, 5)] == [1.0, 1.0, 1 / 11]
    True
    """
    return 1.0 if staleness <= b else 1 / (a * (staleness - b) + 1)


def discounted(weights: Mapping[str, float], discounts: Mapping[str, float]) -> dict[str, float]:
    """Multiply weights p by discounts s, and normalise: p s / sum(p s).

    >>> discounted({"a": 0.5, "b": 0.5}, {"a": 1.0, "b": 0.5})
    {'a': 0.6666666666666666, 'b': 0.3333333333333333}
    """
    products = {client: weight * discounts[client] for client, weight in weights.items()}
    total = math.fsum(products.values())
    return {client: product / total for client, product in products.items()}


def step_of(weights: Mapping[str, float], discounts: Mapping[str, float]) -> float:
    """Return the mean discount sum(p s) of the weights p from which :func:`discounted` has made ``weights``.

    >>> step_of({"a": 2 / 3, "b": 1 / 3}, {"a": 1.0, "b": 0.5})
    0.75
    """
    return 1 / math.fsum(weight / discounts[client] for client, weight in weights.items())
