"""Images decoded by threads: pixels, order, errors, progress and filters of warnings of any number of threads."""

import signal
import threading
import time
import warnings

import numpy as np
import pytest
import torch
from PIL import Image

from fedsim.core.errors import DataError
from fedsim.core.progress import progress_count
from fedsim.data.datamodule import FederatedDataModule
from fedsim.data.images import CHUNK, ImageFiles, Images, ImagesInParts
from fedsim.data.market import MarketFolders
from fedsim.data.pixels import read_all
from fedsim.data.reading import QUIET
from fedsim.data.synthetic import SyntheticReID

SIZE, COUNT = (24, 12), 3 * CHUNK + 7
THREADS = (1, 2, 5)


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Files of different sizes and contents; some have a palette, whose transparency Pillow warns of."""
    folder, rng = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    written = []
    for number in range(COUNT):
        height, width = rng.integers(8, 64, 2)
        image = Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
        path = folder / f"{number:04d}{'.png' if number % 5 == 0 else '.jpg'}"
        if number % 5 == 0:
            image.quantize(16).save(path, transparency=b"\0\1")
        else:
            image.save(path)
        written.append(path)
    return written


def read(images, threads):
    return read_all(images, "images", torch.zeros(len(images), 3, *SIZE, dtype=torch.uint8), threads)


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("count", [0, 1, 8, 9, CHUNK, COUNT])
def test_pixels_and_order_are_those_of_one_file_after_another(paths, threads, count):
    expected = ImageFiles(paths[:count]).decode(SIZE)
    assert torch.equal(read(ImageFiles(paths[:count]), threads), expected)
    lists = ImagesInParts([ImageFiles(paths[: count // 3]), ImageFiles(paths[count // 3 : count])])
    assert torch.equal(read(lists, threads), expected)


@pytest.mark.parametrize("threads", THREADS)
def test_the_first_damaged_file_is_named(paths, tmp_path, threads):
    """Also if a later one, which is damaged at its beginning, is found sooner."""
    first, later = tmp_path / "first.jpg", tmp_path / "later.jpg"
    first.write_bytes(paths[1].read_bytes()[:-200])
    later.write_bytes(b"")
    files = list(paths)
    files[CHUNK - 1], files[CHUNK + 3] = first, later
    with pytest.raises(DataError) as one_by_one:
        ImageFiles(files).decode(SIZE)
    with pytest.raises(DataError) as error:
        read(ImageFiles(files), threads)
    assert str(error.value) == str(one_by_one.value)
    assert str(error.value).startswith(f"{first}: cannot read this image (")
    assert not decoders()


@pytest.mark.parametrize("threads", THREADS)
def test_every_part_is_progress(paths, threads):
    before = progress_count()
    read(ImageFiles(paths), threads)
    assert progress_count() - before >= COUNT / CHUNK


def decoders():
    return [thread for thread in threading.enumerate() if "decode" in thread.name]


class Interrupted(ImageFiles):
    """Files that a Ctrl-C interrupts in a part of them."""

    def __init__(self, paths, log):
        super().__init__(paths)
        self.log = log

    def take(self, index):
        return Interrupted([self.paths[i] for i in index], self.log)

    def decode(self, size):
        self.log.append(threading.current_thread())
        if len(self.log) == 2:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        if len(self.log) > 2 and threading.current_thread() is not threading.main_thread():
            interrupted.wait(60)
        return super().decode(size)


interrupted = threading.Event()


@pytest.mark.parametrize("threads", THREADS)
def test_a_signal_ends_the_reading_and_no_thread_is_left(paths, threads, monkeypatch):
    def stop(*_):
        interrupted.set()
        raise KeyboardInterrupt

    interrupted.clear()
    log, before = [], signal.signal(signal.SIGINT, stop)
    try:
        with pytest.raises(KeyboardInterrupt):
            read(Interrupted(paths * 4, log), threads)
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(log) < len(paths * 4) / CHUNK
    assert not decoders()


class Slow(ImageFiles):
    """Files whose decoding goes on for a moment after an interruption."""

    def take(self, index):
        return Slow([self.paths[i] for i in index])

    def decode(self, size):
        interrupted.wait(60)
        time.sleep(0.2)
        return super().decode(size)


def test_a_signal_while_a_thread_starts_leaves_no_thread(paths, monkeypatch):
    """The pool does not know a thread whose start it has not seen the end of."""
    start = threading.Thread.start

    def interrupted_start(thread):
        start(thread)
        interrupted.set()
        raise KeyboardInterrupt

    interrupted.clear()
    monkeypatch.setattr(threading.Thread, "start", interrupted_start)
    with pytest.raises(KeyboardInterrupt):
        read(Slow(paths), 2)
    assert not decoders()


class Own(Images):
    """A user's images, which have not declared that threads may decode them."""

    def __init__(self, count, log):
        self.count, self.log = count, log

    def __len__(self):
        return self.count

    def take(self, index):
        return Own(len(index), self.log)

    def decode(self, size):
        self.log.append(threading.current_thread())
        return torch.zeros(self.count, 3, *size, dtype=torch.uint8)


