"""Single uploads instead of sums: for rules that no weighted mean can express."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fedsim.core.errors import ConfigError
from fedsim.federation.aggregation.sums import Aggregator, Extras, by_architecture
from fedsim.methods.base import Weights
from fedsim.training.messages import Report, Upload
from fedsim.training.statistics import StatisticsPolicy
from fedsim.training.uploads import Uploads

UploadRule = Callable[[str, Uploads, Mapping[str, Report]], Tensor]
"""architecture, uploads, reports -> the vector [num_shared] that takes the place of the weighted mean"""


class GatheringAggregator(Aggregator):
    """Lets a rule see every upload; see :class:`~fedsim.federation.aggregation.sums.Aggregator`.

    Uploads wait in the host memory of the rank that trained the client, 4 bytes per shared element. Ranks exchange them
    piece by piece: a piece of all clients has at most 64 MiB, and no rank holds more than its own clients' uploads
    beside it. Every rank computes with the same numbers in the same order, that of the reports: the result has the same
    bits on any number of ranks. ``others`` are the arguments of Aggregator.
    """

    def __init__(self, rule: UploadRule, *others: Any) -> None:
        super().__init__(*others)
        self._rule = rule

    def begin(self, round_: int, extras: Extras, weights: Mapping[str, Weights] | None = None) -> None:  # noqa: ARG002 - uploads wait whatever is known
        """Forget the last round's uploads."""
        super().begin(round_, extras)

    def means(self, weights: Mapping[str, Weights], reports: Mapping[str, Report]) -> dict[str, Tensor]:
        """Return what the rule makes of the uploads of each architecture, float32 [num_shared]."""
        found = {}
        for arch, members in by_architecture(reports, self.archs).items():
            mean = self._rule(arch, self._uploads(arch, list(members)), members)
            found[arch] = self.statistics[arch].decode(mean.double()).float().to(self._totals[arch].device)
        for client, upload in self._waiting.items():
            self.sum_extras(client, upload, weights[self.archs[client]])
        self._waiting = {}
        return found

    def _uploads(self, arch: str, clients: list[str]) -> Uploads:
        def piece(span: slice) -> Tensor:
            """Every row is filled by one rank and zero elsewhere, so the sum is exact."""
            rows = torch.zeros(len(clients), span.stop - span.start, device=self._totals[arch].device)
            for row, name in zip(rows, clients, strict=True):
                if name in self._waiting:
                    row.copy_(self._waiting[name].vector[span])
            return self.strategy.sum_(rows).add_(0.0).cpu()  # -0 becomes 0 on one rank, too

        return Uploads(clients, self.statistics[arch].num_shared, piece)

    def check(self, upload: Upload) -> None:
        """Raise AssertionError if an upload is pruned: no rule here knows masks."""
        assert upload.is_plain, "single uploads cannot be pruned"


def check_statistics_of_uploads(bn_stats: StatisticsPolicy, who: str) -> None:
    """Refuse policies for running statistics that only weighted sums can have."""
    if bn_stats in ("pooled", "first"):
        raise ConfigError(
            f"model.bn_stats: {bn_stats} is for weighted means, but {who} sees single uploads; set it to mean"
        )
