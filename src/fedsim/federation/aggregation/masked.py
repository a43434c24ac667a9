"""Sums of pruned models: the means of elements that only some clients have."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from fedsim.federation.aggregation.sums import Accumulate, ModelSum, Stretches, add_stretches
from fedsim.functional.pruning import zero_pruned_
from fedsim.methods.base import Method
from fedsim.training.messages import Measured, Signals, Upload
from fedsim.training.statistics import BatchNormStatistics


def clients_prune(method: Method) -> bool:
    """Return whether clients prune: uploads may lack elements, different ones for each client."""
    return "masks" in method.requires


class MaskedSum(ModelSum):
    """The sum of the uploads of clients that prune.

    The buffer is [sum of w m x | sum of w m | sum of w], and an element's mean is ``(sum of w m x) / (sum of w m / sum
    of w)``. The second quotient is exactly 1 where no client has pruned, so that masks of ones change no bit. (Plain
    fp32 sums over more than two ranks may add the two parts in different orders; then it is 1 up to rounding.)
    Statistics are not masked.
    """

    columns: ClassVar[tuple[str, ...]] = ("unpruned", "new mask")
    """number of elements of shared parameters that the client has not pruned; 1 if the mask is new to the server"""

    def length(self, statistics: BatchNormStatistics) -> int:
        """Return the length of the three parts."""
        return statistics.num_shared + statistics.span.start + 1

    def facts(self, upload: Upload, num_parameters: int) -> Signals:
        """Count the elements that an upload's mask keeps."""
        if upload.mask is None:
            return dict(zip(self.columns, (float(num_parameters), 0.0), strict=True))
        unpruned = Measured((~upload.mask).count_nonzero(), lambda pruned: num_parameters - pruned[0])
        is_new = upload.is_new_mask
        new_mask = Measured(is_new) if isinstance(is_new, Tensor) else float(is_new)
        return dict(zip(self.columns, (unpruned, new_mask), strict=True))

    def add(self, upload: Upload, weights: Stretches, total: Tensor, accumulate: Accumulate) -> None:
        """Add a client's elements, and its weight at these elements."""
        assert len(weights) <= 2, "masks cannot be combined with weights of single tensors"
        x = upload.vector.to(total.device)
        values, shares = total.split([len(x), len(total) - len(x)])
        mask = torch.ones(len(shares), dtype=torch.bool, device=total.device)
        if upload.mask is not None:
            sent = upload.mask.to(total.device)
            x = x.clone()
            zero_pruned_(x[: len(sent)], sent)
            if not upload.zeros_count:
                mask[:-1] = sent
        accumulate(shares, weights[0][1], mask)
        add_stretches(x, weights, values, accumulate)

    def mean(self, total: Tensor, statistics: BatchNormStatistics) -> tuple[Tensor, Tensor | None]:
        """Divide by the total weight of the clients that kept the element; return also the elements pruned by all."""
        mean, share = total[: statistics.num_shared], total[statistics.num_shared : -1] / total[-1]
        untouched = share == 0
        mean[: len(share)].div_(share).masked_fill_(untouched, 0.0)
        return mean, untouched
