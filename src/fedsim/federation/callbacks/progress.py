"""Progress on the screen: round, client, batch, loss, time left."""

from __future__ import annotations

import logging
import sys
import time
from datetime import timedelta
from typing import Any, NoReturn

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from tqdm import tqdm

from fedsim.core.arguments import ChecksArguments
from fedsim.core.placement import Placement
from fedsim.federation.callbacks.summary import federation_of
from fedsim.federation.events import RoundCallback, num_rounds
from fedsim.training.client import BatchReport

log = logging.getLogger(__name__)

_MAX_NAMES = 12  # of clients in one line


class RoundProgress(ChecksArguments, RoundCallback, ProgressBar, option="trainer.callbacks"):
    """One bar over all rounds on a terminal, and one line per round; without a terminal also lines within long rounds.

    Reading a loss makes the host wait for the device, so the bar reads one at most every ``interval`` seconds.

    Args:
        interval: seconds between two updates of the bar.
        line_interval: seconds without a line after which one is written, if there is no terminal.
    """

    def __init__(self, interval: float = 0.2, line_interval: float = 60.0) -> None:
        super().__init__()
        self.interval, self.line_interval, self._last = interval, line_interval, 0.0
        self._first, self._started = 0, 0.0
        self._rounds: int | None = None  # without a last one
        self._enabled = True
        self._bar: tqdm[NoReturn] | None = None
        self._round, self._clients = 0, list[str]()

    def disable(self) -> None:
        """Stop printing (Lightning calls this on all ranks but the first)."""
        self._enabled = False

    def enable(self) -> None:
        """Print again."""
        self._enabled = True

    def on_placed(self, placement: Placement) -> None:
        """Print the clients of each rank, and the predicted speed-up by several ranks."""
        if not self._enabled:
            return
        for ranks in placement.groups:
            names = placement.shared_by(ranks)
            more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
            trainers = f"rank {ranks[0]} trains" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]} train"
            _say(f"{trainers} {', '.join(names[:_MAX_NAMES]) or 'no client'}{more}")
        if len(placement.loads) > 1:
            _say(f"predicted speed-up {placement.speedup:.2f}x, efficiency {100 * placement.efficiency:.0f} %")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open the bar, on terminals only."""
        self._first, self._started, self._rounds = trainer.current_epoch, time.monotonic(), num_rounds(trainer)
        self._last = self._started
        if self._enabled and sys.stderr.isatty():
            layout = "{l_bar}{bar:24}| {n:.1f}/{total} rounds [{elapsed}<{remaining}]{postfix}"
            done = trainer.current_epoch
            self._bar = tqdm(
                total=self._rounds or None, initial=done, unit="round", bar_format=layout, dynamic_ncols=True
            )

    def on_round_start(self, round_: int, clients: list[str]) -> None:
        """Store the clients of the round."""
        self._round, self._clients = round_, clients

    def on_client_batch(self, report: BatchReport) -> None:
        """Move the bar, or write a line if the last one is old."""
        pause = self.line_interval if self._bar is None else self.interval
        if not self._enabled or time.monotonic() - self._last < pause:
            return
        self._last = time.monotonic()
        position = self._clients.index(report.client)
        done = self._round + (position + report.share) / len(self._clients)
        status = f"{report.client} ({position + 1}/{len(self._clients)}), batch {report.done}/{report.total}"
        status += f", loss {float(report.loss):.3f}"
        if self._bar is None:
            _say(f"{self._position(self._round)}: {status}{self._time_left(done)}")
        else:
            self._bar.n = done
            self._bar.set_postfix_str(status)

    def _position(self, round_: int) -> str:
        return f"round {round_ + 1}" + ("" if self._rounds is None else f"/{self._rounds}")

    def _time_left(self, done: float) -> str:
        """Return the time for the remaining rounds at the average pace; empty if unknown. ``done``: rounds."""
        if done <= self._first or self._rounds is None or self._rounds <= done:
            return ""
        seconds = (time.monotonic() - self._started) * (self._rounds - done) / (done - self._first)
        return "" if seconds > timedelta.max.total_seconds() else f", about {timedelta(seconds=round(seconds))} left"

    def on_scoring(self, subject: str) -> None:
        """Show the model and the data set that are scored."""
        if self._bar is not None:
            self._bar.set_postfix_str(f"scoring {subject}")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print a line about the round."""
        if not self._enabled:
            return
        federation = federation_of(pl_module)
        metrics = {**federation.scores, **federation.round_metrics}
        names = {"train/loss": "loss", "train/accuracy": "accuracy", "time/round_seconds": "seconds"}
        names |= {"time/images_per_second": "images/s", "memory/peak_gib": "peak GiB"}
        names |= {"time/simulated_seconds": "simulated seconds", "time/clock": "of all rounds"}
        monitor, every = federation.settings.evaluation.monitor, trainer.check_val_every_n_epoch or 1
        if (trainer.current_epoch + 1) % every == 0:  # else the score would be that of an earlier round
            names[monitor] = monitor.replace("/", " ")
        shown = ", ".join(f"{short} {float(metrics[name]):.3f}" for name, short in names.items() if name in metrics)
        busy = [f"{100 * float(v):.0f}" for name, v in metrics.items() if name.startswith("time/busy_share_rank")]
        if 1 < len(busy) <= _MAX_NAMES:
            shown += f", ranks busy {'/'.join(busy)} %"
        self._last = time.monotonic()
        self._end_round(f"{self._position(trainer.current_epoch)}: {shown}", trainer.current_epoch + 1)

    def _end_round(self, message: str, done: int) -> None:
        """Write the line of a round; ``done``: rounds."""
        if self._bar is None:
            _say(message + self._time_left(done))
        else:
            self._bar.write(message, file=sys.stderr)
            self._bar.n = done
            self._bar.refresh()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Close the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Close the bar, so that the error starts on a new line."""
        self.on_train_end(trainer, pl_module)

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """Return nothing: the bar and the lines already contain the metrics."""
        return {}


def _say(message: str) -> None:
    """Write a line to the log; where the log shows none, as in a script that has set up no logging, to stderr."""
    if log.isEnabledFor(logging.INFO):
        log.info("%s", message)
    else:
        sys.stderr.write(f"{message}\n")