def test_images_of_ones_own_are_decoded_by_the_main_thread(paths):
    log = []
    read(ImagesInParts([ImageFiles(paths[:70]), Own(70, log)]), 5)
    assert {*log} == {threading.main_thread()}


def test_files_are_decoded_by_several_threads(paths):
    """Each waits until there is another one."""
    barrier = threading.Barrier(2)

    class Meeting(ImageFiles):
        def take(self, index):
            return Meeting([self.paths[i] for i in index])

        def decode(self, size):
            barrier.wait(60)
            return super().decode(size)

    read(Meeting(paths[: 2 * CHUNK]), 2)


def test_threads_leave_the_filters_of_warnings_as_they_were(paths):
    before = list(warnings.filters)
    for threads in THREADS:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            read(ImageFiles(paths), threads)
        assert not caught
    assert list(warnings.filters) == before


def test_blocks_without_warnings_may_overlap():
    before = list(warnings.filters)
    with QUIET:
        first = threading.Thread(target=QUIET.__enter__)
        first.start()
        first.join()
    assert list(warnings.filters) != before  # the other thread is still inside
    QUIET.__exit__()
    assert list(warnings.filters) == before


@pytest.mark.parametrize("threads", THREADS)
def test_a_data_module_reads_the_same_and_skips_the_same(market_tree, tmp_path, caplog, threads):
    """Filled by one thread, read by several in another size; one image is left out."""
    folder = tmp_path / "people"
    for part in ("bounding_box_train", "query", "bounding_box_test"):
        (folder / part).mkdir(parents=True)
        for path in (market_tree / "north" / part).iterdir():
            (folder / part / path.name).write_bytes(path.read_bytes())
    bad = min((folder / "bounding_box_train").iterdir())
    bad.write_bytes(b"")
    options = {"val": "none", "size": (32, 16), "cache_dir": str(tmp_path / "c"), "on_corrupt": "skip", "workers": 0}
    data = FederatedDataModule(MarketFolders(str(folder)), **options)
    data.threads = threads
    data.prepare_data()
    [client] = data.federated.clients
    assert f"left out: {bad}: cannot read this image" in caplog.text
    images = client.train.images
    assert bad not in images.locations()
    assert torch.equal(data.decode(images, "north", SIZE), images.decode(SIZE))


def test_drawn_people_are_the_same(monkeypatch):
    data = FederatedDataModule(SyntheticReID(clients=1, unseen=0, scale=0.2), val="none", size=(32, 16))
    images = data.federated.clients[0].train.images
    data.threads = 5
    assert torch.equal(data.decode(images, "town"), images.decode((32, 16)))
