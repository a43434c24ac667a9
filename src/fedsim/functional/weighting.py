"""Aggregation weights of the K clients that returned an update. All sums are in float64 and in client order."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["normalise", "size_weights", "uniform_weights"]


def normalise(raw: Mapping[str, float]) -> dict[str, float]:
    """Divide by the sum, so that the weights sum to 1. All zero: uniform, so that no round is lost.

    Args:
        raw: client -> non-negative weight.

    Raises:
        ValueError: if a weight is negative or not finite.

    >>> normalise({"a": 1, "b": 3})
    {'a': 0.25, 'b': 0.75}
    """
    for client, weight in raw.items():
        if not 0.0 <= weight < float("inf"):
            raise ValueError(f"client {client}: the aggregation weight {weight} is not a finite number >= 0")
    total = sum(raw[client] for client in raw)
    if total == float("inf"):
        raise ValueError("the aggregation weights are too large to be added")
    if total == 0:
        return uniform_weights(raw)
    return {client: weight / total for client, weight in raw.items()}


def size_weights(num_images: Mapping[str, float]) -> dict[str, float]:
    """FedAvg's weights ``n_k / sum_{j in C_t} n_j`` (McMahan et al., AISTATS 2017, Algorithm 1)."""
    return normalise(num_images)


def uniform_weights(clients: Mapping[str, object]) -> dict[str, float]:
    """``1 / K``.

    >>> uniform_weights({"a": 10, "b": 30})
    {'a': 0.5, 'b': 0.5}
    """
    return {client: 1.0 / len(clients) for client in clients}
