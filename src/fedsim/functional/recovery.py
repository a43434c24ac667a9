"""When a model may be pruned further: two-stage recovery (CRR) of FedKLPR, paper 004.

The paper names the stages; its thresholds' values are lost, and so are the details: the defaults are ours. What the
accuracy is measured on is up to the caller, who should not take test images.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fedsim.functional.pruning import zero_pruned_

__all__ = ["has_recovered", "prune_in_trials", "try_mask"]

_WINDOW = 2
"""accuracies before the last one that it is compared with"""


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


def prune_in_trials(
    weights: Tensor,
    mask: Tensor,
    propose: Callable[[Tensor], Tensor],
    accuracy: Callable[[], float],
    history: Sequence[float],
    *,
    trials: int,
    target: float = 0.5,
    plateau: float = 0.02,
    tolerance: float = 0.01,
) -> Tensor:
    """Prune a model further and further if it has recovered (stage 1), until that costs too much (stage 2).

    Stage 2: ``acc_before - acc_after < delta_2``, where acc_before is that before the first trial. Weights and mask are
    then those of the last trial that has passed.

    Args:
        weights: [n], of the live model, changed in place.
        mask: [n] bool, of the model as it is.
        propose: from a mask to the next one to try, [n] bool; the same one where there is no more to prune.
        accuracy: of the live model.
        history: accuracies from the first to acc_t, that of the model as it is.
        trials: at most so many.
        target: $A_{target}$.
        plateau: $delta_1$.
        tolerance: $delta_2$.

    Returns:
        [n] bool: the mask that the weights have now.
    """
    if not has_recovered(history, target, plateau):
        return mask
    for _ in range(trials):
        trial = propose(mask)
        if torch.equal(trial, mask) or not try_mask(weights, trial, lambda: history[-1] - accuracy() < tolerance):
            break
        mask = trial
    return mask
