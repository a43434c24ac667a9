"""A table of the clients on a terminal while they train."""

from __future__ import annotations

import logging
import math
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, TextIO

import numpy as np
from lightning import LightningModule, Trainer
from numpy.typing import NDArray
from tabulate import tabulate

from fedsim.core.checks import at_least, not_negative
from fedsim.core.extras import load_extra
from fedsim.core.metrics import ACCURACIES, LABELS
from fedsim.core.names import printable
from fedsim.core.placement import Placement
from fedsim.core.shared import memory_folder
from fedsim.federation.callbacks.progress import RoundProgress
from fedsim.federation.callbacks.summary import federation_of
from fedsim.federation.events import num_rounds, strategy_of
from fedsim.strategy.strategy import FederatedStrategy
from fedsim.training.client import BatchReport

_ROUND, _RANK, _SHARE, _LOSS, _SPEED = range(5)
"""columns of a client's numbers: the last round, from 1, that it trained in; its rank there; the share of it that is
done; the last loss; images/s"""
_BAR = 16
"""characters of a client's bar"""
_MAX_SCORES = 6
_OTHER_LINES = 6
"""lines beside those of clients: title, two of headers, number of clients, scores, and that of the cursor"""


class LiveTable(RoundProgress):
    """A table on a terminal: each client with its rank, progress, loss and images/s; below it the last scores.

    Ranks of one machine share these numbers in memory; clients of other machines have none. Without a terminal, lines
    are written as by :class:`RoundProgress`. It needs rich, by the extra ``live``.

    Args:
        interval: seconds between two updates of the table.
        line_interval: seconds without a line after which one is written, if there is no terminal.
        max_rows: clients in the table; of more, those that train now come first.
    """

    def __init__(self, interval: float = 2.0, line_interval: float = 60.0, max_rows: int = 20) -> None:
        super().__init__(interval, line_interval)
        at_least("trainer.callbacks: LiveTable", 1, max_rows=max_rows)
        not_negative("trainer.callbacks: LiveTable", interval=interval, line_interval=line_interval)
        self._rich = load_extra("rich.live", "trainer.callbacks: LiveTable", "live")
        self.max_rows = max_rows
        self._ranks, self._places = dict[str, str](), dict[str, int]()
        self._numbers: NDArray[np.float64] | None = None
        self._live: Any = None
        self._as_text: Any = None
        self._log_streams: list[tuple[logging.StreamHandler[TextIO], TextIO]] = []
        self._scores: Mapping[str, float] = {}
        self._begun: tuple[str, float, int] = ("", 0.0, 0)

    def on_placed(self, placement: Placement) -> None:
        """Keep the rank of each client."""
        super().on_placed(placement)
        texts = {ranks: f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else str(ranks[0]) for ranks in placement.groups}
        self._ranks = {client: text for ranks, text in texts.items() for client in placement.shared_by(ranks)}
        self._places = {client: place for place, client in enumerate(self._ranks)}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open the table, on terminals only, and the numbers that the ranks of a machine share."""
        strategy, self._numbers, self._scores = strategy_of(trainer), None, {}
        if not strategy.broadcast(self._enabled and sys.stderr.isatty()):
            super().on_train_start(trainer, pl_module)
            return
        self._numbers = _shared_numbers(strategy, (len(self._ranks), 5))
        self._rank, self._rounds = strategy.global_rank, num_rounds(trainer)
        if self._enabled:
            self._open()
        self._first, self._started = trainer.current_epoch, time.monotonic()

    def on_round_start(self, round_: int, clients: list[str]) -> None:
        """Begin the time of each client anew: other work lies between rounds."""
        super().on_round_start(round_, clients)
        self._begun = ("", 0.0, 0)

    def on_client_batch(self, report: BatchReport) -> None:
        """Note the numbers of the client, and draw the table if the last one is old."""
        if self._numbers is None:
            super().on_client_batch(report)
            return
        now = time.monotonic()
        row, is_first = self._numbers[self._places[report.client]], report.client != self._begun[0]
        if is_first:
            self._begun = report.client, now, report.images
        is_due = now - self._last >= self.interval
        if not (is_due or is_first or report.share >= 1):
            return
        _, begun, images = self._begun
        speed = (report.images - images) / (now - begun) if now > begun else math.nan
        # reading waits for the device: at each update, and at a session's end
        loss = float(report.loss) if is_due or report.share >= 1 else math.nan
        row[:] = self._round + 1, self._rank, report.share, loss, speed
        if is_due:
            self._last = now
            shares = self._numbers[self._numbers[:, _ROUND] == self._round + 1, _SHARE]
            time_left = self._time_left(self._round + shares.sum() / max(len(self._clients), 1))
            self._draw(f"{self._position(self._round)}{time_left}")

    def on_scoring(self, subject: str) -> None:
        """Show the model and the data set that are scored."""
        super().on_scoring(subject)
        if time.monotonic() - self._last >= self.interval:  # thousands of models may be scored in a second
            self._last = time.monotonic()
            self._draw(f"scoring {subject}")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the line of the round above the table."""
        self._scores = dict(federation_of(pl_module).scores)
        super().on_train_epoch_end(trainer, pl_module)

    def _end_round(self, message: str, done: int) -> None:
        if self._live is None:
            super()._end_round(message, done)
        else:
            self._live.console.print(message, markup=False, highlight=False, soft_wrap=True)
            self._draw(f"{self._position(done - 1)}{self._time_left(done)}")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remove the table; the lines of the rounds stay."""
        super().on_train_end(trainer, pl_module)
        if self._live is not None:
            self._live.stop()
            self._live = self._numbers = None
            for handler, stream in self._log_streams:
                handler.setStream(stream)

    def _open(self) -> None:
        from rich.console import Console
        from rich.text import Text

        self._as_text = Text
        options = {"auto_refresh": False, "transient": True, "redirect_stdout": sys.stdout.isatty()}
        self._live = self._rich.Live(console=Console(stderr=True), **options)
        before = sys.stderr
        self._live.start()  # sys.stderr prints above the table from here on; the log must do so, too
        self._live.console.show_cursor(True)  # a run that is killed would leave the terminal without one
        handlers = [h for h in logging.getLogger().handlers if isinstance(h, logging.StreamHandler)]
        self._log_streams = [(h, h.stream) for h in handlers if h.stream is before]
        for handler, _ in self._log_streams:
            handler.setStream(sys.stderr)

    def _draw(self, title: str) -> None:
        if self._live is not None and self._numbers is not None:
            most = max(1, min(self.max_rows, self._live.console.height - _OTHER_LINES))
            table = table_of(self._ranks, self._numbers, self._round + 1, most, title, self._scores)
            text = self._as_text(table, no_wrap=True, overflow="ellipsis")
            self._live.update(text, refresh=True)


def table_of(
    ranks: Mapping[str, str], numbers: NDArray[np.float64], round_: int, max_rows: int, title: str,
    scores: Mapping[str, float],
) -> str:  # fmt: skip
    """Return the table of clients in round ``round_``, from 1, with lines on all clients and on the scores below it.

    ``ranks``: client -> the rank, or ranks, to which it is dealt; ``numbers`` is float64 [clients, 5], in this order.
    """
    shares = np.where(numbers[:, _ROUND] == round_, numbers[:, _SHARE], np.nan)  # NaN: it takes no part, so far
    shown = np.arange(len(shares))
    if len(shown) > max_rows:
        turn = np.select([(shares > 0) & (shares < 1), shares == 1], [0, 1], 2)
        shown = np.argsort(turn, kind="stable")[:max_rows]
    clients = [*ranks]
    cells = [
        [printable(clients[n]), _rank(numbers[n], ranks[clients[n]]), _bar(shares[n]), _number(numbers[n], _LOSS, 3),
         _number(numbers[n], _SPEED, 0)]
        for n in shown.tolist()
    ]  # fmt: skip
    headers, alignment = ["client", "rank", "progress", "loss", "images/s"], ["left", "right", "left", "right", "right"]
    table = tabulate(cells, headers=headers, disable_numparse=True, colalign=alignment if cells else None)
    hidden = f", {len(shares) - len(shown)} are not shown" if len(shares) > len(shown) else ""
    count = f"{np.count_nonzero(shares == 1)} of {len(shares)} clients are done{hidden}"
    return "\n".join([title, table, count, *scores_in(scores)])


def _rank(values: NDArray[np.float64], dealt: str) -> str:
    """Return the rank that trained a client last; before, those to which it is dealt."""
    return f"{values[_RANK]:.0f}" if values[_ROUND] else dealt


def _number(values: NDArray[np.float64], column: int, digits: int) -> str:
    is_known = values[_ROUND] and not math.isnan(values[column])
    return f"{values[column]:.{digits}f}" if is_known else "-"


def scores_in(scores: Mapping[str, float]) -> list[str]:
    """Return a line with the mAP, or the accuracy, of the last evaluation, by data set, means first; without one none.

    >>> scores_in({"test/global/market1501/mAP": 0.5, "test/global/market1501/rank1": 0.7, "val/mAP": 0.4})
    ['mAP: val 40.0 %, test/global/market1501 50.0 %']
    >>> scores_in({"test/global/omniglot/top1": 0.5})
    ['top-1: test/global/omniglot 50.0 %']
    """
    for metric in ("mAP", *ACCURACIES):
        names = [name for name in scores if name.endswith(f"/{metric}")]
        names = sorted(names, key=lambda name: name.count("/"))[:_MAX_SCORES]
        if names:
            return [
                f"{LABELS.get(metric, metric)}: "
                + ", ".join(f"{printable(n.removesuffix(f'/{metric}'))} {100 * scores[n]:.1f} %" for n in names)
            ]
    return []


def _bar(share: float) -> str:
    if math.isnan(share):
        return "-"
    full = round(share * _BAR)
    return f"{'━' * full}{' ' * (_BAR - full)} {100 * share:3.0f} %"


def _shared_numbers(strategy: FederatedStrategy, shape: tuple[int, int]) -> NDArray[np.float64]:
    """Return zeros that the ranks of this machine share; all ranks call it. Other machines have zeros of their own."""
    path, numbers = "", np.zeros(shape)
    if strategy.global_rank == 0:
        with suppress(OSError):  # a full memory, or a folder that cannot be written to: other ranks have no rows then
            file, path = tempfile.mkstemp(prefix="fedsim-", dir=memory_folder())
            os.posix_fallocate(file, 0, 8 * max(math.prod(shape), 1))  # a write to a hole would end the process
            os.close(file)
    path = strategy.broadcast(path)
    with suppress(OSError):
        if path and shape[0]:
            numbers = np.memmap(path, np.float64, "r+", shape=shape)
    strategy.barrier()
    if path and strategy.global_rank == 0:
        os.unlink(path)  # the memory lasts as long as a rank has it open
    return numbers
