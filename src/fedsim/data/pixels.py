"""Batches of images for a model: from memory, from a mapped file, or read by worker processes.

Also images decoded to memory at the start of a run, by threads. Pillow frees the interpreter while it decodes and
resizes, so threads work side by side. Pixels, order, errors and progress do not depend on their number.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from fedsim.core.errors import ConfigError, DataError
from fedsim.core.parents import follow_parent
from fedsim.core.progress import note_progress
from fedsim.core.transfer import send
from fedsim.data.images import CHUNK, ImageArray, Images, Size
from fedsim.data.reading import QUIET

log = logging.getLogger(__name__)

_LONGEST = 240.0
"""seconds for a batch from the reading processes; less than silence_timeout, so that this message comes first"""


class Pixels(ABC):
    """n decoded images: uint8 [n, 3, H, W], RGB."""

    num_values: int  # per image: 3 H W
    is_far = True
    """whether batches must be copied to the device"""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def batches(self, order: Sequence[Tensor]) -> Iterator[Tensor]:
        """Yield batches on the device; ``order`` has the positions [m] int64 of each batch's images.

        Raise DataError if an image cannot be read; the message names it.
        """

    @abstractmethod
    def part(self, rows: slice) -> Pixels:
        """Return some of the images."""


def on_device(pixels: Tensor, name: str, device: torch.device) -> Tensor:
    """Return the decoded training images of ``name`` on a device; raise ConfigError if they do not fit there."""
    try:
        return pixels.to(device)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"data.cache: the {len(pixels)} images of {name} ({pixels.nbytes / 2**30:.1f} GiB) do not fit on the "
            "device; set it to host"
        ) from error


class HeldPixels(Pixels):
    """Decoded images uint8 [n, 3, H, W], on the device or in host memory; ``device`` is that of the batches.

    Images that are ``moved_as`` those of a name go to the device with the first batch, as another rank may train the
    client instead.
    """

    def __init__(self, pixels: Tensor, device: torch.device, moved_as: str | None = None) -> None:
        self.pixels, self.device, self._moved_as = pixels, device, moved_as
        self.num_values = pixels[0].numel() if len(pixels) else 0
        self.is_far = moved_as is None and pixels.device != device

    def __len__(self) -> int:
        return len(self.pixels)

    def batches(self, order: Sequence[Tensor]) -> Iterator[Tensor]:
        """Gather each batch; see :meth:`Pixels.batches`. Raise ConfigError if the device has no room for them."""
        if self._moved_as is not None:
            self.pixels = on_device(self.pixels, self._moved_as, self.device)
        for index in order:
            note_progress()
            rows = send(index, self.pixels.device)
            yield send(self.pixels.index_select(0, rows), self.device)

    def part(self, rows: slice) -> HeldPixels:
        """Return a view of some of the images."""
        return HeldPixels(self.pixels[rows], self.device)


class ReadPixels(Pixels):
    """Images, files or mapped ones, that are read again for every batch, in this ``size``; batches are on ``device``.

    ``workers`` processes read ahead; with 0 this process reads, which is best for mapped files.
    """

    def __init__(self, images: Images, size: Size, device: torch.device, workers: int) -> None:
        self.images, self.size, self.device, self.workers = images, size, device, workers
        self.num_values = 3 * size[0] * size[1]

    def __len__(self) -> int:
        return len(self.images)

    def batches(self, order: Sequence[Tensor]) -> Iterator[Tensor]:
        """Read each batch; see :meth:`Pixels.batches`."""
        for batch in read_batches(self.images, self.size, [index.tolist() for index in order], self.workers):
            if batch.problems:
                raise DataError(next(iter(batch.problems.values())))
            yield send(batch.pixels, self.device)

    def part(self, rows: slice) -> ReadPixels:
        """Return some of the images."""
        return ReadPixels(self.images.take(np.arange(len(self))[rows]), self.size, self.device, self.workers)


class ReadBatch(NamedTuple):
    """A batch of images, with its problems."""

    pixels: Tensor
    """uint8 [m, 3, H, W]; an unreadable image is black"""
    problems: dict[int, str]
    """position in the whole list -> the reason why the image is unreadable"""


def read_batches(images: Images, size: Size, order: Sequence[Sequence[int]], workers: int) -> Iterator[ReadBatch]:
    """Read batches of images; ``order`` has the positions of each batch's images. See :class:`ReadPixels`.

    Raises:
        DataError: if the reading processes hand over no batch for four minutes.
    """
    reader = _Reader(images, size)
    handed_over = _started(reader, order, workers) if workers else ""
    if isinstance(handed_over, str):
        if handed_over:
            log.warning("data.workers: no reading processes (%s); this process reads, more slowly", handed_over)
        for positions in order:
            yield reader.__getitems__(positions)
            note_progress()
        return
    for pixels, problems in _in_time(handed_over):
        note_progress()
        yield ReadBatch(torch.from_numpy(pixels), problems)


def problem_of_readers(workers: int) -> str:
    """Let reading processes hand over small batches; return the reason if this machine cannot start them."""
    order = [[number] for number in range(2 * workers)]
    reader = _Reader(ImageArray(np.zeros((len(order), 8, 8, 3), np.uint8)), (8, 8))
    handed_over = _started(reader, order, workers)
    if isinstance(handed_over, str):
        return handed_over
    return "" if len(list(_in_time(handed_over))) == len(order) else "batches were lost"


def _started(reader: _Reader, order: Sequence[Sequence[int]], workers: int) -> Iterator[_Packed] | str:
    """Return the batches of reading processes, or the reason why the machine cannot start them."""
    loader = DataLoader(
        reader,
        batch_sampler=order,  # type: ignore[arg-type] # any iterable of lists will do
        num_workers=min(workers, max(len(order), 1)),
        collate_fn=_packed,  # type: ignore[arg-type] # gets the result of __getitems__
        worker_init_fn=_leave_signals_to_the_parent,
        timeout=_LONGEST,
        generator=torch.Generator(),  # otherwise workers' seeds would come from the global stream, which models use
    )
    before, reason = {*multiprocessing.active_children()}, ""
    with _signals_blocked(), _without_remarks():
        try:
            return iter(loader)
        except (OSError, RuntimeError) as error:  # no semaphores without /dev/shm, or too many processes
            reason = str(error) or type(error).__name__
    for child in {*multiprocessing.active_children()} - before:
        child.kill()
    return reason


@contextmanager
def _without_remarks() -> Iterator[None]:
    """Hide the remark of a loader that is removed half made: it looks for fields that it does not have yet."""
    before, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        yield
    finally:
        sys.unraisablehook = before


def _in_time(batches: Iterator[_Packed]) -> Iterator[_Packed]:
    """Yield the batches; the DataLoader waits for each of them only for so long."""
    try:
        yield from batches
    except RuntimeError as error:
        if "timed out" not in str(error):
            raise
        raise DataError(
            f"data.workers: the reading processes gave no batch for {_LONGEST:.0f} s; check that the images can be "
            "read (a network disk may hang), or read them without processes: --data.workers 0"
        ) from error


class _Reader(Dataset[ReadBatch]):
    def __init__(self, images: Images, size: Size) -> None:
        self.images, self.size = images, size

    def __len__(self) -> int:
        return len(self.images)

    def __getitems__(self, positions: Sequence[int]) -> ReadBatch:
        """Return errors instead of raising them: the message of a worker's error would contain a traceback."""
        try:
            return ReadBatch(self.images.take(np.asarray(positions, dtype=np.int64)).decode(self.size), {})
        except DataError:  # find the unreadable images, one by one
            pass
        pixels = torch.zeros((len(positions), 3, *self.size), dtype=torch.uint8)
        problems = {}
        for row, position in enumerate(positions):
            try:
                pixels[row] = self.images.take(np.array([position])).decode(self.size)[0]
            except DataError as error:
                problems[position] = str(error)
        return ReadBatch(pixels, problems)


