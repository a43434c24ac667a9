"""From uploads to their weighted means: the sums of a round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedsim.core.errors import TrainingError
from fedsim.core.exact import MAX_MAGNITUDE, accumulate
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


@dataclass(frozen=True)
class Aggregator:
    """Sums uploads over all clients of all ranks, one collective per architecture, in a fixed order."""

    strategy: FederatedStrategy
    statistics: Mapping[str, BatchNormStatistics]
    """by architecture"""
    sizes: Mapping[str, int]
    """architecture -> length of its shared vector"""
    reduction: Literal["exact", "fp32"]
    device: torch.device
    seed: int

    def means(
        self, round_: int, uploads: Mapping[str, Upload], weights: Mapping[str, Mapping[str, float]]
    ) -> dict[str, Tensor]:
        """Return the weighted mean of the uploads of each architecture, float32 [num_shared].

        Args:
            round_: from 0.
            uploads: of this rank's clients.
            weights: architecture -> client -> weight, for all ranks' clients.

        Raises:
            TrainingError: if a client's values leave the exact range.
            PeerError: if that happened on another rank.
        """
        totals: dict[str, Tensor] = {}
        with self.strategy.together():
            for arch in sorted(weights):
                totals[arch] = self._sum_hosted(arch, round_, uploads, weights[arch])
        return {
            arch: self.statistics[arch].decode(self.strategy.sum_(total)).to(torch.float32)
            for arch, total in totals.items()
        }

    def _sum_hosted(
        self, arch: str, round_: int, uploads: Mapping[str, Upload], weights: Mapping[str, float]
    ) -> Tensor:
        """Sum this rank's contributions to one architecture; zeros where it has none."""
        statistics = self.statistics[arch]
        dtype = torch.float64 if self.reduction == "exact" else torch.float32
        total = torch.zeros(self.sizes[arch], dtype=dtype, device=self.device)
        for name in (name for name in weights if name in uploads):
            x = statistics.encode(uploads[name].vector.to(self.device))
            span = statistics.span
            self._add(total[: span.start], weights[name], x[: span.start], name, round_)
            weight = statistics.weight(name, weights, self.seed, round_)
            self._add(total[span], weight, x[span], name, round_)
        return total

    def _add(self, total: Tensor, weight: float, x: Tensor, client: str, round_: int) -> None:
        if self.reduction == "fp32":
            total.add_(x, alpha=weight)
        elif not accumulate(total, weight, x) <= MAX_MAGNITUDE:
            raise TrainingError(
                f"client {client}, round {round_ + 1}: the update holds values beyond {MAX_MAGNITUDE:.0f}, where sums "
                "are no longer exact; lower the learning rate, or set model.reduction to fp32"
            )
