"""What ranks tell each other at the end of a round: one row per client, filled by the rank that hosts it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from lightning import Trainer
from torch import Tensor

from fedsim.core.messages import Report
from fedsim.evaluation.summary import MAX_NAMES
from fedsim.federation.hardware import Hardware
from fedsim.training.client import Outcome

__all__ = ["MaskReport", "RoundTable", "Signals", "as_oracle", "publish"]

log = logging.getLogger(__name__)

_COLUMNS = ("loss", "correct", "images", "seconds", "clusters", "clustered", "skipped")
_MASK_COLUMNS = ("kept", "new mask")
_REASONS = {"bad update": 1.0, "no clusters": 2.0}
"""Why a client is left out -> what stands in the column ``skipped``, where 0 is a client that counts."""


class MaskReport(NamedTuple):
    """What the bytes of a pruned upload depend on."""

    kept: int
    """shared parameters, counted by element, that the client has not pruned"""
    is_new: bool
    """whether the server did not know the mask"""


class Signals(NamedTuple):
    """What a client measured for the server's weights, and what it has pruned."""

    by_name: Mapping[str, float]
    of_tensors: Sequence[float]
    mask: MaskReport | None = None


class RoundTable:
    """Numbers of a round. Entries of other ranks are zero until the strategy has summed :attr:`parts`.

    Args:
        clients: names of all clients; the rows.
        signal_names: what the method measures; the last columns.
        world_size: number of ranks.
        num_tensors: client -> how many tensors the method measures a number for; empty: it does not.
        has_masks: whether clients prune.
    """

    def __init__(
        self,
        clients: Sequence[str],
        signal_names: Sequence[str],
        world_size: int,
        num_tensors: Mapping[str, int] | None = None,
        has_masks: bool = False,
    ) -> None:
        self._num_tensors = num_tensors or {}
        self._tensors = torch.zeros(len(self._num_tensors), max(self._num_tensors.values(), default=0)).double()
        self.signal_names = tuple(signal_names)
        self._row_of = {name: row for row, name in enumerate(clients)}
        self._mask_columns = _MASK_COLUMNS if has_masks else ()
        width = len(_COLUMNS) + len(signal_names) + len(self._mask_columns)
        self._table = torch.zeros(len(clients), width, dtype=torch.float64)
        self._filled: dict[int, list[float]] = {}
        self._busy = torch.zeros(world_size, dtype=torch.float64)
        self._signals = torch.zeros(world_size, dtype=torch.float64)

    @property
    def parts(self) -> list[Tensor]:
        """The tensors to be summed over ranks, float64 on the CPU."""
        if self._filled:  # all at once: writing single entries of a tensor is slow
            rows = torch.tensor(list(self._filled.values()), dtype=torch.float64)
            self._table[torch.tensor(list(self._filled))] = rows
            self._filled.clear()
        return [self._table, self._busy, self._signals, self._tensors]

    # -- filled by each rank -------------------------------------------------------------------------------------------

    def fill(self, client: str, outcome: Outcome, signals: Signals, rank: int) -> None:
        """Write the row of a client that has trained on ``rank``."""
        if client in self._num_tensors:
            values = torch.tensor(signals.of_tensors, dtype=torch.float64)
            self._tensors[self._row_of[client], : self._num_tensors[client]] = values
        row = [*outcome, 0.0, *(signals.by_name[name] for name in self.signal_names)]
        if self._mask_columns:
            assert signals.mask is not None
            row += map(float, signals.mask)
        self._filled[self._row_of[client]] = row
        self._busy[rank] += outcome.seconds

    def skip(self, client: str, why: Literal["bad update", "no clusters"] = "bad update") -> None:
        """Mark a client whose update is left out."""
        empty = [0.0] * self._table.shape[1]
        empty[_COLUMNS.index("skipped")] = _REASONS[why]
        self._filled[self._row_of[client]] = empty

    def ask_to_stop(self, rank: int, signum: int) -> None:
        """Say that ``rank`` has been asked by a signal to end the run."""
        self._signals[rank] = signum

    # -- read by all ---------------------------------------------------------------------------------------------------

    @property
    def stop_signal(self) -> int | None:
        """The signal that asked a rank to end the run, if there was one."""
        return int(self._signals.max()) or None

    def returned(self, called: Sequence[str]) -> list[str]:
        """Return those of the clients ``called`` whose updates count."""
        skipped = self._table[:, _COLUMNS.index("skipped")].tolist()
        return [name for name in called if not skipped[self._row_of[name]]]

    def warn_of_skipped(self, round_: int, called: Sequence[str]) -> None:
        """Name the clients that are left out of round ``round_``, from 0."""
        column = self._table[:, _COLUMNS.index("skipped")].tolist()
        for why, what in (("bad update", "not finite, or too large"), ("no clusters", "no clusters of their images")):
            if skipped := sorted(name for name in called if column[self._row_of[name]] == _REASONS[why]):
                log.warning("round %d leaves out %s: %s", round_ + 1, ", ".join(skipped), what)

    def report(self, client: str, num_images: int, hardware: Hardware | None = None) -> Report:
        """Return what the server knows about a client."""
        row = self._row_of[client]
        signals = self._table[row, len(_COLUMNS) :][: len(self.signal_names)].tolist()
        of_tensors = self._tensors[row, : self._num_tensors[client]].tolist() if self._num_tensors else ()
        speed = None if hardware is None else hardware.speed(client)
        return Report(num_images, dict(zip(self.signal_names, signals, strict=True)), tuple(of_tensors), speed)

    def masks(self, trained: Sequence[str]) -> dict[str, MaskReport]:
        """Return what each client has pruned, where clients prune.

        Args:
            trained: clients whose updates count.
        """
        if not self._mask_columns:
            return {}
        rows = {name: self._table[self._row_of[name], -len(_MASK_COLUMNS) :].tolist() for name in trained}
        return {name: MaskReport(int(kept), bool(is_new)) for name, (kept, is_new) in rows.items()}

    def images(self, trained: Sequence[str]) -> dict[str, float]:
        """Return how many images each client trained on, over all local epochs.

        Args:
            trained: clients whose updates count.
        """
        column = self._table[:, _COLUMNS.index("images")].tolist()
        return {name: column[self._row_of[name]] for name in trained}

    def metrics(self, trained: Mapping[str, float], wall: float) -> dict[str, float]:
        """Return what is logged about training.

        Args:
            trained: clients whose updates count, with their weights.
            wall: seconds of the whole round.
        """
        loss, correct, images, *_ = self._table.sum(0).tolist()
        skipped = float(self._table[:, _COLUMNS.index("skipped")].count_nonzero())
        metrics = {"train/clients": float(len(trained)), "train/skipped": skipped, "time/round_seconds": wall}
        metrics |= {f"time/busy_share_rank{rank}": seconds / wall for rank, seconds in enumerate(self._busy.tolist())}
        if images:
            metrics |= {"train/loss": loss / images, "train/accuracy": correct / images}
        if len(self._row_of) <= MAX_NAMES:  # of all clients: a sample of a few each round comes to many in the end
            for name, values in self.of_clients(list(trained)).items():
                keys = ("loss", *(key for key in ("clusters", "clustered") if key in values), *self.signal_names)
                metrics |= {f"train/{name}/{key}": values[key] for key in keys}
            if self.signal_names:  # other weights are known beforehand
                metrics |= {f"train/{name}/weight": weight for name, weight in trained.items()}
        return metrics

    def of_clients(self, trained: Sequence[str]) -> dict[str, dict[str, float]]:
        """Return what is known about each client: loss and accuracy (means over images), images, seconds, signals.

        Of clients without identities also the clusters of the last local epoch, and the share of their images in them.

        Args:
            trained: clients whose updates count.
        """
        found = {}
        for name in trained:
            row = self._table[self._row_of[name]].tolist()
            loss, correct, images, seconds, clusters, clustered = row[: len(_COLUMNS) - 1]
            signals = row[len(_COLUMNS) :][: len(self.signal_names)]
            seen = max(images, 1)
            found[name] = {"loss": loss / seen, "accuracy": correct / seen, "images": images, "seconds": seconds}
            if clusters >= 0:
                found[name] |= {"clusters": clusters, "clustered": clustered}
            found[name] |= dict(zip(self.signal_names, signals, strict=True))
        return found


def publish(trainer: Trainer, round_: int, metrics: Mapping[str, float]) -> None:
    """Give a round's numbers to loggers and callbacks.

    Straight to them: Lightning's own bookkeeping takes a quarter of a millisecond per number.

    Args:
        trainer: whose loggers and callbacks they are.
        round_: from 0.
        metrics: by name.
    """
    for logger in trainer.loggers:
        logger.log_metrics({**metrics, "epoch": round_}, step=round_)
    values = torch.tensor([*metrics.values()])  # one for all numbers takes hardly longer than for each
    trainer.callback_metrics.update(zip(metrics, values.unbind(), strict=True))


def as_oracle(scores: Mapping[str, float]) -> dict[str, float]:
    """Rename test scores by which a model could be chosen: only under a name that says what that is.

    >>> as_oracle({"test/mAP": 0.5, "test/global/market1501/mAP": 0.6})
    {'oracle/mAP': 0.5, 'test/global/market1501/mAP': 0.6}
    """
    return {f"oracle/{k.removeprefix('test/')}" if k.count("/") == 1 else k: v for k, v in scores.items()}
