"""Two-stage recovery (CRR) of FedKLPR, paper 004: a model is pruned further only after its accuracy has recovered.

The paper names the stages without thresholds and details; the defaults are ours. The caller measures the accuracy, and
should not use test images for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from fedsim.functional.pruning import zero_pruned_

_WINDOW = 2  # earlier accuracies that the last one is compared with


def has_recovered(accuracies: Sequence[float], target: float = 0.5, plateau: float = 0.02) -> bool:
    """Stage 1: ``acc_t >= A_target`` and ``|acc_t - mean(acc_{t-1}, acc_{t-2})| <= delta_1``.

    ``accuracies`` are those from the first to acc_t; with fewer than three the result is False. ``target`` is
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

    ``is_good`` judges the pruned model. Returns its result: whether the weights are pruned now.
    """
    before = weights.clone()
    zero_pruned_(weights, trial)
    if is_good():
        return True
    weights.copy_(before)
    return False


class Trials(NamedTuple):
    """The result of a round's pruning."""

    mask: Tensor
    """[n] bool, mask of the weights after the round"""
    stage: int
    """1: the accuracy has not recovered; 2: no tried mask was good enough; 3: pruned, or nothing to prune"""
    trials: int
    """masks that were tried"""


def prune_in_trials(
    weights: Tensor,
    mask: Tensor,
    propose: Callable[[float], Tensor | None],
    accuracy: Callable[[], float],
    history: Sequence[float],
    *,
    trials: int,
    target: float = 0.5,
    plateau: float = 0.02,
    tolerance: float = 0.01,
) -> Trials:
    """Prune a recovered model (stage 1) as far as its accuracy stays good (stage 2).

    A mask passes stage 2 if ``acc_before - acc_after < delta_2``, the ``tolerance``; acc_before is the accuracy before
    the first trial, the last of ``history``. See :func:`has_recovered` for ``history``, ``target`` and ``plateau``.

    The whole step is tried first. If it does not pass, the largest number of ``trials``-ths that passes is found by
    halving, under the assumption that more pruning is never better. Most rounds measure the accuracy once, and no round
    more than ``2 + log2(trials)`` times.

    The ``weights`` [n] of the live model, which ``accuracy`` measures, change in place; their ``mask`` is [n] bool.
    ``propose``: share of the step, in (0, 1] -> mask to try, None if the share is less than a whole element.

    The host waits for the device once for each accuracy, which decides on the next mask.
    """
    if not has_recovered(history, target, plateau):
        return Trials(mask, 1, 0)
    before, tried = weights.clone(), 0
    passed, failed, best = 0, trials + 1, mask
    while failed - passed > 1:
        part = trials if failed > trials else (passed + failed) // 2
        trial = propose(part / trials)
        if trial is None:
            passed = part
            continue
        tried += 1
        if try_mask(weights, trial, lambda: history[-1] - accuracy() < tolerance):
            passed, best = part, trial
            weights.copy_(before)
        else:
            failed = part
    if passed:
        zero_pruned_(weights, best)
    return Trials(best, 3 if passed else 2, tried)
