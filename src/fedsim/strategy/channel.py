"""The control channel: signs of life and error reports between ranks while each of them trains its own clients.

Ranks meet in collectives once a round, which may take hours. Meanwhile a thread of each rank writes a line with a sign
of life (a counter), and a report if the rank stops, to a small key-value store, and reads the lines of the other ranks.
Checks only read a variable. Another thread looks whether the main thread gets on; a rank that hangs reports it, and
ends.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import NoReturn, Protocol

from fedsim.core.errors import PeerError, RunStoppedError
from fedsim.core.owned_folders import remove_abandoned_folders, remove_owned_folders
from fedsim.core.parents import follow_parent
from fedsim.core.progress import note_progress
from fedsim.core.shared import memory_folder, slow_folder
from fedsim.strategy.main_thread import MainThread
from fedsim.strategy.stopped import continue_process, identity

_PERIOD = 0.5  # seconds between two readings of the other ranks' lines
_PATIENCE = 5.0  # seconds for a main thread to notice an error; it may wait in a collective that never ends
_END_PATIENCE = 10.0  # seconds for the end of Python after a failure, in a script; it may wait for a lost rank
_LINGER = 3.0  # seconds that a failing rank stays, so that the others can read its report

_ending = threading.Event()  # Python ends, after a failure

_ABANDON = "abandon:"
_FAILED = "failed:"
_DONE = "done:"
_LOST = "lost:"


class Store(Protocol):
    """The methods of ``torch.distributed.Store`` that the channel uses."""

    def set(self, key: str, value: str) -> None:
        """Set a key."""

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return values; waits for keys that do not exist."""


