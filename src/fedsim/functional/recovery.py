"""When a model may be pruned further: two-stage recovery (CRR) of FedKLPR, paper 004.

The paper names the stages; its thresholds' values are lost, and so are the details: the defaults are ours. What the
accuracy is measured on is up to the caller, who should not take test images.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from torch import Tensor

from fedsim.functional.pruning import zero_pruned_

__all__ = ["Recovery", "has_recovered", "prune_if_recovered", "try_mask"]

_WINDOW = 2
"""accuracies before the last one that it is compared with"""


class Recovery(NamedTuple):
    """What :func:`prune_if_recovered` has come to."""

    mask: Tensor
    """[n] bool: the one before, or the one that was tried"""
    verdict: Literal["waits", "pruned", "reverted"]
    """stage 1 says no; stage 2 says yes; stage 2 says no"""


def has_recovered(accuracies: Sequence[float], target: float = 0.5, plateau: float = 0.02) -> bool:
    """Stage 1: ``acc_t >= A_target`` and ``|acc_t - mean(acc_{t-1}, acc_{t-2})| <= delta_1``.

    Args:
        accuracies: from the first to acc_t; with fewer than three there is no plateau yet.
        target: $A_{target}$.
        plateau: $delta_1$.

    >>> has_recovered([0.60, 0.60, 0.61]), has_recovered([0.40, 0.60, 0.61]), has_recovered([0.6, 0.6])
    (True, False, False)
    """
    if len(accuracies) <= _WINDOW:
        return False
    *_, second, first, last = accuracies
    return last >= target and abs(last - (first + second) / _WINDOW) <= plateau


def try_mask(weights: Tensor, trial: Tensor, is_good: Callable[[], bool]) -> bool:
    """Prune ``weights`` in place, and take that back, to the bit, unless the result is good.

    Args:
        weights: [n], of the live model.
        trial: [n] bool.
        is_good: looks at the pruned model.

    Returns:
        whether the weights are pruned now.
    """
    before = weights.clone()
    zero_pruned_(weights, trial)
    if is_good():
        return True
    weights.copy_(before)
    return False


def prune_if_recovered(
    weights: Tensor,
    mask: Tensor,
    propose: Callable[[], Tensor],
    accuracy: Callable[[], float],
    history: Sequence[float],
    *,
    target: float = 0.5,
    plateau: float = 0.02,
    tolerance: float = 0.01,
) -> Recovery:
    """Prune a model if it has recovered (stage 1), unless it loses too much by that (stage 2).

    Stage 2: ``acc_before - acc_after < delta_2``; otherwise mask and weights become what they were.

    Args:
        weights: [n], of the live model, changed in place.
        mask: [n] bool, of the model as it is.
        propose: returns the mask to try, [n] bool; asked only after stage 1.
        accuracy: of the live model.
        history: accuracies from the first to acc_t, that of the model as it is.
        target: $A_{target}$.
        plateau: $delta_1$.
        tolerance: $delta_2$.
    """
    if not has_recovered(history, target, plateau):
        return Recovery(mask, "waits")
    trial = propose()
    if try_mask(weights, trial, lambda: history[-1] - accuracy() < tolerance):
        return Recovery(trial, "pruned")
    return Recovery(mask, "reverted")
