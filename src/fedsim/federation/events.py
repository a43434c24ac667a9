"""Events within a round, in addition to Lightning's callback hooks, and the publication of numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Timer

from fedsim.core.placement import Placement
from fedsim.evaluation.summary import few_names
from fedsim.strategy.strategy import FederatedStrategy
from fedsim.training.client import BatchReport


class RoundCallback(Callback):
    """A Lightning callback with hooks for events within a round, called on the rank of the event."""

    def on_placed(self, placement: Placement) -> None:
        """Clients have been assigned to ranks."""

    def on_round_start(self, round_: int, clients: list[str]) -> None:
        """Round ``round_`` (from 0) starts; ``clients`` train on this machine, in this order."""

    def on_client_batch(self, report: BatchReport) -> None:
        """A client has done one batch."""

    def on_batch_before_stop(self, report: BatchReport) -> None:
        """A client has done one batch, and the run has a deadline by which it must stop."""

    def on_round_trained(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The clients of a round have trained, and its means are in the models; none of its numbers is written yet.

        All ranks call it.
        """

    def on_scoring(self, subject: str) -> None:
        """A model will be scored on a data set; ``subject`` names both."""


def publish(trainer: Trainer, round_: int, metrics: Mapping[str, float]) -> None:
    """Pass the numbers of round ``round_``, from 0, to loggers and callbacks.

    Lightning's own bookkeeping is bypassed: it takes a quarter of a millisecond per number.
    """
    for logger in trainer.loggers:
        logger.log_metrics({**metrics, "epoch": round_}, step=round_)
    values = torch.tensor([*metrics.values()])  # one tensor takes hardly longer for all numbers than for one
    trainer.callback_metrics.update(zip(metrics, values.unbind(), strict=True))


def log_scores(federation: LightningModule, metrics: dict[str, float]) -> dict[str, float]:
    """Log scores, which are equal on all ranks, and return them; of very many data sets, loggers get means."""
    trainer = federation.trainer
    values = {name: torch.tensor(value) for name, value in metrics.items()}
    # tensors on the CPU: Lightning would make tensors on the GPU of numbers, and read each of them again
    shown = {name: values[name] for name in few_names(metrics)}
    if trainer.state.fn == "fit":
        publish(trainer, trainer.current_epoch, {name: value.item() for name, value in shown.items()})
    else:  # trainer.test() returns these; sync_dist with rank_zero_only: no collective, and no warning to use one
        federation.log_dict(shown, on_step=False, on_epoch=True, batch_size=1, sync_dist=True, rank_zero_only=True)
    trainer.callback_metrics.update(values)
    return metrics


def callbacks_of(trainer: Trainer) -> list[Callback]:
    """Return the trainer's own list of callbacks, which Lightning's stub misses."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined] # see above
    return callbacks


def round_callbacks(trainer: Trainer) -> list[RoundCallback]:
    """Return the trainer's callbacks with hooks for rounds."""
    return [callback for callback in callbacks_of(trainer) if isinstance(callback, RoundCallback)]


def evaluates_after(trainer: Trainer, round_: int) -> bool:
    """Return whether an evaluation follows round ``round_``, from 0."""
    every = trainer.check_val_every_n_epoch
    return bool(trainer.enable_validation) and every is not None and (round_ + 1) % every == 0


def strategy_of(trainer: Trainer) -> FederatedStrategy:
    """Return the trainer's strategy, which owns all collectives."""
    strategy = trainer.strategy
    assert isinstance(strategy, FederatedStrategy)
    return strategy


def as_list(value: Any) -> list[Any]:
    """Return the callbacks or loggers of a Trainer's argument: none, one or a list."""
    return [] if value in (None, True, False) else list(value) if isinstance(value, list | tuple) else [value]


def num_rounds(trainer: Trainer) -> int | None:
    """Return ``trainer.max_epochs``; None if it is -1, for a run without a last round."""
    return None if trainer.max_epochs is None or trainer.max_epochs < 0 else trainer.max_epochs


def ended_by(trainer: Trainer) -> str:
    """Return the cause of the end of a fit: signal, max_epochs, max_steps, max_time, or else callback."""
    last = num_rounds(trainer)
    timers = (callback for callback in callbacks_of(trainer) if isinstance(callback, Timer))
    reasons = {
        "signal": was_stopped(trainer),
        "max_epochs": last is not None and last <= trainer.current_epoch,
        "max_steps": 0 <= trainer.max_steps <= trainer.global_step,
        "max_time": any((left := timer.time_remaining()) is not None and left <= 0 for timer in timers),
    }
    return next((reason for reason, holds in reasons.items() if holds), "callback")


def was_stopped(trainer: Trainer) -> bool:
    """Return whether a signal ended the fit before its last round."""
    last = num_rounds(trainer)
    is_last = last is not None and last <= trainer.current_epoch
    return strategy_of(trainer).stop_signal is not None and not is_last


def as_oracle(scores: Mapping[str, float]) -> dict[str, float]:
    """Rename main test scores to ``oracle/``: choosing a model by test data must be visible in the name.

    >>> as_oracle({"test/mAP": 0.5, "test/global/market1501/mAP": 0.6})
    {'oracle/mAP': 0.5, 'test/global/market1501/mAP': 0.6}
    """
    return {f"oracle/{k.removeprefix('test/')}" if k.count("/") == 1 else k: v for k, v in scores.items()}