class ControlChannel:
    """One rank's end of the channel; after ``silence`` seconds without a sign of life a rank counts as lost."""

    def __init__(self, store: Store, rank: int, world_size: int, silence: float) -> None:
        self._store, self._rank, self._silence = store, rank, silence
        self._others = set(range(world_size)) - {rank}
        self.activity = "start"
        """the present work of this rank, for error messages of the other ranks"""
        self.last_act: Callable[[int], None] = lambda _: None
        """called with the signal's number before a forced end of this process, while its main thread is busy"""
        self.dead_ranks: Callable[[], Sequence[int]] = tuple
        """returns the ranks whose processes have ended, the first one first, as far as this rank knows"""
        self._main = MainThread()
        self._report = ""
        self._readers: set[int] = set()  # ranks that have read our report
        self._acknowledged: set[int] = set()  # ranks whose report we have read
        self._error: Exception | None = None
        self._error_since = 0.0
        self._beat = 0
        # silence is counted in our own waits, not in seconds: a rank was not silent while this process was frozen
        self._beats: dict[int, tuple[str, int]] = {}  # rank -> (last beat, number of waits without a newer one)
        self._activities: dict[int, str] = {}  # rank -> its last activity
        self._identities: dict[int, str] = {}  # rank -> its process
        self._idle = 0  # waits of the guard since the other ranks' lines were read
        self._wake = threading.Event()
        self._closing = threading.Event()
        # two threads: if rank 0 is frozen, a thread that reads its store is frozen, too
        self._threads = [
            threading.Thread(target=target, name=f"fedsim {target.__name__}", daemon=True)
            for target in (self._guard, self._look)
        ]

    def start(self) -> None:
        """Write the first sign of life; all ranks must have done so before any of them calls :meth:`watch`."""
        self._write()

    def watch(self) -> None:
        """Start to read the lines of the other ranks."""
        for thread in self._threads:
            thread.start()

    # -- the main thread's side ----------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise PeerError if another rank failed or fell silent, RunStoppedError if one abandoned the round."""
        if self._error is not None:
            raise self._error

    def await_news(self) -> NoReturn:
        """Wait until the thread has read why a collective broke, and raise it: a PeerError, or RunStoppedError."""
        before, deadline = dict(self._beats), time.monotonic() + 3 * _PERIOD
        while self._error is None and time.monotonic() < deadline:
            self._wake.set()
            time.sleep(0.05)
        silent = [rank for rank, (beat, _) in self._beats.items() if rank in before and before[rank][0] == beat]
        silent = [rank for rank in silent if rank not in self._acknowledged]
        lost = [*self.dead_ranks(), *(rank for ranks in (silent, self._others) if len(ranks) == 1 for rank in ranks)]
        problem = "ended without a word, or did not answer in time"
        if lost:
            self._note(PeerError(f"rank {lost[0]} {problem}, in {self._activities.get(lost[0], 'start')}", lost[0]))
        self._note(PeerError(f"another rank {problem}"))
        assert self._error is not None
        raise self._error

    def fail(self, message: str) -> None:
        """Report to the other ranks that this rank stops, and wait until they have read it."""
        self._send(f"{_FAILED}{self.activity}: {message}")

    def abandon(self, signum: int) -> None:
        """Ask the other ranks to abandon the round because of a signal, and wait until they have read it."""
        self._send(f"{_ABANDON}{signum}")

    def close(self) -> None:
        """Report that this rank is done; rank 0, which holds the store, leaves last."""
        in_order = not self._report and self._error is None
        if in_order:
            self._report = _DONE
            if self._rank == 0:  # wait for the reports of the ranks that still run
                soon = time.monotonic() + _PERIOD  # usually they leave now; later, silence counts again
                while not self._others <= self._acknowledged and self._error is None:
                    note_progress()
                    if time.monotonic() < soon:
                        self._wake.set()
                    time.sleep(0.02)
        self._closing.set()
        if in_order:  # else a thread may wait for a store that never answers
            self._wake.set()
            for thread in self._threads:
                thread.join(timeout=_PERIOD)
            with suppress(Exception):  # rank 0 may be gone already, with the store
                self._write()

    def _send(self, report: str) -> None:
        """Write our first report, and wait until the other ranks have read it, or are leaving themselves."""
        if self._report:
            return
        self._report, deadline = report, time.monotonic() + _LINGER
        while not self._others <= self._readers | self._acknowledged and time.monotonic() < deadline:
            self._wake.set()
            time.sleep(0.02)

    # -- the threads' side ---------------------------------------------------------------------------------------------

    def _guard(self) -> None:
        """End this process if its main thread does not notice an error in time, or hangs."""
        while not self._closing.wait(_PERIOD):
            self._idle += 1
            self._main.look()
            if self._main.hangs(self._silence / _PERIOD) and self._error is None and not self._closing.is_set():
                self._end_hanging()
            if self._idle * _PERIOD > self._silence:
                self._note(PeerError(f"rank 0 gave no sign of life for {self._silence:.0f} s", 0))
            is_late = self._error is not None and time.monotonic() - self._error_since > _PATIENCE
            if is_late and not self._closing.is_set():
                if isinstance(self._error, RunStoppedError):
                    self.last_act(self._error.signum)
                    end_process(str(self._error), 128 + self._error.signum)
                end_process(str(self._error))

    def _end_hanging(self) -> None:
        """Report that the main thread hangs, and end this process; another rank that has read the report prints it."""
        message = (
            f"no progress for {self._silence:.0f} s at {self._main.place()}; if this step of the work takes so long, "
            "raise trainer.strategy.silence_timeout, or note progress in it (docs/failures.md)"
        )
        self.fail(message)
        end_process("" if self._readers else f"rank {self._rank} stopped in {self.activity}: {message}")

    def _look(self) -> None:
        peers = sorted(self._others)
        while not self._closing.is_set() and self._error is None:
            waited = not self._wake.wait(_PERIOD)
            self._wake.clear()
            try:
                self._write()
                values = self._store.multi_get([_key(rank) for rank in peers])
            except Exception as error:  # of any type: the store is gone, with rank 0 or torchrun's agent
                if not self._closing.is_set():
                    doing, class_name = self._activities.get(0, "start"), type(error).__name__
                    self._note(PeerError(f"rank 0 (or its launcher) ended without a word in {doing} ({class_name})", 0))
                return
            self._idle = 0
            for rank, value in zip(peers, values, strict=True):
                self._read(rank, value.decode(), waited)
        if self._acknowledged or self._report:  # failed ranks need not stay; the others learn which rank is lost
            with suppress(Exception):
                self._write()

    def _write(self) -> None:
        """Write our line: beat, the ranks whose report we have read, process, activity, report."""
        self._beat += 1
        acknowledged = ",".join(map(str, sorted(self._acknowledged)))
        parts = [str(self._beat), acknowledged, identity(), self.activity, self._report]
        self._store.set(_key(self._rank), "\n".join(parts))

    def _read(self, rank: int, line: str, waited: bool) -> None:
        beat, acknowledged, self._identities[rank], activity, report = line.split("\n", 4)
        self._activities[rank] = activity
        if str(self._rank) in acknowledged.split(","):
            self._readers.add(rank)
        if report:
            self._acknowledged.add(rank)
            if report.startswith(_FAILED):
                self._note(PeerError(f"rank {rank} stopped in {report.removeprefix(_FAILED)}", rank))
            elif report.startswith(_ABANDON):
                self._note(RunStoppedError(int(report.removeprefix(_ABANDON))))
            elif report.startswith(_LOST):
                lost, _, message = report.removeprefix(_LOST).partition(":")
                self._note(PeerError(message, int(lost)))
        elif rank not in self._beats or self._beats[rank][0] != beat:
            self._beats[rank] = (beat, 0)
        elif waited:
            times = self._beats[rank][1] + 1
            self._beats[rank] = (beat, times)
            if times * _PERIOD > self._silence:
                self._note(PeerError(f"rank {rank} gave no sign of life for {self._silence:.0f} s in {activity}", rank))

    def _note(self, error: Exception) -> None:
        if self._error is not None or self._report not in ("", _DONE):  # a failed rank has an error of its own
            return
        self._error, self._error_since = error, time.monotonic()
        if isinstance(error, PeerError) and error.rank is not None and not self._report:
            self._report = f"{_LOST}{error.rank}:{error}"  # else ranks that end because of it would be named, too
            continue_process(self._identities.get(error.rank, ""))


