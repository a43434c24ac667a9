"""Magnitude pruning of a vector of n weights.

A mask is bool [n], False for pruned elements. Only elements of ``layers``, slices of the vector, can be pruned; all
others are True. Masks are explicit: a weight of 0 is not pruned by its value. Of equal magnitudes the first one counts
as smaller, on every device.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_BLOCK = 2**17  # elements that a CPU zeroes at a time: intermediates stay in its cache


def zero_pruned_(weights: Tensor, mask: Tensor) -> Tensor:
    """Set pruned elements to 0 in place. A product would leave -0 and NaN, and masked_fill_ takes six times as long.

    ``weights`` is [n] float32, contiguous; ``mask`` is [n] bool.

    >>> zero_pruned_(torch.tensor([-1.0, 2.0]), torch.tensor([False, True]))
    tensor([0., 2.])
    """
    block = _BLOCK if weights.is_cpu else max(len(weights), 1)
    for bits, kept in zip(weights.view(torch.int32).split(block), mask.split(block), strict=True):
        bits.bitwise_and_(kept.to(torch.int32).neg_())  # all bits, or none
    return weights


def pruned_fraction(mask: Tensor, layers: Sequence[slice]) -> float:
    """Return $PR$, the pruned share of the elements of ``layers``; 0 without layers.

    >>> pruned_fraction(torch.tensor([True, False, True, True, True]), [slice(0, 2), slice(3, 5)])
    0.25
    """
    return share_pruned(remaining(mask, layers), layers)


def remaining(mask: Tensor, layers: Sequence[slice]) -> list[int]:
    """Return the number of elements that are left in each layer; the host waits for the device once.

    >>> remaining(torch.tensor([True, False, True, True, True]), [slice(0, 2), slice(3, 5)])
    [1, 2]
    """
    counts: list[int] = count_remaining(mask, layers).tolist()
    return counts


def count_remaining(mask: Tensor, layers: Sequence[slice]) -> Tensor:
    """Return :func:`remaining` as int64 [number of layers] on the device."""
    return torch.stack([mask[layer].count_nonzero() for layer in layers]) if layers else torch.zeros(0).long()


def share_pruned(left: Sequence[int], layers: Sequence[slice]) -> float:
    """Return :func:`pruned_fraction` from the numbers of elements that are left in each layer."""
    total = sum(layer.stop - layer.start for layer in layers)
    return (total - sum(left)) / total if total else 0.0


def next_step(pruned: float, target: float, step: float = 0.09) -> float:
    """Return the share of all elements to prune next: ``step``, or less to stop at the target (paper 004).

    >>> next_step(0.0, 0.7), round(next_step(0.65, 0.7), 9), next_step(0.7, 0.7)
    (0.09, 0.05, 0.0)
    """
    return min(step, max(target - pruned, 0.0))


def global_magnitude_mask(
    weights: Tensor, mask: Tensor, layers: Sequence[slice], fraction: float, floor: float = 0.0
) -> Tensor:
    """Prune the smallest magnitudes of all layers together until ``fraction`` is pruned; return a new mask.

    The host waits for the device once; :func:`deeper_global_mask` does not.

    ``mask`` [n] is that before: pruned elements stay pruned. ``fraction`` is the $PR$ to reach: of the N elements of
    ``layers``, ``floor(fraction N)`` are pruned. ``floor`` is the share of each layer that is kept, its largest
    elements, even if ``fraction`` is then not reached.

    >>> weights = torch.tensor([0.1, -0.2, 3.0, 4.0])
    >>> global_magnitude_mask(weights, torch.ones(4).bool(), [slice(0, 2), slice(2, 4)], 0.5)
    tensor([False, False,  True,  True])
    >>> global_magnitude_mask(weights, torch.ones(4).bool(), [slice(0, 2), slice(2, 4)], 0.5, floor=0.5)
    tensor([False,  True, False,  True])
    """
    deeper = deeper_global_mask(weights, mask, layers, remaining(mask, layers), fraction, floor)
    return mask.clone() if deeper is None else deeper


def deeper_global_mask(
    weights: Tensor, mask: Tensor, layers: Sequence[slice], left: Sequence[int], fraction: float, floor: float = 0.0
) -> Tensor | None:
    """Return :func:`global_magnitude_mask`, or None if no element more is pruned; the host does not wait.

    ``left`` are the numbers of elements that are left in each layer, see :func:`remaining`.
    """
    total = sum(layer.stop - layer.start for layer in layers)
    sizes = [layer.stop - layer.start for layer in layers]
    counts = [max(of_layer - math.ceil(floor * size), 0) for of_layer, size in zip(left, sizes, strict=True)]
    count = min(_whole(fraction * total) - (total - sum(left)), sum(counts))
    if count <= 0:
        return None
    magnitudes = torch.full_like(weights, math.inf)
    for layer, of_layer, alive in zip(layers, counts, left, strict=True):
        candidates = mask[layer]
        if of_layer < alive:
            candidates = _smallest(_magnitudes(weights[layer], candidates), of_layer)
        magnitudes[layer] = _magnitudes(weights[layer], candidates)
    return mask & ~_smallest(magnitudes, count)


def layerwise_magnitude_mask(
    weights: Tensor, mask: Tensor, layers: Sequence[slice], share: float, left: Sequence[int] | None = None
) -> Tensor:
    """Prune ``ceil(share a)`` of the a remaining elements of each layer, never the last one; return a new mask.

    See :func:`global_magnitude_mask` for the arguments. ``left`` is the result of :func:`remaining`; without it the
    host waits for the device once.

    >>> weights = torch.tensor([0.1, 0.2, -0.3, 5.0, 4.0])
    >>> layerwise_magnitude_mask(weights, torch.ones(5).bool(), [slice(0, 3), slice(3, 5)], 0.5)
    tensor([False, False,  True,  True, False])
    """
    result = mask.clone()
    for layer, alive in zip(layers, remaining(mask, layers) if left is None else left, strict=True):
        count = min(_whole(share * alive, up=True), alive - 1)
        if count > 0:
            result[layer] &= ~_smallest(_magnitudes(weights[layer], mask[layer]), count)
    return result


def hamming_distance(a: Tensor, b: Tensor, layers: Sequence[slice]) -> float:
    """Return the share of the elements of ``layers`` whose masks differ.

    >>> hamming_distance(torch.tensor([True, False, True, True]), torch.ones(4).bool(), [slice(0, 4)])
    0.25
    """
    return pruned_fraction(a == b, layers)


def differ(a: Tensor, b: Tensor, layers: Sequence[slice], share: float) -> Tensor:
    """Return whether :func:`hamming_distance` is above ``share``, bool on the device: the host need not wait.

    >>> differ(torch.tensor([True, False, True, True]), torch.ones(4).bool(), [slice(0, 4)], 0.25)
    tensor(False)
    """
    total = sum(layer.stop - layer.start for layer in layers)
    return count_remaining(a != b, layers).sum() >= smallest_count_above(share, total)


def smallest_count_above(share: float, total: int) -> int:
    """Return the smallest count whose share of ``total`` is larger than ``share``; ``total`` + 1 if none is.

    So a device can compare counts, with the same result as the host's comparison of shares.

    >>> smallest_count_above(0.2, 10), smallest_count_above(0.0, 10), smallest_count_above(1.0, 10)
    (3, 1, 11)
    """
    return bisect_right(range(total + 1), share, key=lambda count: count / max(total, 1))


def cubic_sparsity(t: float, num_rounds: int, start: float, end: float) -> float:
    """``s_t = s_T + (s_0 - s_T) (1 - t / T)^3``, from t = T on ``s_T`` (Zhu and Gupta, 2017; FedDIP).

    >>> [round(cubic_sparsity(t, 20, 0.0, 0.7), 4) for t in (0, 10, 19, 20, 30)]
    [0.0, 0.6125, 0.6999, 0.7, 0.7]
    """
    return end + (start - end) * (1 - min(t / num_rounds, 1.0)) ** 3


def stepped_weight(t: int, num_rounds: int, largest: float, num_steps: int, first: float | None = None) -> float:
    """Return FedDIP's weight of regularisation in round t = 0, 1, ...; it rises from 0 in Q = ``num_steps`` steps.

    With ``first`` None, the paper's: ``largest floor(Q t / T) / Q``. Otherwise the authors' code: steps have
    ``floor(T / Q)`` rounds; the first has 0, the second ``first``, and equal increments follow that would reach
    ``largest`` after the last step. Remaining rounds belong to the last step; all do if T < Q. A ``first`` above
    ``largest`` counts as ``largest``.

    >>> [stepped_weight(t, 40, 1.0, 4) for t in (0, 9, 10, 39, 40, 50)]
    [0.0, 0.0, 0.25, 0.75, 1.0, 1.0]
    >>> [stepped_weight(t, 43, 1.0, 4, first=0.4) for t in (0, 9, 10, 20, 30, 42)]
    [0.0, 0.0, 0.4, 0.6, 0.8, 0.8]
    """
    if first is None:
        return largest * min(math.floor(num_steps * t / num_rounds), num_steps) / num_steps
    length = num_rounds // num_steps
    step = min(t // length, num_steps - 1) if length else num_steps - 1
    start = min(first, largest)
    return start + (largest - start) / (num_steps - 1) * (step - 1) if step else 0.0


def _whole(number: float, up: bool = False) -> int:
    """Round down or up, but ignore the last bits: 0.1 * 30 is 3, not 3.0000000000000004."""
    nearest = round(number)
    if math.isclose(number, nearest, rel_tol=1e-12):
        return nearest
    return math.ceil(number) if up else math.floor(number)


def _magnitudes(weights: Tensor, among: Tensor) -> Tensor:
    """Return |w| where ``among`` is True, else infinity."""
    return weights.abs().masked_fill(~among, math.inf)


def _smallest(values: Tensor, count: int) -> Tensor:
    """Return a mask, bool, of the ``count`` smallest of ``values``; the first ones of equal values."""
    if count <= 0:
        return torch.zeros_like(values, dtype=torch.bool)
    threshold = _last_of_smallest(values, count)
    below, equal = values < threshold, values == threshold
    return below | (equal & (equal.cumsum(0, dtype=torch.int32) <= count - below.count_nonzero()))


def _last_of_smallest(values: Tensor, count: int) -> Tensor:
    """Return the ``count``-th smallest of ``values``, which are magnitudes."""
    if values.device.type != "cpu":
        return values.topk(count, largest=False, sorted=False).values.max()
    zeros = len(values) - int(values.count_nonzero())
    if count <= zeros:
        return values.new_zeros(())
    if zeros:  # a partition with many equal values takes ten times as long
        values = values[values != 0]
    # takes half of the time of topk
    return torch.from_numpy(np.partition(values.detach().numpy(), count - zeros - 1))[count - zeros - 1]
