"""The errors of a client's session, each with its remedies. ``session`` names client and round."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from fedsim.core.errors import BadUpdateError, TrainingError

_SKIP = "or leave such updates out with model.on_bad_update: skip_client"


def bad_update(session: str, problem: str, lower: str, setting: str) -> BadUpdateError:
    """Return the error of an update that cannot count; its remedies are to lower a value, or to change a setting."""
    return BadUpdateError(f"{session}: {problem}; lower {lower}, set {setting}, {_SKIP}")


def not_finite(session: str, subject: str) -> BadUpdateError:
    """Return the error of numbers that are not finite."""
    return bad_update(session, f"{subject} are not finite", "model.client.optimizer's lr", "model.client.grad_clip")


def too_large(session: str, subject: str, limit: float) -> BadUpdateError:
    """Return the error of an update with values beyond the limit of exact sums."""
    problem = f"{subject} holds values beyond {limit:.0f}, where sums are no longer exact"
    return bad_update(session, problem, "the learning rate", "model.reduction to fp32")


def negative_variance(session: str, variance: float) -> BadUpdateError:
    """Return the error of an update with a running variance below 0."""
    problem = f"a running variance of its update is {variance:.3g}, and none can be negative"
    return BadUpdateError(f"{session}: {problem}; correct what it sends, {_SKIP}")


def check_signals(session: str, signals: Mapping[str, float | Sequence[float]], tensors: Sequence[str]) -> None:
    """Raise BadUpdateError for a number that is not finite; the message names the signal, or one of the ``tensors``."""
    for name, signal in signals.items():
        pairs = [(name, signal)] if isinstance(signal, int | float) else zip(tensors, signal, strict=True)
        for subject, value in pairs:
            if not math.isfinite(value):
                raise BadUpdateError(f"{session}: its {subject} is {value}")


def out_of_memory(
    session: str, client: str, batch_size: int, progress: tuple[int, int, int], error: BaseException
) -> TrainingError:
    """Return the error of a batch for which memory ran out; ``progress``: local epoch, batch, batches of the epoch."""
    epoch, done, total = progress
    return TrainingError(
        f"{session}, local epoch {epoch + 1}, batch {done} of {total}: out of memory with {batch_size} images per "
        f"batch; lower model.clients.{client}.batch_size ({str(error).partition('.')[0]})"
    )