@cache
def end_with_launcher(pid: int) -> None:
    """End this process when its parent is no longer ``pid``; a second call with the same number does nothing."""
    if os.getppid() == pid:
        follow_parent(pid, signal.SIGCONT)  # a stopped rank would not see it

    def watch() -> None:
        while os.getppid() == pid:
            time.sleep(_PERIOD)
        end_process("the launcher of this process has ended")

    threading.Thread(target=watch, name="fedsim launcher", daemon=True).start()


def end_with_python(patience: float = _END_PATIENCE) -> None:
    """End this process with code 2 if Python takes longer than ``patience`` seconds to end.

    After a peer is lost, the end of process groups may wait for it for ever. A program that goes on is left alone.
    """
    atexit.unregister(_ending.set)  # the last to be registered is the first to be called: before the end of groups
    atexit.register(_ending.set)
    _await_end(patience)


@cache
def _await_end(patience: float) -> None:
    def watch() -> None:
        _ending.wait()
        time.sleep(patience)
        end_process(f"the end of Python takes longer than {patience:.0f} s after a rank has failed; this process ends")

    threading.Thread(target=watch, name="fedsim end", daemon=True).start()


def _key(rank: int) -> str:
    return f"fedsim/{rank}"


def end_process(message: str, code: int = 2) -> None:
    """End the process from a thread, even if its main thread is busy; without a message if it is empty."""
    with suppress(OSError):  # the reader of our output may be gone
        sys.stderr.write(f"fedsim: error: {message}\n" * bool(message))
        sys.stderr.flush()
    with suppress(OSError):
        remove_owned_folders()
        remove_abandoned_folders([memory_folder(), slow_folder()])  # those of a rank 0 that was killed
    os._exit(code)
