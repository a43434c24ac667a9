"""Events inside a round, beside Lightning's own callback hooks, and the numbers that they tell."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from lightning import Callback, LightningModule, Trainer

from fedsim.core.placement import Placement
from fedsim.evaluation.summary import few_names
from fedsim.strategy.strategy import FederatedStrategy
from fedsim.training.client import BatchReport


class RoundCallback(Callback):
    """A Lightning callback that also hears what happens within a round, on the rank where it happens."""

    def on_placed(self, placement: Placement) -> None:
        """Clients have been assigned to ranks."""

    def on_round_start(self, round_: int, clients: list[str]) -> None:
        """Round ``round_`` (from 0) starts; ``clients`` train on this machine, in this order."""

    def on_client_batch(self, report: BatchReport) -> None:
        """A client has done one batch."""

    def on_scoring(self, what: str) -> None:
        """A model is about to be scored on a data set."""


def publish(trainer: Trainer, round_: int, metrics: Mapping[str, float]) -> None:
    """Give the numbers of round ``round_``, from 0, to loggers and callbacks.

    Straight to them: Lightning's own bookkeeping takes a quarter of a millisecond per number.
    """
    for logger in trainer.loggers:
        logger.log_metrics({**metrics, "epoch": round_}, step=round_)
    values = torch.tensor([*metrics.values()])  # one for all numbers takes hardly longer than for each
    trainer.callback_metrics.update(zip(metrics, values.unbind(), strict=True))


def log_scores(federation: LightningModule, metrics: dict[str, float]) -> dict[str, float]:
    """Log scores, which are equal on all ranks already, and return them; of very many data sets loggers get means."""
    trainer = federation.trainer
    values = {name: torch.tensor(value) for name, value in metrics.items()}  # on the CPU: of numbers Lightning makes
    few = {name: values[name] for name in few_names(metrics)}  # tensors on the GPU, and reads each of them again
    if trainer.state.fn == "fit":
        publish(trainer, trainer.current_epoch, {name: value.item() for name, value in few.items()})
    else:  # trainer.test() returns what was logged so; sync_dist for rank 0 alone: no collective, no advice to use one
        federation.log_dict(few, on_step=False, on_epoch=True, batch_size=1, sync_dist=True, rank_zero_only=True)
    trainer.callback_metrics.update(values)
    return metrics


def round_callbacks(trainer: Trainer) -> list[RoundCallback]:
    """Return the trainer's callbacks that hear of rounds."""
    everybody = trainer.callbacks  # type: ignore[attr-defined] # Lightning's stub misses it
    return [callback for callback in everybody if isinstance(callback, RoundCallback)]


def evaluates_after(trainer: Trainer, round_: int) -> bool:
    """Return whether an evaluation follows round ``round_``, from 0."""
    every = trainer.check_val_every_n_epoch
    return bool(trainer.enable_validation) and every is not None and (round_ + 1) % every == 0


def strategy_of(trainer: Trainer) -> FederatedStrategy:
    """Return the trainer's strategy, which owns all collectives."""
    strategy = trainer.strategy
    assert isinstance(strategy, FederatedStrategy)
    return strategy


def was_stopped(trainer: Trainer) -> bool:
    """Return whether a signal ended the fit before its last round."""
    last = trainer.max_epochs
    is_last = last is not None and 0 <= last <= trainer.current_epoch
    return strategy_of(trainer).stop_signal is not None and not is_last


def as_oracle(scores: Mapping[str, float]) -> dict[str, float]:
    """Rename test scores by which a model could be chosen: only under a name that says what that is.

    >>> as_oracle({"test/mAP": 0.5, "test/global/market1501/mAP": 0.6})
    {'oracle/mAP': 0.5, 'test/global/market1501/mAP': 0.6}
    """
    return {f"oracle/{k.removeprefix('test/')}" if k.count("/") == 1 else k: v for k, v in scores.items()}
