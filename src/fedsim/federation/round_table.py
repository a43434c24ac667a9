"""The numbers that ranks exchange at the end of a round: one row per client, filled by the rank that trained it."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from fedsim.core.errors import BadUpdateError, LeftOutError, NoClustersError
from fedsim.core.names import metric_name
from fedsim.core.work import ROLES, Counts, Role, Work
from fedsim.training.client import Outcome
from fedsim.training.messages import Report

log = logging.getLogger(__name__)

_COMMON = ("loss", "correct", "images", "seconds", "skipped")
_REASONS = (BadUpdateError, NoClustersError)  # column ``skipped``: position here, from 1; 0: the update counts


class Columns(NamedTuple):
    """Names of further columns. NaN: the client has no such number."""

    facts: tuple[str, ...] = ()
    """numbers that are logged for each client"""
    signals: tuple[str, ...] = ()
    """numbers measured for the server's weights; logged, too"""
    traffic: tuple[str, ...] = ()
    """numbers only for the ledger"""
    tensors: tuple[str, ...] = ()
    """numbers for each shared parameter tensor, in separate tables"""

    @property
    def names(self) -> tuple[str, ...]:
        """All columns of the main table."""
        return self.facts + self.signals + self.traffic


class SessionReport(NamedTuple):
    """The numbers of a client session on one rank."""

    sends: bool
    """whether this rank sends the results: of a rank group, only the first does"""
    outcome: Outcome | None = None
    """None: the update is left out"""
    numbers: Mapping[str, float] = MappingProxyType({})
    """column -> number; a missing one becomes NaN"""
    tensors: Mapping[str, Sequence[float]] = MappingProxyType({})
    """column -> one number for each shared parameter tensor"""
    left_out: LeftOutError | None = None
    """the reason, if the update is left out"""
    work: Mapping[Role, Counts] = MappingProxyType({})
    """this rank's part of the images and steps, also if the update is left out"""


