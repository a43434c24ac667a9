"""Running statistics of batch normalisation on the server: the setting ``model.bn_stats``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor

from fedsim.core.seeding import derive_seed
from fedsim.functional.statistics import central_variance, second_moments
from fedsim.models.groups import STATISTICS, Group
from fedsim.training.flat_model import FlatModel

StatisticsPolicy = Literal["mean", "first", "pooled", "local", "recalibrate"]
Chooses = Callable[[Sequence[str]], Collection[str]]
"""names of tensors -> some of them"""


def shared_names(
    groups: Mapping[str, Group], shared: frozenset[Group], policy: StatisticsPolicy, *, choose: Chooses = frozenset
) -> frozenset[str]:
    """Return the names of the tensors that are sent: those of shared groups, without statistics that stay local.

    ``choose`` leaves some of them out, as :meth:`Method.shared_tensors` does; it gets them in the order of the network.
    """
    kept = shared - STATISTICS if policy == "local" else shared
    return frozenset(choose([n for n, group in groups.items() if group in kept and group is not Group.COUNTER]))


class BatchNormStatistics:
    """Aggregation of running means and variances on the server: the setting ``bn_stats``.

    ``mean``: averaged with the aggregation weights, like parameters. ``first``: those of one random participant (as in
    FedReIDBench's official code). ``pooled``: the variance of the pooled data, by the law of total variance. ``local``:
    they never leave the client. ``recalibrate``: estimated again on public images after averaging.
    """

    def __init__(self, policy: StatisticsPolicy, model: FlatModel) -> None:
        self.policy = policy
        self.is_plain = policy not in ("pooled", "first")
        """whether statistics are sent as they are, and weigh like parameters"""
        flat = model.flat
        self.span = slice(flat.num_shared_parameters, flat.num_shared)
        """place of the shared statistics"""
        self.parameters = flat.shared_parameters
        """entries before them"""
        self.num_parameters = sum(entry.numel for entry in self.parameters)
        """numbers in them, without padding"""
        self.num_shared = flat.num_shared
        """length of the shared vector"""
        spans = {entry.name: entry.span for entry in flat.shared_entries if entry.kind == "buffer"}
        means = [name for name in spans if "running_mean" in name]
        self.means = _indices((spans[name] for name in means), model.device)
        variances = (spans[name.replace("running_mean", "running_var")] for name in means)
        self.variances = _indices(variances, model.device)

    def encode(self, vector: Tensor) -> Tensor:
        """Return the contribution of a client [num_shared]: under ``pooled``, second moments instead of variances."""
        if self.policy == "pooled":
            vector = vector.clone()
            vector[self.variances] = second_moments(vector[self.means], vector[self.variances])
        return vector

    def decode(self, mean: Tensor) -> Tensor:
        """Turn the weighted mean of encoded vectors into statistics, in the precision of ``mean`` (float64)."""
        if self.policy == "pooled":
            mean = mean.clone()
            mean[self.variances] = central_variance(mean[self.means], mean[self.variances])
        return mean

    def weight(self, client: str, weights: Mapping[str, float], seed: int, round_: int) -> float:
        """Return the weight of a client's statistics; under ``first`` 1 for the chosen participant, else 0."""
        if self.policy != "first":
            return weights[client]
        names = list(weights)
        return float(client == names[derive_seed(seed, round_, "first statistics") % len(names)])


@contextmanager
def steady_statistics(model: FlatModel) -> Iterator[None]:
    """Leave a model's running statistics as they were at the start of the block, private ones, too."""
    before = [part.clone() for part in model.running]
    yield
    for part, old in zip(model.running, before, strict=True):
        part.copy_(old)


def _indices(spans: Iterable[slice], device: torch.device) -> Tensor:
    parts = [torch.arange(span.start, span.stop, device=device) for span in spans]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.long, device=device)