_Packed = tuple[NDArray[np.uint8], dict[int, str]]
"""a ReadBatch on its way from a reading process"""


def _packed(batch: ReadBatch) -> _Packed:
    """Let a batch travel through a pipe.

    A tensor would need room in /dev/shm, which containers limit, or a socket in TMPDIR, whose path may be too long. An
    error there would be raised in a thread of the reading process, and this process would wait for ever.
    """
    return batch.pixels.numpy(), batch.problems


_SIGNALS = {signal.SIGINT, signal.SIGUSR1, signal.SIGTERM}


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Block signals in workers that start in this context, and in the threads that torch starts in them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _leave_signals_to_the_parent(worker: int) -> None:  # noqa: ARG001 - the DataLoader's signature
    """Ctrl-C and schedulers signal all processes of a run; a worker that ends then would look like a failure.

    The kernel ends it with its parent: a worker that hangs would not notice the end itself.
    """
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        follow_parent(parent.pid)
    threading.Thread(target=_end_at_the_parents_signal, daemon=True).start()


def _end_at_the_parents_signal() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)


_THREAD = "fedsim decode"  # beginning of the threads' names
_SHORTEST = 8  # images of a part: with fewer, threads wait for each other
Step = Callable[[], None]


def read_all(images: Images, name: str, pixels: Tensor, threads: int) -> Tensor:
    """Read all n images into ``pixels`` uint8 [n, 3, H, W] by at most so many threads, and return it.

    ``name`` is for the progress bar, which appears if reading takes long.

    Raises:
        DataError: naming the first image that cannot be read.
    """
    threads = threads if images.in_threads else 1
    # a part of any thread takes about as long as one of a single thread, if all wait for one slow disk
    parts = list(images.chunks(max(_SHORTEST, CHUNK // threads)))
    steps, start = [], 0
    for part in parts:
        steps.append(partial(_read, part, pixels[start : start + len(part)]))
        start += len(part)
    with QUIET, _in_order(steps, min(threads, len(steps))) as done:
        for step in tqdm(done, f"reading {name}", len(steps), delay=2.0, disable=None, leave=False):
            step()
            note_progress()  # a slow disk is no hang
    return pixels


def _read(part: Images, rows: Tensor) -> None:
    # copied by NumPy: in a new thread, torch would start threads of its own
    rows.numpy()[...] = part.decode((rows.shape[2], rows.shape[3])).numpy()


@contextmanager
def _in_order(steps: Sequence[Step], threads: int) -> Iterator[Iterator[Step]]:
    """Yield functions, in order, that return when a step is done; threads take the steps ahead.

    After the block, also if an error or a signal ends it, no step runs, and no thread is left.
    """
    if threads < 2:
        yield iter(steps)
        return
    pool = ThreadPoolExecutor(threads, _THREAD)
    try:
        yield iter([pool.submit(step).result for step in steps])
    finally:
        pool.shutdown(cancel_futures=True)
        # a signal while the pool starts a thread leaves one that the pool does not know
        while any(thread.name.startswith(_THREAD) for thread in threading.enumerate()):
            time.sleep(1e-3)