class RoundTable:
    """Numbers of a round. Entries of other ranks are zero until the strategy has summed :attr:`parts`.

    Args:
        clients: names of the clients that are called, in the order of the rows.
        columns: further columns.
        world_size: number of ranks.
        num_tensors: client -> number of its shared parameter tensors, if there are numbers for each.
        named: whether numbers of single clients are logged.
    """

    def __init__(
        self,
        clients: Sequence[str],
        columns: Columns,
        world_size: int,
        num_tensors: Mapping[str, int],
        named: bool = True,
    ) -> None:
        self._columns, self._num_tensors, self._named = columns, num_tensors, named
        shape = (len(clients), max(self._num_tensors.values(), default=0))
        self._tensors = {name: torch.zeros(shape, dtype=torch.float64) for name in columns.tensors}
        self._row_of = {name: row for row, name in enumerate(clients)}
        self._table = torch.zeros(len(clients), len(_COMMON) + len(columns.names), dtype=torch.float64)
        self._filled: dict[int, list[float]] = {}
        self._seconds = [0.0] * world_size  # a list until the exchange: writing single entries of a tensor is slow
        self._busy = torch.zeros(world_size, dtype=torch.float64)
        self._work_here = {role: Work() for role in ROLES}
        self._work = torch.zeros(len(ROLES), 2, dtype=torch.float64)
        self._peaks = torch.zeros(world_size, dtype=torch.float64)
        self._stop_signals = torch.zeros(world_size, dtype=torch.float64)

    @property
    def parts(self) -> list[Tensor]:
        """The tensors to be summed over ranks, float64 on the CPU."""
        self._busy = torch.tensor(self._seconds, dtype=torch.float64)
        self._work = torch.tensor([(work.images, work.steps) for work in self._work_here.values()], dtype=torch.float64)
        if self._filled:  # all at once, for the same reason
            rows = torch.tensor(list(self._filled.values()), dtype=torch.float64)
            self._table[torch.tensor(list(self._filled))] = rows
            self._filled.clear()
        return [self._table, self._busy, self._work, self._peaks, self._stop_signals, *self._tensors.values()]

    def enter(self, rank: int, client: str, session: SessionReport) -> None:
        """Enter a client session on ``rank``."""
        if session.outcome is not None:
            self.busy(rank, session.outcome.seconds)
        for role, counts in session.work.items():
            self._work_here[role].add(counts)
        if not session.sends:
            return
        if session.left_out is not None:
            self.skip(client, session.left_out)
        elif session.outcome is not None:
            self.fill(client, session.outcome, session.numbers, session.tensors)

    def fill(
        self, client: str, outcome: Outcome, numbers: Mapping[str, float], tensors: Mapping[str, Sequence[float]]
    ) -> None:
        """Write the row of a client that has trained.

        ``numbers``: column -> number, where a missing one becomes NaN; ``tensors``: column -> one number for each
        shared parameter tensor.
        """
        for name, table in self._tensors.items():
            table[self._row_of[client], : self._num_tensors[client]] = torch.tensor(tensors[name], dtype=torch.float64)
        further = (numbers.get(name, math.nan) for name in self._columns.names)
        self._filled[self._row_of[client]] = [*outcome[:4], 0.0, *further]

    def busy(self, rank: int, seconds: float) -> None:
        """Add the time that a rank has spent on a client."""
        self._seconds[rank] += seconds

    def enter_peak(self, rank: int, num_bytes: int) -> None:
        """Enter the largest memory that ``rank`` had on its GPU in the round."""
        self._peaks[rank] = num_bytes

    def skip(self, client: str, reason: LeftOutError) -> None:
        """Mark a client whose update is left out."""
        empty = [0.0] * self._table.shape[1]
        empty[_COMMON.index("skipped")] = 1.0 + _REASONS.index(type(reason))
        self._filled[self._row_of[client]] = empty

    def ask_to_stop(self, rank: int, signum: int) -> None:
        """Enter a signal that asked ``rank`` to end the run."""
        self._stop_signals[rank] = signum

    @property
    def stop_signal(self) -> int | None:
        """The signal that asked a rank to end the run, if there was one."""
        return int(self._stop_signals.max()) or None

    def returned(self, called: Sequence[str]) -> list[str]:
        """Return the clients among ``called`` whose updates count."""
        skipped = self._skipped.tolist()
        return [name for name in called if not skipped[self._row_of[name]]]

    def warn_of_skipped(self, round_: int, called: Sequence[str]) -> None:
        """Log the clients that are left out of round ``round_``, from 0."""
        column = self._skipped.tolist()
        for number, reason in enumerate(_REASONS, start=1):
            if skipped := sorted(name for name in called if column[self._row_of[name]] == number):
                log.warning("round %d leaves out %s: %s", round_ + 1, ", ".join(skipped), reason.why)

    def report(self, client: str, num_images: int, speed: float | None = None) -> Report:
        """Return the report of a client whose update counts; ``speed`` is that of its device, in images per second."""
        row = self._row_of[client]
        loss, correct, images, seconds, _, *further = self._table[row].tolist()
        numbers = dict(zip(self._columns.names, further, strict=True))
        tensors = {name: table[row, : self._num_tensors[client]].tolist() for name, table in self._tensors.items()}
        return Report(
            num_images, {name: numbers[name] for name in self._columns.signals}, tensors, speed,
            loss=loss / max(images, 1), accuracy=correct / max(images, 1), images=images, seconds=seconds,
            facts={name: numbers[name] for name in self._columns.facts if not math.isnan(numbers[name])},
            traffic={name: numbers[name] for name in self._columns.traffic},
        )  # fmt: skip

    def metrics(
        self, shares: Mapping[str, float], reports: Mapping[str, Report], wall: float, *, on_server: Counts = (0, 0)
    ) -> dict[str, float]:
        """Return the numbers about training for the log.

        ``shares``, the weights, and ``reports`` are those of the clients whose updates count; ``wall`` is the duration
        of the round in seconds; ``on_server`` are the images and steps of the server.
        """
        loss, correct, images, *_ = self._table[:, : len(_COMMON)].sum(0).tolist()
        skipped = float(self._skipped.count_nonzero())
        metrics = {"train/clients": float(len(shares)), "train/skipped": skipped, "time/round_seconds": wall}
        metrics |= self._all_work(on_server)
        metrics |= {f"time/busy_share_rank{rank}": seconds / wall for rank, seconds in enumerate(self._busy.tolist())}
        if images:
            metrics["train/loss"] = loss / images
            if not math.isnan(correct):  # a user's module makes no guesses
                metrics["train/accuracy"] = correct / images
            metrics["time/images_per_second"] = images / wall
        if peak := float(self._peaks.max()):
            metrics["memory/peak_gib"] = peak / 2**30
        if self._named:
            for name, report in reports.items():
                numbers = {"loss": report.loss, **report.facts, **report.signals}
                metrics |= {metric_name("train", name, key): value for key, value in numbers.items()}
            if self._columns.signals:  # other weights do not depend on the round
                metrics |= {metric_name("train", name, "weight"): weight for name, weight in shares.items()}
        return metrics

    def _all_work(self, on_server: Counts) -> dict[str, float]:
        """Return images and steps of all roles together, and of each role besides the clients' models that has some."""
        work = dict(zip(ROLES, self._work.tolist(), strict=True)) | {"server": [*map(float, on_server)]}
        images, steps = (sum(counts) for counts in zip(*work.values(), strict=True))
        metrics = {"train/images": images, "train/steps": steps}
        for role, counts in work.items():
            if role != "client" and any(counts):
                metrics |= {f"train/images_{role}": counts[0], f"train/steps_{role}": counts[1]}
        return metrics

    @property
    def _skipped(self) -> Tensor:
        return self._table[:, _COMMON.index("skipped")]
