"""Gathered single uploads, for aggregation rules that are not weighted means."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsim.core.errors import ConfigError
from fedsim.strategy.strategy import FederatedStrategy
from fedsim.training.messages import Report, Upload
from fedsim.training.statistics import StatisticsPolicy
from fedsim.training.uploads import CHUNK, Uploads

UploadRule = Callable[[str, Uploads, Mapping[str, Report]], Tensor]
"""architecture, uploads, reports -> the vector [num_shared] that replaces the weighted mean"""
Forgery = Callable[[str, Sequence[str], Callable[[Sequence[str]], Uploads]], Mapping[str, Tensor]]
"""architecture, its clients, some clients -> their shared parameters as uploads; the result is the same on all ranks:
client -> parameters [num_shared_parameters] that replace those of its upload"""


_COPIES = 10
"""of a chunk in float32, that the rule which needs most has beside it: FLTrust's are float64"""


def gathered_bytes(clients: int, length: int) -> int:
    """Return the most bytes that a rule has on a device for uploads of so many ``clients``, vectors of ``length``."""
    chunk = (clients + 1) * min(length, max(CHUNK // clients, 1))  # FLTrust adds a row
    return 4 * _COPIES * chunk + 12 * length  # the result, also in float64


def gather(
    waiting: Mapping[str, Upload], clients: list[str], length: int, device: torch.device, strategy: FederatedStrategy
) -> Uploads:
    """Return the uploads of all ranks' ``clients``, vectors of ``length``, for a rule.

    ``waiting`` are the uploads of this rank's clients, in host memory: 4 bytes per shared element. Ranks exchange them
    in chunks on ``device``. A chunk of all clients has at most 64 MiB; besides it, a rank holds only the uploads of its
    clients. Ranks share the work on chunks; the result has the same bits on any number of ranks.
    """

    def chunk(span: slice) -> Tensor:
        """Return a slice of all uploads; each is zero on all ranks but one, so the sum is exact."""
        rows = torch.zeros(len(clients), span.stop - span.start, device=device)
        for row, name in zip(rows, clients, strict=True):
            if name in waiting:
                row.copy_(waiting[name].vector[span])
        return strategy.sum_(rows).add_(0.0)  # -0 becomes 0 also on a single rank

    return Uploads(
        clients, length, chunk,
        sum_=strategy.sum_, rank=strategy.global_rank, num_ranks=strategy.world_size, device=device,
    )  # fmt: skip


def squared_distances(uploads: Uploads, *points: Tensor) -> Tensor:
    """Return the squared distances between K uploads and P ``points``, [K + P, K + P] float64 on the CPU.

    They are over the whole vectors: parameters and statistics, where uploads have these.
    """

    def of_chunk(chunk: Tensor, *parts: Tensor) -> Tensor:
        exact = torch.cat([chunk, *(part[None] for part in parts)]).double()
        # differences in float64, summed over chunks: large norms do not cancel
        rows = [F.pad((exact[i:] - row).square().sum(1), (i, 0)) for i, row in enumerate(exact)]
        return torch.stack(rows)

    upper = uploads.total(of_chunk, [len(uploads.clients) + len(points)] * 2, *points).cpu()
    return upper + upper.T  # zeros on the diagonal


def check_statistics_of_uploads(bn_stats: StatisticsPolicy, user: str) -> None:
    """Refuse policies for running statistics that need weighted sums; ``user`` uses single uploads."""
    if bn_stats in ("pooled", "first"):
        raise ConfigError(
            f"model.bn_stats: {bn_stats} is for weighted means, but {user} uses single uploads; set it to mean"
        )
