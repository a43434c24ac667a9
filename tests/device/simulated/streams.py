"""The order of work on several streams: what may run at the same time, and memory that is given back too early.

Each stream has a clock: how much of each stream's work is done before its next. A use of memory must come after the
last write to it, and a write after all uses. Nothing is watched until a program makes a stream of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

DEFAULT = 0

Clock = dict[int, int]


@dataclass
class _Used:
    """What streams did with a storage."""

    storage: StorageWeakRef
    home: int
    """the stream that it was allocated on; memory that is given back is used there again"""
    written: Clock
    """the last write: one stream, and its time"""
    read: Clock = field(default_factory=dict)
    kept: set[int] = field(default_factory=set)
    """streams that record_stream named"""


class Streams:
    """The streams of a GPU, and the current one."""

    def __init__(self, refuse: Callable[[str], None]) -> None:
        self.current, self._refuse = DEFAULT, refuse
        self._clocks: dict[int, Clock] = {DEFAULT: {DEFAULT: 1}}
        self._used: dict[int, _Used] = {}
        self._foreign: dict[int, _Used] = {}

    @property
    def are_several(self) -> bool:
        """Whether the program has made a stream."""
        return len(self._clocks) > 1

    def open(self) -> int:
        """Return the number of a new stream, which has waited for nothing."""
        number = len(self._clocks)
        self._clocks[number] = {number: 1}
        return number

    @contextmanager
    def on(self, stream: int) -> Iterator[None]:
        """Make a stream the current one."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def now(self, stream: int) -> Clock:
        """Return a stream's clock at this moment."""
        return dict(self._clocks[stream])

    def wait(self, stream: int, clock: Clock) -> None:
        """Let a stream's next work come after what ``clock`` says."""
        mine = self._clocks[stream]
        for other, time in clock.items():
            mine[other] = max(mine.get(other, 0), time)

    def host_waits(self, stream: int | None = None) -> None:
        """The host has waited for a stream, or for all: whatever it launches now comes after that."""
        for known in [stream] if stream is not None else list(self._clocks):
            for other in self._clocks:
                self.wait(other, self.now(known))

    def keep(self, tensor: Tensor, stream: int) -> None:
        """``tensor.record_stream(stream)``."""
        self._entry(tensor.untyped_storage()).kept.add(stream)

    def work(self, read: list[torch.UntypedStorage], written: list[torch.UntypedStorage], what: str) -> None:
        """The current stream reads and writes memory."""
        if not self.are_several:
            return
        stream, clock = self.current, self._clocks[self.current]
        self._check_freed(stream, clock)
        time = clock[stream] = clock[stream] + 1
        for storages, writes in ((read, False), (written, True)):
            for storage in storages:
                used = self._entry(storage)
                earlier = used.written | used.read if writes else used.written
                if late := [other for other, t in earlier.items() if clock.get(other, 0) < t]:
                    self._refuse(f"a race: {what} on stream {stream} does not wait for stream {late[0]}")
                if writes:
                    used.written, used.read = {stream: time}, {}
                else:
                    used.read[stream] = time
                if stream != used.home and stream not in used.kept:
                    self._foreign[storage._cdata] = used

    def _entry(self, storage: torch.UntypedStorage) -> _Used:
        found = self._used.get(storage._cdata)
        if found is None or found.storage.expired():
            # older than the first stream, or just made
            found = _Used(StorageWeakRef(storage), DEFAULT, {DEFAULT: 1})
            self._used[storage._cdata] = found
        return found

    def made(self, storage: torch.UntypedStorage) -> None:
        """Memory was allocated on the current stream."""
        if self.are_several:
            self._used[storage._cdata] = _Used(StorageWeakRef(storage), self.current, {})

    def _check_freed(self, stream: int, clock: Clock) -> None:
        """Refuse work on a stream whose allocator may have got memory back that another one still uses."""
        for address, used in list(self._foreign.items()):
            if used.home != stream or not used.storage.expired():
                continue
            del self._foreign[address]
            uses = used.written | used.read
            if late := [o for o, t in uses.items() if o not in used.kept and clock.get(o, 0) < t]:
                self._refuse(
                    f"a race: memory of stream {stream} was given back while {late[0]} uses it (record_stream)"
                )
