"""Decoded images on their way to the device."""

import errno
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from PIL import Image

from failing import PATIENCE, await_true
from fedsim.core.errors import ConfigError, DataError
from fedsim.data import pixels as pixels_room
from fedsim.data.images import ImageFiles
from fedsim.data.pixels import HeldPixels, read_batches

SIZE = (16, 8)
ORDER = [[0, 1, 2], [3, 4], [5, 6, 7]]


def test_images_that_ranks_share_move_to_the_device_with_the_first_batch():
    pixels = torch.arange(3 * 3 * 2 * 2, dtype=torch.uint8).view(3, 3, 2, 2)
    elsewhere = torch.device("meta")  # a device without memory
    moved, held = HeldPixels(pixels, elsewhere, moved_as="north"), HeldPixels(pixels, elsewhere)
    for images in (moved, held):
        assert images.pixels is pixels
        [batch] = images.batches([torch.tensor([2, 0])])
        assert (batch.device, batch.shape) == (elsewhere, (2, 3, 2, 2))
    assert moved.pixels.device == elsewhere
    assert held.pixels is pixels


def test_images_that_do_not_fit_on_the_device_have_a_remedy(monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")

    images = HeldPixels(torch.zeros(5, 3, 2, 2, dtype=torch.uint8), torch.device("meta"), moved_as="north")
    monkeypatch.setattr(torch.Tensor, "to", full)
    with pytest.raises(ConfigError, match=r"data.cache: the 5 images of north .* do not fit on the device; set"):
        next(images.batches([torch.tensor([0])]))


@pytest.fixture
def images(tmp_path):
    """Eight small images."""
    stream = np.random.default_rng(0)
    for number in range(8):
        Image.fromarray(stream.integers(0, 255, (20, 10, 3), dtype=np.uint8)).save(tmp_path / f"{number}.png")
    return ImageFiles(sorted(tmp_path.glob("*.png")))


def read(images, workers):
    return torch.cat([batch.pixels for batch in read_batches(images, SIZE, ORDER, workers)])


def test_reading_processes_hand_over_batches_without_sockets_and_shared_memory(images, monkeypatch, tmp_path):
    deep = tmp_path / ("x" * 120)  # a socket in it would have a path of more than 107 bytes
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    expected = read(images, 0)
    for batch in read_batches(images, SIZE, ORDER, 2):
        assert not batch.pixels.is_shared()
        batch.pixels.add_(0)  # it can be written to
    assert torch.equal(read(images, 2), expected)


REFUSALS = {
    "no semaphores": ("multiprocessing.synchronize.SemLock.__init__", OSError(errno.ENOSPC, "No space left on device")),
    "no fork": ("os.fork", BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")),
    "no second fork": ("os.fork", BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")),
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_a_machine_without_reading_processes_reads_in_this_one(images, monkeypatch, caplog, kind):
    name, error = REFUSALS[kind]
    real, calls, before = os.fork, [], len(multiprocessing.active_children())

    def refuse(*_, **__):
        calls.append(name)
        if kind == "no second fork" and len(calls) == 1:
            return real()
        raise error

    monkeypatch.setattr(name, refuse)
    assert torch.equal(read(images, 2), read(images, 0))
    assert "data.workers: no reading processes" in caplog.text
    await_true(lambda: len(multiprocessing.active_children()) == before, PATIENCE, lambda: "a process is left")


def test_a_reading_process_that_hangs_is_one_line(images, monkeypatch, tmp_path):
    monkeypatch.setattr(pixels_room, "_LONGEST", 1.0)
    pipe = tmp_path / "pipe.png"
    os.mkfifo(pipe)
    with pytest.raises(DataError, match=r"^data.workers: the reading processes gave no batch for 1 s; .* --data.work"):
        list(read_batches(_Hanging([*images.paths, pipe]), SIZE, [*ORDER, [8]], 2))


class _Hanging(ImageFiles):
    """Images that are opened as they are: a pipe without a writer keeps its reader."""

    def take(self, index):
        return _Hanging([self.paths[place] for place in index])

    def decode(self, size):
        for path in self.paths:
            path.read_bytes()
        return super().decode(size)


ORPHAN = """
import os, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from data.test_pixels import SIZE, _Hanging
from fedsim.data.pixels import read_batches
folder = Path({folder!r})
paths = [*sorted(folder.glob("*.png")), folder / "pipe"]
list(read_batches(_Hanging(paths), SIZE, [[len(paths) - 1]] * 2, 2))
"""


def test_reading_processes_that_hang_end_with_their_killed_parent(images, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    tests = os.path.dirname(os.path.dirname(__file__))
    program = ORPHAN.format(tests=tests, folder=str(tmp_path))
    process = subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
    try:
        await_true(lambda: len(_of_session(process.pid)) == 3, PATIENCE, lambda: "the readers do not start")
        time.sleep(1)  # they hang now, or soon
        process.kill()
        process.wait()
        await_true(lambda: not _of_session(process.pid), PATIENCE, lambda: f"left: {_of_session(process.pid)}")
    finally:
        for pid in _of_session(process.pid):
            os.kill(pid, signal.SIGKILL)


def _of_session(leader):
    """Return the living processes of a session."""
    living = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as file:
                state, _, _, session = file.read().rpartition(")")[2].split()[:4]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(session) == leader and state != "Z":
            living.append(int(name))
    return living
