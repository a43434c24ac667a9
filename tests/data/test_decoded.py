"""Images decoded once: building, continuing, finding out what changed; and that no run sees a difference."""

import json
import multiprocessing
import os
import signal as signals
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from failing import PATIENCE
from fedsim.cli.data.command import run as run_data_command
from fedsim.core.errors import ConfigError, DataError
from fedsim.data import Augmentation, FederatedDataModule, MarketFolders, decoded
from fedsim.data.decoded import DecodedImages, Wanted
from fedsim.data.images import Domain, GallerySplit, ImageFiles, ImagesInParts, Split
from fedsim.data.manifest import read_manifest, write_manifest
from fedsim.data.pixels import HeldPixels, ReadPixels, read_batches
from fedsim.data.standins import write_standin
from fedsim.methods import FedPav
from fedsim.parsing.error_lines import failure_of
from small import fit, make_data, make_model, vector

SIZE = (8, 4)


@pytest.fixture
def files(tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    rng = np.random.default_rng(0)
    paths = [folder / f"{i:03d}.png" for i in range(11)]
    for path in paths:
        Image.fromarray(rng.integers(0, 256, (10, 6, 3), dtype=np.uint8)).save(path)
    return paths


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(decoded, "_BLOCK", 4)
    monkeypatch.setattr(decoded, "_BATCH", 2)


def built(tmp_path, files, workers=0):
    wanted = Wanted("set", tuple(files), SIZE)
    return wanted, decoded.build(tmp_path / "cache", wanted, workers)


def opened(tmp_path, files):
    wanted, _ = built(tmp_path, files)
    return decoded.open_decoded(tmp_path / "cache", wanted)


def domain_of(files, splits=()):
    pids = np.arange(len(files)) // 2 + 1
    half = len(files) // 2
    split = Split(ImageFiles(files), pids, np.zeros(len(files), dtype=np.int64))
    return Domain("set", split, split.take(np.arange(half)), split.take(np.arange(half, len(files))), splits)


@pytest.mark.parametrize("workers", [0, 2])
def test_rows_are_the_decoded_images(tmp_path, files, small_blocks, workers):
    wanted, path = built(tmp_path, files, workers)
    one = decoded.open_decoded(tmp_path / "cache", wanted)
    assert torch.equal(torch.from_numpy(np.array(one.pixels)), ImageFiles(files).decode(SIZE))
    assert one.unreadable == {}
    assert decoded.verify(path) == 11
    assert sorted(p.name for p in path.parent.iterdir()) == sorted([path.name, path.with_suffix(".json").name])


def test_the_same_images_elsewhere_have_the_same_file(tmp_path, files):
    _, path = built(tmp_path, files)
    moved = tmp_path / "elsewhere" / "images"
    moved.parent.mkdir()
    files[0].parent.rename(moved)
    again = Wanted("set", tuple(moved / p.name for p in files), SIZE)
    assert decoded.find(tmp_path / "cache", again) == path
    assert decoded.open_decoded(tmp_path / "cache", again) is not None


def test_other_images_and_other_sizes_have_other_files(tmp_path, files):
    wanted, path = built(tmp_path, files)
    assert decoded.find(path.parent, wanted._replace(size=(4, 8))) != path
    assert decoded.find(path.parent, wanted._replace(files=wanted.files[:-1])) != path
    Image.new("RGB", (50, 50), "red").save(files[3])
    assert decoded.find(path.parent, wanted) != path
    assert decoded.open_decoded(path.parent, wanted) is None


def test_files_that_were_decoded_in_another_way_have_other_names(tmp_path, files, monkeypatch):
    wanted, path = built(tmp_path, files)
    monkeypatch.setattr(decoded, "_DECODING", decoded._DECODING + 1)
    assert decoded.find(path.parent, wanted) != path


@pytest.mark.parametrize("held", [False, True])
def test_a_part_of_the_images_is_that_part(files, held):
    images, cpu = ImageFiles(files), torch.device("cpu")
    whole = HeldPixels(images.decode(SIZE), cpu) if held else ReadPixels(images, SIZE, cpu, workers=0)
    part = whole.part(slice(3, 8))
    assert len(part) == 5
    batches = part.batches([torch.tensor([4, 0]), torch.tensor([2])])
    assert torch.equal(torch.cat(list(batches)), images.take(np.array([7, 3, 5])).decode(SIZE))


def test_images_below_relative_and_absolute_folders_can_be_in_one_file(tmp_path, files, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mixed = [Path("images") / files[0].name, *files[1:]]
    wanted, path = built(tmp_path, mixed)
    assert decoded.find(path.parent, wanted._replace(files=tuple(files))) == path
    assert decoded.open_decoded(path.parent, wanted).rows[mixed[0]] == 0


@pytest.mark.parametrize("style", ["one folder", "a folder each", "nothing in common"])
def test_names_are_relative_to_the_deepest_common_folder(style):
    paths = {
        "one folder": ["/data/set/b.png", "/data/set/a.png"],
        "a folder each": ["/data/set/x/b.png", "/data/set/y/a.png"],
        "nothing in common": ["/b.png", "/set/a.png"],
    }[style]
    root = os.path.commonpath([os.path.dirname(path) for path in paths])
    assert decoded._names([Path(path) for path in paths]) == [os.path.relpath(path, root) for path in paths]


def test_a_repaired_image_is_decoded_although_its_size_is_the_same(tmp_path, files):
    good = files[4].read_bytes()
    files[4].write_bytes(bytes(len(good)))
    wanted, path = built(tmp_path, files)
    assert list(decoded.open_decoded(path.parent, wanted).unreadable) == [files[4]]
    time = path.stat().st_mtime_ns
    assert decoded.build(path.parent, wanted).stat().st_mtime_ns == time  # still damaged: nothing to do
    files[4].write_bytes(good)
    assert decoded.find(path.parent, wanted) == path
    assert opened(tmp_path, files).unreadable == {}
    assert torch.equal(torch.from_numpy(np.array(opened(tmp_path, files).pixels)), ImageFiles(files).decode(SIZE))


def test_two_runs_that_fill_one_folder_do_not_disturb_each_other(tmp_path, files, small_blocks, monkeypatch):
    read, started, may_go_on, seen = decoded.read_batches, threading.Event(), threading.Event(), []

    def slow(images, size, order, workers):
        for batch in read(images, size, order, workers):
            seen.append(len(batch.pixels))
            started.set()
            assert may_go_on.wait(timeout=PATIENCE)
            yield batch

    monkeypatch.setattr(decoded, "read_batches", slow)
    monkeypatch.setattr(decoded.log, "info", lambda *_: may_go_on.set())  # as soon as the second one waits
    with ThreadPoolExecutor() as threads:
        first = threads.submit(built, tmp_path, files)
        assert started.wait(timeout=PATIENCE)
        second = threads.submit(built, tmp_path, files)
        assert first.result(timeout=PATIENCE) == second.result(timeout=PATIENCE)
    assert sum(seen) == 11  # the second one found what the first one wrote
    _, path = built(tmp_path, files)
    assert decoded.verify(path) == 11
    assert len(list(path.parent.iterdir())) == 2


def test_a_file_that_another_machine_has_finished_meanwhile_stays(tmp_path, files, monkeypatch):
    read, others = decoded.read_batches, []

    def overtaken(*args):
        yield from read(*args)
        if not others:
            others.append(None)
            with monkeypatch.context() as patch:
                patch.setattr("socket.gethostname", lambda: "another")
                others[0] = built(tmp_path, files)[1].stat().st_ino

    monkeypatch.setattr(decoded, "read_batches", overtaken)
    _, path = built(tmp_path, files)
    assert path.stat().st_ino == others[0]
    assert len(list(path.parent.iterdir())) == 2


def test_a_full_disk_is_named_and_leaves_nothing_behind(tmp_path, files, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(DataError, match=r"No space left on device\); choose another data\.cache_dir"):
        built(tmp_path, files)
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("signal", ["INT", "USR1", "TERM"])
def test_signals_to_the_whole_job_leave_reading_to_the_parent(files, signal):
    order = [[row] for row in range(11)]
    batches = read_batches(ImageFiles(files), SIZE, order, workers=1)
    first = next(batches).pixels
    [worker] = multiprocessing.active_children()
    subprocess.run(["kill", f"-{signal}", str(worker.pid)], check=True)
    assert torch.equal(torch.cat([first, *(batch.pixels for batch in batches)]), ImageFiles(files).decode(SIZE))


def test_no_thread_of_a_reading_process_takes_a_signal(files):
    """Torch starts a thread before the DataLoader's hook runs, and the kernel delivers to any thread that listens."""
    if not Path("/proc").is_dir():
        pytest.skip("reads the masks of threads from /proc")
    before = torch.get_num_threads()
    torch.set_num_threads(2)  # the call that makes torch start its thread in a worker
    batches = read_batches(ImageFiles(files), SIZE, [[row] for row in range(11)], workers=1)
    next(batches)
    [worker] = multiprocessing.active_children()
    threads = [task.read_text() for task in Path(f"/proc/{worker.pid}/task").glob("*/status")]
    masks = [int(line.split()[1], 16) for text in threads for line in text.splitlines() if line.startswith("SigBlk")]
    batches.close()
    torch.set_num_threads(before)
    listening = {number: sum(not mask >> (number - 1) & 1 for mask in masks) for number in (2, 10, 15)}
    assert listening[signals.SIGINT] == listening[signals.SIGUSR1] == 0
    assert listening[signals.SIGTERM] <= 1  # the thread that waits for the parent's word
    assert not signals.pthread_sigmask(signals.SIG_BLOCK, ()) & set(listening)  # the parent itself listens again


def test_reading_processes_end_when_the_parent_says_so(files):
    batches = read_batches(ImageFiles(files), SIZE, [[row] for row in range(11)], workers=1)
    next(batches)
    [worker] = multiprocessing.active_children()
    worker.terminate()  # the DataLoader's last resort
    worker.join(timeout=PATIENCE)
    assert worker.exitcode == 0


@pytest.mark.parametrize(
    "text",
    ["DataLoader worker (pid 7) is killed by signal: Killed. ", "DataLoader worker (pid(s) 7) exited unexpectedly"],
)
def test_a_reading_process_that_was_killed_is_named_with_a_remedy(text):
    failure = failure_of(RuntimeError(text), "fit")
    assert failure.code == 2
    assert failure.message.startswith(f"data.workers: a worker process was killed ({text[:20]}")
    assert failure_of(RuntimeError("another text"), "fit") is None


def test_reading_processes_draw_nothing_from_the_global_stream(files):
    before = torch.get_rng_state()
    list(read_batches(ImageFiles(files), SIZE, [[0], [1]], workers=1))
    assert torch.equal(torch.get_rng_state(), before)


def test_building_continues_where_it_was_left(tmp_path, files, small_blocks, monkeypatch):
    wanted = Wanted("set", tuple(files), SIZE)
    read, seen = decoded.read_batches, []

    def break_off(images, size, order, workers):
        for number, batch in enumerate(read(images, size, order, workers)):
            seen.append(len(batch.pixels))
            if number == 3:
                raise KeyboardInterrupt
            yield batch

    monkeypatch.setattr(decoded, "read_batches", break_off)
    with pytest.raises(KeyboardInterrupt):
        decoded.build(tmp_path / "cache", wanted)
    assert decoded.open_decoded(tmp_path / "cache", wanted) is None
    monkeypatch.setattr(decoded, "read_batches", lambda *args: (seen.append(len(b.pixels)) or b for b in read(*args)))
    seen.clear()
    decoded.build(tmp_path / "cache", wanted)
    assert sum(seen) == 7  # one block of four was complete
    one = decoded.open_decoded(tmp_path / "cache", wanted)
    assert torch.equal(torch.from_numpy(np.array(one.pixels)), ImageFiles(files).decode(SIZE))


def test_a_damaged_part_is_decoded_again(tmp_path, files, small_blocks, monkeypatch):
    wanted = Wanted("set", tuple(files), SIZE)
    good = files[5].read_bytes()
    files[5].write_bytes(bytes(len(good)))

    def break_off(path):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(decoded, "flush_file", break_off)  # all blocks are noted
        with pytest.raises(KeyboardInterrupt):
            decoded.build(tmp_path / "cache", wanted)
    files[5].write_bytes(good)  # a problem of the part that is read again is forgotten
    [partial] = [p for p in (tmp_path / "cache").glob("*.partial-*") if p.suffix != ".json"]
    content = bytearray(partial.read_bytes())
    content[-7 * 3 * 8 * 4] ^= 1  # image 4, in the second of three blocks
    partial.write_bytes(content)
    read, seen = decoded.read_batches, []
    monkeypatch.setattr(decoded, "read_batches", lambda *args: (seen.append(len(b.pixels)) or b for b in read(*args)))
    one = opened(tmp_path, files)
    assert sum(seen) == 7
    assert one.unreadable == {}
    assert torch.equal(torch.from_numpy(np.array(one.pixels)), ImageFiles(files).decode(SIZE))


def test_a_damaged_file_is_found_by_its_checksum(tmp_path, files):
    _, path = built(tmp_path, files)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"npy: is damaged \(checksum\); remove it and run fedsim data prepare again"):
        decoded.verify(path)


@pytest.mark.parametrize(("part", "text"), [("npy", "[1, 2]"), ("json", "[1, 2]"), ("json", "[" * 200_000)])
def test_a_file_of_something_else_is_refused(tmp_path, files, part, text):
    wanted, path = built(tmp_path, files)
    path.with_suffix(f".{part}").write_text(text)
    with pytest.raises(DataError, match=r"cannot be read .* remove it"):
        decoded.open_decoded(path.parent, wanted)


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path, files):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(DataError, match=r"cache/set-8x4-.*cannot write decoded images .* data\.cache_dir"):
        built(tmp_path, files)


def test_lists_of_images_are_looked_up(tmp_path, files):
    one = opened(tmp_path, files)
    domain = domain_of(files)
    changed = domain.map_splits(lambda split: decoded.use(split, [one]))
    assert changed.train.images.is_decoded(SIZE)
    assert not changed.train.images.is_decoded((9, 9))
    index = np.array([3, 3, 0, 10])
    for size in (SIZE, (9, 9)):  # another size comes from the image files
        picked = changed.train.images.take(index).decode(size)
        assert torch.equal(picked, domain.train.images.take(index).decode(size))
    assert np.shares_memory(changed.query.images.decode(SIZE).numpy(), one.pixels)  # neighbours are not copied


def test_parts_are_looked_up_part_by_part(tmp_path, files):
    one = opened(tmp_path, files[:6])
    both = ImagesInParts([ImageFiles(files[:6]), ImageFiles(files[6:])])
    split = Split(both, np.arange(11), np.zeros(11, dtype=np.int64))
    changed = decoded.use(split, [one]).images
    assert [type(part) for part in changed.parts] == [DecodedImages, ImageFiles]
    assert not changed.is_decoded(SIZE)
    assert changed.locations() == files
    assert torch.equal(changed.decode(SIZE), both.decode(SIZE))


def test_without_bad_images_splits_keep_their_meaning(files):
    pool = domain_of(files)
    splits = (GallerySplit(np.array([0, 3]), np.array([1, 2, 4])), GallerySplit(np.array([4]), np.array([5, 0])))
    pool = Domain("set", None, pool.query.take(np.array([], dtype=np.int64)), pool.gallery, splits)
    bad = {files[5 + 1], files[5 + 4]}
    left = decoded.without(pool, bad)
    assert len(left.gallery) == 4
    before, after = pool.gallery.images.locations(), left.gallery.images.locations()
    for old, new in zip(pool.splits, left.splits, strict=True):
        for rows, new_rows in zip(old, new, strict=True):
            assert [before[i] for i in rows if before[i] not in bad] == [after[i] for i in new_rows]


# -- whole runs --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    root = tmp_path_factory.mktemp("sets")
    for name in ("market1501", "cuhk03np"):
        write_standin(name, root, people=6, size=(20, 10))
    (root / "cuhk03-np" / "detected").rename(root / "cuhk03")
    return root


def data_of(tree, **options):
    return make_data(MarketFolders(str(tree), ["Market-1501-v15.09.15", "cuhk03"]), val="none", **options)


@pytest.fixture(scope="module")
def plain(tree):
    return fit(make_model(FedPav()), data_of(tree), rounds=2)


@pytest.mark.parametrize("cache", ["device", "host", "none"])
@pytest.mark.parametrize("has_folder", [False, True])
def test_where_images_wait_changes_no_bit(tree, plain, tmp_path, cache, has_folder):
    folder = str(tmp_path / "cache") if has_folder else None
    model = fit(make_model(FedPav()), data_of(tree, cache=cache, cache_dir=folder, workers=1), rounds=2)
    assert torch.equal(vector(model), vector(plain))
    assert len(list(tmp_path.glob("cache/*.npy"))) == 2 * has_folder


@pytest.mark.parametrize("val", ["identities", "none"])
def test_images_are_decoded_in_the_sizes_of_their_uses(tree, val):
    data = make_data(MarketFolders(str(tree), ["cuhk03"]), val=val, size=(32, 16), test_size=(36, 18))
    [domain] = data.list_domains()
    train, query, gallery = (set(one.images.locations()) for one in (domain.train, domain.query, domain.gallery))
    tested = query | gallery | (train if val != "none" else set())  # of the training images, some validate
    assert {one.size: set(one.files) for one in data.wanted()} == {(32, 16): train, (36, 18): tested}


class Upside(ImageFiles):
    """Image files that are decoded in another way than fedsim's."""

    def take(self, index):
        return Upside([self.paths[i] for i in index])

    def decode(self, size):
        return super().decode(size).flip(2)


def test_files_that_a_source_decodes_itself_are_never_replaced_by_whole_ones(tree, tmp_path):
    """Pixels kept on disk are those of fedsim's own reading, and such files may be in no format that it reads."""

    class OwnReading(MarketFolders):
        def domains(self):
            return [
                domain.map_splits(lambda split: Split(Upside(split.images.paths), split.pids, split.camids))
                for domain in super().domains()
            ]

    data = make_data(OwnReading(str(tree), ["cuhk03"]), size=(32, 16), cache_dir=str(tmp_path / "cache"))
    data.prepare_data()
    [client] = data.federated.clients
    assert data.wanted() == []
    assert torch.equal(data.decode(client.train.images, "cuhk03"), client.train.images.decode((32, 16)))


def test_a_manifests_images_are_decoded_once_too(tree, plain, tmp_path):
    manifest = tmp_path / "federation.csv"
    write_manifest(data_of(tree).federated, manifest)
    options = {"val": "none", "size": (32, 16), "augmentation": Augmentation(pad=0, flip=0.0)}
    data = FederatedDataModule(manifest=str(manifest), cache_dir=str(tmp_path / "cache"), **options)
    assert torch.equal(vector(fit(make_model(FedPav()), data, rounds=2)), vector(plain))
    assert all(client.train.images.is_decoded((32, 16)) for client in data.federated.clients)
    again = FederatedDataModule(manifest=str(manifest), cache_dir=str(tmp_path / "cache"), **options)
    write_manifest(again.federated, tmp_path / "again.csv")
    assert (tmp_path / "again.csv").read_text() == manifest.read_text()


@pytest.fixture
def damaged(tree, tmp_path):
    """A data set with two images that cannot be read."""
    root = tmp_path / "sets"
    for path in (tree / "cuhk03").rglob("*.png"):
        (root / path.relative_to(tree)).parent.mkdir(parents=True, exist_ok=True)
        (root / path.relative_to(tree)).write_bytes(path.read_bytes())
    bad = [sorted((root / "cuhk03" / part).iterdir())[1] for part in ("bounding_box_train", "bounding_box_test")]
    for path in bad:
        path.write_bytes(b"not an image")
    return root, bad


def test_images_that_cannot_be_read_are_left_out_when_asked_for(damaged, tmp_path, caplog):
    root, bad = damaged
    options = {"val": "none", "cache_dir": str(tmp_path / "cache"), "workers": 0}
    data = make_data(MarketFolders(str(root)), on_corrupt="skip", **options)
    model = fit(make_model(FedPav()), data, rounds=1)
    [client] = model.parts.clients.values()
    assert len(client.images.pixels) == len(client.images.labels) == 23
    assert bad[0] not in client.data.train.images.locations()
    for path in bad:
        assert f"left out: {path}: cannot read this image" in caplog.text
    stopping = make_data(MarketFolders(str(root)), **options)
    with pytest.raises(DataError, match=r"(?s)cannot read this image .*on_corrupt: skip"):
        _ = stopping.federated


@pytest.mark.parametrize("by_manifest", [False, True])
def test_a_run_that_stopped_goes_on_when_the_images_are_repaired(tree, tmp_path, by_manifest):
    image = next((tree / "cuhk03" / "bounding_box_train").iterdir())
    manifest = tmp_path / "federation.csv"
    options = {"size": (32, 16), "cache_dir": str(tmp_path / "cache"), "workers": 0}
    write_manifest(data_of(tree).federated, manifest)

    def make():
        if by_manifest:
            return FederatedDataModule(manifest=str(manifest), val="none", **options)
        return data_of(tree, **options)

    good = image.read_bytes()
    image.write_bytes(bytes(len(good)))
    try:
        make().prepare_data()
        with pytest.raises(
            DataError, match=f"^{image}: cannot read this image .*(leave its rows out|on_corrupt: skip)"
        ):
            _ = make().federated
    finally:
        image.write_bytes(good)
    data = make()
    before = data.federated  # what the command line looks at before anything is decoded
    assert not all(client.train.images.is_decoded((32, 16)) for client in before.clients)
    data.prepare_data()
    data.setup("fit")
    assert all(client.train.images.is_decoded((32, 16)) for client in data.federated.clients)


def test_a_manifest_lists_only_what_can_be_read_when_others_are_left_out(damaged, tmp_path):
    root, bad = damaged
    output = tmp_path / "federation.csv"
    path = config(tmp_path, root, cache_dir=str(tmp_path / "cache"), on_corrupt="skip", workers=0)
    run_data_command(["manifest", "--config", path, "--output", str(output)])
    [client] = read_manifest(output).clients
    assert len(client.train) == 23
    assert bad[0] not in client.train.images.locations()


def test_a_data_set_of_which_nothing_can_be_read_is_named(damaged, tmp_path):
    root, _ = damaged
    for path in (root / "cuhk03" / "bounding_box_train").iterdir():
        path.write_bytes(b"not an image")
    data = make_data(MarketFolders(str(root)), on_corrupt="skip", cache_dir=str(tmp_path / "cache"), workers=0)
    data.prepare_data()
    with pytest.raises(DataError, match=r"^cuhk03: none of its 24 training images can be read"):
        _ = data.federated


def test_reading_again_names_a_damaged_image(damaged):
    root, bad = damaged
    data = make_data(MarketFolders(str(root)), val="none", cache="none", workers=1)
    with pytest.raises(DataError, match=f"^{bad[0]}: cannot read this image") as caught:
        fit(make_model(FedPav()), data, rounds=1)
    assert "Traceback" not in str(caught.value)


def test_options_that_do_not_go_together_are_refused(tree):
    with pytest.raises(ConfigError, match=r"data\.on_corrupt: skip needs data\.cache_dir"):
        data_of(tree, on_corrupt="skip")
    with pytest.raises(ConfigError, match=r"data\.workers: 0 is less than 1"):
        data_of(tree, cache="none", workers=0)


def config(tmp_path, root, **options):
    path = tmp_path / "config.yaml"
    source = {"class_path": "MarketFolders", "init_args": {"root": str(root)}}
    path.write_text(json.dumps({"data": {"source": source, "size": [20, 10], "val": "none", **options}}))
    return str(path)


def test_prepare_prints_what_it_did(tree, tmp_path):
    args = ["prepare", "--config", config(tmp_path, tree), "--cache_dir", str(tmp_path / "cache"), "--workers", "0"]
    first = run_data_command(args)
    assert "cuhk03 " in first
    assert first.count("decoded") == 2
    assert run_data_command(args).count("was there") == 2
    assert run_data_command([*args, "--verify", "true"]).count("verified") == 2


def test_prepare_finds_damage_when_asked_to(tree, tmp_path):
    args = ["prepare", "--config", config(tmp_path, tree), "--cache_dir", str(tmp_path / "cache"), "--workers", "0"]
    run_data_command(args)
    path = max((tmp_path / "cache").glob("*.npy"))
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(DataError, match=rf"^{path}: is damaged"):
        run_data_command([*args, "--verify", "true"])


def test_prepare_names_every_image_that_cannot_be_read(damaged, tmp_path):
    root, bad = damaged
    args = ["prepare", "--workers", "0", "--config"]
    options = {"cache_dir": str(tmp_path / "cache")}
    with pytest.raises(DataError) as caught:
        run_data_command([*args, config(tmp_path, root, **options)])
    said = run_data_command([*args, config(tmp_path, root, **options, on_corrupt="skip")])
    for path in bad:
        assert f"{path}: cannot read this image" in str(caught.value)
        assert f"{path}: cannot read this image" in said


def test_prepare_knows_the_home_folder(tree, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    run_data_command(["prepare", "--config", config(tmp_path, tree), "--cache_dir=~/cache", "--workers", "0"])
    assert len(list((tmp_path / "cache").glob("*.npy"))) == 2


def test_prepare_refuses_a_negative_number_of_processes(tree, tmp_path):
    with pytest.raises(ConfigError, match="--workers: -1 is negative"):
        run_data_command(["prepare", "--config", config(tmp_path, tree), "--workers=-1"])


def test_prepare_says_when_there_is_nothing_to_decode(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps({"data": {"source": "SyntheticReID", "cache_dir": str(tmp_path / "cache")}}))
    assert "nothing to decode" in run_data_command(["prepare", "--config", str(path)])


def test_prepare_needs_a_folder(tree, tmp_path):
    with pytest.raises(ConfigError, match=r"data\.cache_dir: name a folder"):
        run_data_command(["prepare", "--config", config(tmp_path, tree)])
