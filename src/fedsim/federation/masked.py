"""Sums of uploads whose clients have pruned their models: the mean of an element is that over those who have it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from fedsim.federation.aggregation import Aggregator
from fedsim.functional.pruning import zero_pruned_
from fedsim.methods.base import Weights
from fedsim.training.messages import Upload
from fedsim.training.statistics import BatchNormStatistics


class MaskedAggregator(Aggregator):
    """Sums uploads with element masks; see :class:`~fedsim.federation.aggregation.Aggregator`.

    The buffer is [sum of w m x | sum of w m | sum of w], and an element's mean is
    ``(sum of w m x) / (sum of w m / sum of w)``. The second quotient is exactly 1 where nobody has pruned, so that
    masks of ones change no bit. (Plain fp32 sums of more than two ranks need not add in the same order at both places;
    there it is 1 up to rounding.) Statistics are not masked.
    """

    columns: ClassVar[tuple[str, ...]] = ("unpruned", "new mask")
    """shared parameters, counted by element, that the client has not pruned; 1 if the server did not know the mask"""

    def length_of(self, statistics: BatchNormStatistics) -> int:
        """Return the length of the three parts."""
        return statistics.num_shared + statistics.span.start + 1

    def check(self, upload: Upload) -> None:
        """Take every upload."""

    def facts(self, client: str, upload: Upload) -> Sequence[float]:
        """Count the elements that an upload's mask leaves."""
        total = sum(entry.numel for entry in self.statistics[self.archs[client]].parameters)
        pruned = 0 if upload.mask is None else int((~upload.mask).count_nonzero())
        return float(total - pruned), float(upload.mask is not None and upload.is_new_mask)

    def sum_model(self, client: str, upload: Upload, weights: Weights, total: Tensor) -> None:
        """Add a client's elements, and its weight where it has them."""
        x = upload.vector.to(total.device)
        values, shares = total.split([len(x), len(total) - len(x)])
        mask = torch.ones(len(shares), dtype=torch.bool, device=total.device)
        if upload.mask is not None:
            sent = upload.mask.to(total.device)
            x = x.clone()
            zero_pruned_(x[: len(sent)], sent)
            if not upload.zeros_count:
                mask[:-1] = sent
        self.add_weighted(shares, _weight_of_parameters(client, weights), mask)
        self.sum_vector(client, x, weights, values)

    def divide(self, arch: str, total: Tensor) -> Tensor:
        """Divide each element by the share of the weights that has it; note those that nobody has."""
        num_shared = self.statistics[arch].num_shared
        mean, share = total[:num_shared], total[num_shared:-1] / total[-1]
        self.untouched[arch] = share == 0
        mean[: len(share)].div_(share).masked_fill_(self.untouched[arch], 0.0)
        return mean


def _weight_of_parameters(client: str, weights: Weights) -> float:
    """Return the one weight of all parameters of a client."""
    if weights.parameters is None:
        return weights.clients[client]
    assert len(weights.parameters[client]) == 1, "weights of single tensors do not go together with masks"
    return weights.parameters[client][0]
