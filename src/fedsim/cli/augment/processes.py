"""Processes of ``fedsim augment fit``, each with some of the clients, and how they end when they are asked to.

They share nothing but the folder.
"""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from fedsim.core.errors import DataError, RunStoppedError
from fedsim.core.placement import place
from fedsim.strategy.launch import requeue

log = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class _Heard(BaseException):
    """A signal, raised wherever the main thread is; no Exception, which code there might catch as one of its own."""

    def __init__(self, number: int) -> None:
        self.number = number


@contextmanager
def _handling(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Give signals to ``handler`` until the end of the block."""
    before = {number: signal.signal(number, handler) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


@contextmanager
def ending_on_signals(is_first: bool) -> Iterator[None]:
    """Turn what schedulers send into RunStoppedError, by which files and processes are left in order.

    After SIGUSR1, which Slurm sends to a job whose time runs out, Slurm is asked to start the job again. A process that
    is not the first of its call neither asks nor speaks.
    """

    def stop(number: int, _: FrameType | None) -> None:
        raise _Heard(number)

    with _handling(stop):
        try:
            yield
        except _Heard as heard:
            if is_first:
                log.info("what is trained is kept; the same command continues")
            if is_first and heard.number == signal.SIGUSR1:
                requeue()
            raise RunStoppedError(heard.number) from None


@contextmanager
def _without_interruption() -> Iterator[None]:
    """Let signals wait for the end of the block: a process that was started must not be forgotten."""
    waiting: list[int] = []
    with _handling(lambda number, _: waiting.append(number)):
        yield
    if waiting:
        signal.raise_signal(waiting[0])


def fit_in_processes(names: Sequence[str], processes: int, pretrain: str | None, options: Mapping[str, Any]) -> None:
    """Train the generators of some clients at the same time; that of ``pretrain`` before all others.

    Args:
        names: of the clients.
        processes: how many, at most.
        pretrain: a client, or None.
        options: of the call, as plain values; ``settings`` is the file of what a generator depends on.

    Raises:
        DataError: if a process ended early; the others have come to their end.
    """
    for group in ([name for name in names if name == pretrain], [name for name in names if name != pretrain]):
        if group:  # a generator's steps take the same time at any client
            placement = place(dict.fromkeys(group, 1.0), min(processes, len(group)))
            _run([placement.clients_of(rank) for rank in range(len(placement.loads))], options)


def _run(shares: Sequence[Sequence[str]], options: Mapping[str, Any]) -> None:
    log.info("%d processes: %s", len(shares), "; ".join(", ".join(share) for share in shares))
    running: list[subprocess.Popen[bytes]] = []
    try:
        for row, share in enumerate(shares):
            line = _command(share, row, options)
            with _without_interruption():
                running.append(subprocess.Popen(line, stdout=subprocess.DEVNULL))
        codes = [process.wait() for process in running]
    finally:
        for process in running:  # nothing happens to those that have ended
            process.terminate()
        for process in running:
            process.wait()
    if failed := [(share, code) for share, code in zip(shares, codes, strict=True) if code]:
        share, code = failed[0]
        how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
        raise DataError(
            f"clients {', '.join(share)}: their process {how}; what is trained is kept, the same command continues"
        )


def _command(share: Sequence[str], row: int, options: Mapping[str, Any]) -> list[str]:
    config = options["config"] if isinstance(options["config"], str) else json.dumps(options["config"])
    common = {name: options[name] for name in ("settings", "output", "device", "threads")}
    given = {**common, "config": config, "clients": json.dumps(list(share)), "row": row}
    return [sys.executable, "-m", "fedsim", "augment", "fit", *(f"--{name}={value}" for name, value in given.items())]
