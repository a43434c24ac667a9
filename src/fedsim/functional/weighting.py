"""Aggregation weights of the K clients that returned an update. Sums are in float64, in client order."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence


def normalise(raw: Mapping[str, float]) -> dict[str, float]:
    """Divide weights by their sum; if all are zero, return uniform ones, so that no round is lost.

    Weights of clients are at least 0. Raise ValueError if a weight or the sum is negative or not finite.

    >>> normalise({"a": 1, "b": 3})
    {'a': 0.25, 'b': 0.75}
    """
    for client, weight in raw.items():
        if not 0.0 <= weight < math.inf:
            raise ValueError(f"client {client}: the aggregation weight {weight} is not a finite number >= 0")
    total = sum(raw.values())
    if total == math.inf:
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


def klpwa_weights(
    divergences: Mapping[str, float], pruned: Mapping[str, float], alpha: float = 0.5
) -> dict[str, float]:
    """KL-divergence- and pruning-weighted aggregation (FedKLPR, paper 004, Eqs. 10 to 13).

    ``w_k = alpha kl_k / sum_j kl_j + (1 - alpha) PR_k^2 / sum_j PR_j^2``; before the first pruning, the first quotient.
    kl_k >= 0 is the change of client k's feature distribution, PR_k the pruned share of its prunable weights. The
    paper's beta is 1 - alpha; it gives neither value.

    >>> klpwa_weights({"a": 1.0, "b": 3.0}, {"a": 0.6, "b": 0.2})
    {'a': 0.575, 'b': 0.425}
    >>> klpwa_weights({"a": 1.0, "b": 3.0}, {"a": 0.0, "b": 0.0})
    {'a': 0.25, 'b': 0.75}
    """
    klaw = normalise(divergences)
    if not any(pruned.values()):
        return klaw
    praw = normalise({client: ratio**2 for client, ratio in pruned.items()})
    return {client: alpha * klaw[client] + (1 - alpha) * praw[client] for client in divergences}


def softmax_weights(signals: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Softmax over the clients, for each of L tensors: ``exp(s_k) / sum_j exp(s_j)``; the signals are finite.

    >>> softmax_weights({"a": [0.0, 0.0], "b": [0.0, math.log(3)]})
    {'a': [0.5, 0.25], 'b': [0.5, 0.75]}
    """
    largest = [max(column) for column in zip(*signals.values(), strict=True)]
    raw = {k: [math.exp(s - top) for s, top in zip(values, largest, strict=True)] for k, values in signals.items()}
    totals = [sum(column) for column in zip(*raw.values(), strict=True)]
    return {client: [x / total for x, total in zip(values, totals, strict=True)] for client, values in raw.items()}


def sgd_normaliser(num_steps: int, momentum: float = 0.0, nesterov: bool = False) -> float:
    """Return ``||a||_1``, the sum of the factors of all gradients in an SGD run (FedNova: Wang et al., NeurIPS 2020).

    Step s moves by ``sum_j rho^(s - j) g_j``, so the factor of gradient j is ``(1 - rho^(tau - j)) / (1 - rho)``.
    Nesterov's variant, not in the paper, looks a step ahead: ``(1 - rho^(tau - j + 1)) / (1 - rho)``. tau is
    ``num_steps``, rho in [0, 1) is the momentum.

    >>> sgd_normaliser(3), sgd_normaliser(2, momentum=0.5), sgd_normaliser(2, momentum=0.5, nesterov=True)
    (3.0, 2.5, 3.25)
    """
    lag = momentum ** (2 if nesterov else 1)
    return (num_steps - lag * (1 - momentum**num_steps) / (1 - momentum)) / (1 - momentum)
