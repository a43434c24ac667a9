"""Images decoded to memory at the start of a run, by threads.

Pillow frees the interpreter while it decodes and resizes, so threads work side by side. Pixels, order, errors and
progress do not depend on their number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

from torch import Tensor
from tqdm import tqdm

from fedsim.core.progress import note_progress
from fedsim.data.images import CHUNK, Images
from fedsim.data.reading import QUIET

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
    pool = ThreadPoolExecutor(threads, "decode")
    try:
        yield iter([pool.submit(step).result for step in steps])
    finally:
        pool.shutdown(cancel_futures=True)
