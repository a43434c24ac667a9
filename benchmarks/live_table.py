"""CPU time of the live table of clients over that of the rounds beside it.

The table is drawn on a pseudo-terminal of 40 lines, every two seconds. Its share is the CPU time within its own
methods, of the main thread, over the CPU time of the rounds; lines without a terminal are measured so, too.

    python benchmarks/live_table.py                  # quickstart's network, 6 clients and 400 clients
    python benchmarks/live_table.py --rounds 10
"""

from __future__ import annotations

import argparse
import functools
import os
import pty
import sys
import termios
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from lightning import LightningModule, Trainer
from tabulate import tabulate

from fedsim.cli.describe import FederatedTrainer
from fedsim.data import FederatedDataModule, SyntheticReID
from fedsim.evaluation.settings import Evaluation
from fedsim.federation.callbacks import LiveTable
from fedsim.federation.federation import Federation
from fedsim.methods import FedPav
from fedsim.models import Neck, SmallCNN
from fedsim.strategy.strategy import FederatedStrategy
from fedsim.training.settings import LocalTraining

CASES = {"6 clients": (6, 1.0), "400 clients": (400, 0.1)}
"""name -> clients, scale of their people and images"""
MEASURED = (
    "on_placed", "on_train_start", "on_round_start", "on_client_batch", "on_scoring", "on_train_epoch_end",
    "on_train_end",
)  # fmt: skip


def timed(callback: TimedTable, name: str) -> Callable[..., Any]:
    """Return a method of the callback whose CPU time is added to ``callback.seconds``."""
    method = getattr(callback, name)

    @functools.wraps(method)
    def call(*args: Any) -> Any:
        begin = time.thread_time()
        try:
            return method(*args)
        finally:
            callback.seconds += time.thread_time() - begin

    return call


class TimedTable(LiveTable):
    """The table, which measures itself and the rounds; the first round, which warms up, does not count."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0
        self._begin = self._end = 0.0
        for name in MEASURED:
            setattr(self, name, timed(self, name))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Start the clock after the first round."""
        if trainer.current_epoch == 1:
            self.seconds, self._begin = 0.0, time.process_time()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stop the clock."""
        self._end = time.process_time()

    @property
    def share(self) -> float:
        """CPU time of the table over that of the run without it."""
        return self.seconds / (self._end - self._begin - self.seconds)


def train(case: str, rounds: int) -> TimedTable:
    """Train with a table."""
    clients, scale = CASES[case]
    optimizer = functools.partial(torch.optim.Adam, lr=0.001)
    model = Federation(
        FedPav(), SmallCNN(width=24), Neck(kind="bnneck", dropout=0.0),
        client=LocalTraining(batch_size=16, optimizer=optimizer),
        evaluation=Evaluation(test_during_fit=False),
    )  # fmt: skip
    table = TimedTable()
    trainer = FederatedTrainer(
        accelerator="cpu", devices=1, strategy=FederatedStrategy(), max_epochs=1 + rounds, logger=False,
        enable_checkpointing=False, enable_model_summary=False, num_sanity_val_steps=0,
        use_distributed_sampler=False, limit_val_batches=0, callbacks=[table],
    )  # fmt: skip
    data = FederatedDataModule(SyntheticReID(clients=clients, unseen=1, scale=scale), val="none", size=(64, 32))
    trainer.fit(model, datamodule=data)
    return table


def on_terminal(train_once: Callable[[], TimedTable]) -> TimedTable:
    """Run with a pseudo-terminal in place of the stream of errors; another thread reads what is drawn."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (40, 120))
    threading.Thread(target=lambda: all(iter(lambda: os.read(ours, 65536), b"")), daemon=True).start()
    before, sys.stderr = sys.stderr, os.fdopen(theirs, "w")
    try:
        return train_once()
    finally:
        sys.stderr = before


def main() -> None:
    """Print the shares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    rows = []
    for case in CASES:
        for kind, shown in (("table", on_terminal), ("lines", lambda run: run())):
            table = shown(functools.partial(train, case, rounds))
            rows.append((case, kind, f"{1000 * table.seconds / rounds:.1f}", f"{table.share:.2%}"))
    print(tabulate(rows, headers=["run", "shown as", "CPU-ms in a round", "share"]))


if __name__ == "__main__":
    main()
