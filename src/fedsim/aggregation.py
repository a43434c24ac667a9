"""From uploads to their weighted means: the sums of a round."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from fedsim.core.exact import GRID, MAX_MAGNITUDE, accumulate
from fedsim.method import Method, Report, Upload
from fedsim.server import BatchNormStatistics
from fedsim.strategy import FederatedStrategy

__all__ = ["Aggregator", "aggregation_weights"]


def aggregation_weights(
    method: Method, reports: Mapping[str, Report], archs: Mapping[str, str]
) -> dict[str, dict[str, float]]:
    """Ask the method for weights, separately for the clients of each architecture.

    Args:
        method: decides.
        reports: client -> report, of the clients that returned an update.
        archs: client -> architecture.

    Returns:
        architecture -> client -> weight; architectures that nobody trained are missing.

    Raises:
        AssertionError: if a method's weights do not sum to 1: the model would shrink or grow each round.
    """
    result: dict[str, dict[str, float]] = {}
    for arch in sorted({archs[name] for name in reports}):
        members = {name: report for name, report in reports.items() if archs[name] == arch}
        weights = method.weights(members)
        assert weights.keys() == members.keys(), f"{type(method).__name__}.weights must weigh exactly {list(members)}"
        assert min(weights.values()) >= 0, f"{type(method).__name__}.weights returned a negative weight: {weights}"
        assert abs(sum(weights.values()) - 1) < 1e-9, f"{type(method).__name__}.weights do not sum to 1: {weights}"
        result[arch] = weights
    return result


class Aggregator:
    """Sums what clients upload, into one buffer per architecture that lives as long as the federation.

    Where weights are known when a round begins, each upload is added at once. Otherwise uploads wait in host memory.
    Both give the same bits: the sums run over a rank's clients in the order in which they trained.

    Args:
        strategy: the collectives.
        statistics: by architecture.
        archs: client -> architecture, for all clients.
        reduction: exact, or plain fp32.
        device: where sums are made.
        seed: of the run.
    """

    def __init__(
        self,
        strategy: FederatedStrategy,
        statistics: Mapping[str, BatchNormStatistics],
        archs: Mapping[str, str],
        reduction: Literal["exact", "fp32"],
        device: torch.device,
        seed: int,
    ) -> None:
        self.strategy = strategy
        self.statistics = statistics
        self.archs = archs
        self.is_exact = reduction == "exact"
        self.seed = seed
        dtype = torch.float64 if self.is_exact else torch.float32
        self._totals = {a: torch.zeros(s.num_shared, dtype=dtype, device=device) for a, s in statistics.items()}
        self._waiting: dict[str, Tensor] = {}
        self._weights: Mapping[str, Mapping[str, float]] | None = None

    @property
    def limit(self) -> float:
        """Largest value that a contribution may hold."""
        return MAX_MAGNITUDE if self.is_exact else math.inf

    def begin(self, round_: int, weights: Mapping[str, Mapping[str, float]] | None = None) -> None:
        """Empty the sums.

        Args:
            round_: from 0.
            weights: architecture -> client -> weight, for all ranks' clients, if they are known already.
        """
        self.round = round_
        self._weights = weights
        self._waiting = {}
        for total in self._totals.values():
            total.zero_()

    def encode(self, client: str, upload: Upload) -> Tensor:
        """Return what a client adds to the sums [num_shared]: its upload, or a changed copy of it."""
        return self.statistics[self.archs[client]].encode(upload.vector)

    def add(self, client: str, contribution: Tensor) -> None:
        """Take a client's encoded upload [num_shared], all of whose values are within :attr:`limit`."""
        if self._weights is None:
            self._waiting[client] = contribution.to("cpu", copy=True)
        else:
            self._sum(client, contribution, self._weights[self.archs[client]])

    def means(self, weights: Mapping[str, Mapping[str, float]]) -> dict[str, Tensor]:
        """Return the weighted mean of the uploads of each architecture, float32 [num_shared]: one collective for each.

        Args:
            weights: architecture -> client -> weight, for all ranks' clients.
        """
        assert self._weights in (None, weights), "weights changed after uploads were summed with them"
        for client, contribution in self._waiting.items():
            self._sum(client, contribution.to(self._totals[self.archs[client]].device), weights[self.archs[client]])
        self._waiting = {}
        return {arch: self._mean(arch) for arch in sorted(weights)}

    def _sum(self, client: str, x: Tensor, weights: Mapping[str, float]) -> None:
        statistics, total = self.statistics[self.archs[client]], self._totals[self.archs[client]]
        own = statistics.weight(client, weights, self.seed, self.round)
        # one stretch if statistics have no weight of their own
        stretches = [(slice(None), weights[client])]
        if own != weights[client]:
            stretches = [(slice(statistics.span.start), weights[client]), (statistics.span, own)]
        for span, weight in stretches:
            if self.is_exact:
                accumulate(total[span], weight, x[span])
            else:
                total[span].add_(x[span], alpha=weight)

    def _mean(self, arch: str) -> Tensor:
        total = self.strategy.sum_(self._totals[arch])
        return self.statistics[arch].decode(total.div_(GRID) if self.is_exact else total).to(torch.float32)
