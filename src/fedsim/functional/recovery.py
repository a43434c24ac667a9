"""Two-stage recovery (CRR) of FedKLPR, paper 004: a model is pruned further only after its accuracy has recovered.

The paper names the stages without thresholds and details; the defaults are ours. The caller measures the accuracy, and
should not use test images for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fedsim.functional.pruning import zero_pruned_

_WINDOW = 2  # earlier accuracies that the last one is compared with


def has_recovered(accuracies: Sequence[float], target: float = 0.5, plateau: float = 0.02) -> bool:
    """Stage 1: ``acc_t >= A_target`` and ``|acc_t - mean(acc_{t-1}, acc_{t-2})| <= delta_1``.

    ``accuracies`` are those from the first to acc_t; with fewer than three the answer is False. ``target`` is
    $A_{target}$, ``plateau`` $delta_1$.

    >>> has_recovered([0.60, 0.60, 0.61]), has_recovered([0.40, 0.60, 0.61]), has_recovered([0.6, 0.6])
    (True, False, False)
    """
    if len(accuracies) <= _WINDOW:
        return False
    *_, second, first, last = accuracies
    return last >= target and abs(last - (first + second) / _WINDOW) <= plateau


def try_mask(weights: Tensor, trial: Tensor, is_good: Callable[[], bool]) -> bool:
    """Prune ``weights`` [n] of the live model in place by a mask [n]; restore them, to the bit, unless they are good.

    ``is_good`` judges the pruned model. Returns its answer: whether the weights are pruned now.
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
    """Prune a recovered model (stage 1) step by step while the accuracy stays good (stage 2).

    A step passes stage 2 if ``acc_before - acc_after < delta_2``, the ``tolerance``; acc_before is the accuracy before
    the first step, the last of ``history``. See :func:`has_recovered` for that, ``target`` and ``plateau``.

    The ``weights`` [n] of the live model, which ``accuracy`` measures, change in place; their ``mask`` is [n] bool.
    ``propose``: mask -> next mask to try, the same one if there is nothing left to prune. There are at most ``trials``
    steps. Returns the mask of the weights now, from the last step that passed.
    """
    if not has_recovered(history, target, plateau):
        return mask
    for _ in range(trials):
        trial = propose(mask)
        if torch.equal(trial, mask) or not try_mask(weights, trial, lambda: history[-1] - accuracy() < tolerance):
            break
        mask = trial
    return mask
