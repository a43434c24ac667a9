"""Feature files: what comes back is what was written, large arrays stay on the disk, and what is wrong has a name."""

import gc
import io
import itertools
import struct
import tracemalloc
import zipfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from fedsim.core.errors import DataError
from fedsim.evaluation.feature_file import read_features, write_features
from fedsim.evaluation.ranking import RetrievalLabels

NAMES = ("query", "query_pids", "query_camids", "gallery", "gallery_pids", "gallery_camids")


def arrays(queries=5, gallery=9, width=4, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "query": rng.standard_normal((queries, width)).astype(np.float32),
        "query_pids": rng.integers(1, 4, queries),
        "query_camids": rng.integers(0, 3, queries),
        "gallery": rng.standard_normal((gallery, width)).astype(np.float32),
        "gallery_pids": rng.integers(-1, 4, gallery),
        "gallery_camids": rng.integers(0, 3, gallery),
    }


def save(path, content=None, write=np.savez, **changes):
    """Write arrays() with some of them replaced, or left out where the change is None."""
    content = (content or arrays()) | changes
    write(path, **{name: array for name, array in content.items() if array is not None})
    return path


def write(path, content):
    """Write arrays as fedsim does."""
    labels = RetrievalLabels(
        *(content[f"{kind}_{label}"] for kind in ("query", "gallery") for label in ("pids", "camids"))
    )
    write_features(path, torch.from_numpy(content["query"]), torch.from_numpy(content["gallery"]), labels)


def is_mapped(tensor, path):
    """Whether a tensor's memory is the file itself: torch does not say, the operating system does."""
    if not Path("/proc/self/maps").exists():
        pytest.skip("only Linux says what is mapped")
    address = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, *_ = line.split()
        first, last = (int(bound, 16) for bound in span.split("-"))
        if first <= address < last:
            return line.endswith(str(path.resolve()))
    return False


def check(file, content):
    """Compare what was read with the arrays that were written."""
    for name in ("query", "gallery"):
        tensor = getattr(file, name)
        assert torch.equal(tensor, torch.from_numpy(np.ascontiguousarray(content[name])))
        assert tensor.dtype == torch.from_numpy(content[name][:1].copy()).dtype
        for label in ("pids", "camids"):
            array = getattr(file.labels, f"{name}_{label}")
            np.testing.assert_array_equal(array, content[f"{name}_{label}"])
            assert array.dtype == np.int64


# -- what is read ------------------------------------------------------------------------------------------------------


def test_what_was_written_is_read(tmp_path):
    content = arrays()
    path = tmp_path / "deep" / "features.npz"
    write(path, content)
    assert [p.name for p in path.parent.iterdir()] == ["features.npz"]  # nothing half-written
    check(read_features(path), content)
    with np.load(path) as archive:  # and any program can read it
        assert sorted(archive) == sorted(NAMES)
        for name in NAMES:
            np.testing.assert_array_equal(archive[name], content[name])


def test_an_old_file_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "f.npz"
    for content in (arrays(queries=50, seed=1), arrays(seed=2)):
        before = read_features(path) if path.exists() else None
        write(path, content)
        check(read_features(path), content)
        if before is not None:  # whoever has the old one open keeps it
            check(before, arrays(queries=50, seed=1))


def test_rules_are_handed_on(tmp_path):
    path = save(tmp_path / "f.npz")
    assert read_features(path).labels.camera_aware
    assert read_features(path).labels.junk_pids == (-1,)
    labels = read_features(path, camera_aware=False, junk_pids=(0, 2)).labels
    assert not labels.camera_aware
    assert labels.junk_pids == (0, 2)


def test_more_arrays_do_no_harm(tmp_path):
    content = arrays()
    path = tmp_path / "f.npz"
    np.savez(path, **content, names=np.array(["a", "b"]), notes=np.array([{"x": 1}], dtype=object))
    check(read_features(path), content)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("write", [np.savez, np.savez_compressed])
def test_features_of_any_precision(tmp_path, dtype, write):
    content = arrays()
    content |= {name: content[name].astype(dtype) for name in ("query", "gallery")}
    check(read_features(save(tmp_path / "f.npz", content, write)), content)


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.uint16, np.uint64, ">i8"])
def test_labels_of_any_integer_type(tmp_path, dtype):
    content = arrays()
    for name in NAMES:
        if name not in ("query", "gallery"):
            content[name] = np.abs(content[name]).astype(dtype)
    check(read_features(save(tmp_path / "f.npz", content)), content)


def test_features_of_another_byte_order(tmp_path):
    content = arrays()
    path = save(tmp_path / "f.npz", content, query=content["query"].astype(">f4"))
    with suppress(DataError):  # or it is said that they cannot be used
        check(read_features(path), content)


@pytest.mark.parametrize("write", [np.savez, np.savez_compressed])
def test_fortran_order(tmp_path, write):
    content = arrays()
    content |= {name: np.asfortranarray(content[name]) for name in ("query", "gallery")}
    assert not content["query"].flags.c_contiguous
    check(read_features(save(tmp_path / "f.npz", content, write)), content)


@pytest.mark.parametrize("order", list(itertools.permutations(("query", "gallery", "query_pids"))))
def test_arrays_in_any_order(tmp_path, order):
    content = arrays()
    names = [*order, *(name for name in NAMES if name not in order)]
    check(read_features(save(tmp_path / "f.npz", {name: content[name] for name in names})), content)


@pytest.mark.parametrize("extra", [0, 4, 68, 1000])
@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_archives_of_other_programs(tmp_path, extra, version):
    # the two headers of a member may have extra fields of different length; zip tools write timestamps there
    content = arrays()
    path = tmp_path / "f.npz"
    with zipfile.ZipFile(path, "w") as archive:
        for name in NAMES:
            data = io.BytesIO()
            np.lib.format.write_array(data, content[name], version=version)
            info = zipfile.ZipInfo(f"{name}.npy")
            info.extra = struct.pack("<HH", 0x9999, extra - 4) + bytes(extra - 4) if extra else b""
            archive.writestr(info, data.getvalue())
            info.extra = b""  # of the directory at the end of the archive
    check(read_features(path), content)
    assert is_mapped(read_features(path).gallery, path)


def test_an_archive_behind_something_else(tmp_path):
    content = arrays()
    path = save(tmp_path / "f.npz", content)
    path.write_bytes(b"#!/bin/sh\nexit\n" + path.read_bytes())
    check(read_features(path), content)


def test_some_arrays_compressed_and_others_not(tmp_path):
    content = arrays()
    path = tmp_path / "f.npz"
    with zipfile.ZipFile(path, "w") as archive:
        for i, name in enumerate(NAMES):
            data = io.BytesIO()
            np.save(data, content[name])
            kind = zipfile.ZIP_DEFLATED if i % 2 else zipfile.ZIP_STORED
            archive.writestr(f"{name}.npy", data.getvalue(), compress_type=kind)
    check(read_features(path), content)


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_stored_features_stay_on_the_disk(tmp_path, dtype):
    content = arrays(gallery=40_000, width=100)
    content["gallery"] = content["gallery"].astype(dtype)
    path = save(tmp_path / "f.npz", content)
    size = content["gallery"].nbytes
    gc.collect()
    tracemalloc.start()
    file = read_features(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert is_mapped(file.gallery, path)
    assert peak < size / 4, f"{peak} bytes to open {size} bytes"  # labels are read: 0.6 MB of them
    check(file, content)


def test_features_stay_on_the_disk_in_fortran_order_too(tmp_path):
    content = arrays(gallery=1000, width=64)
    content["gallery"] = np.asfortranarray(content["gallery"])
    path = save(tmp_path / "f.npz", content)
    assert is_mapped(read_features(path).gallery, path)


def test_compressed_features_do_not(tmp_path):
    path = save(tmp_path / "f.npz", arrays(gallery=1000, width=64), np.savez_compressed)
    assert not is_mapped(read_features(path).gallery, path)


def test_changing_the_tensors_does_not_change_the_file(tmp_path):
    content = arrays()
    path = save(tmp_path / "f.npz", content)
    before = path.read_bytes()
    file = read_features(path)
    file.query.zero_()
    file.gallery.add_(1)
    file.labels.query_pids[:] = 7
    assert file.query.sum() == 0  # and nobody warned that the memory is read-only
    assert path.read_bytes() == before
    check(read_features(path), content)


def test_tensors_outlive_the_file(tmp_path):
    content = arrays()
    path = save(tmp_path / "f.npz", content)
    file = read_features(path)
    path.unlink()
    gc.collect()
    check(file, content)


# -- cameras -----------------------------------------------------------------------------------------------------------


def test_cameras_may_be_missing_where_they_do_not_count(tmp_path):
    content = arrays()
    path = save(tmp_path / "f.npz", content, query_camids=None, gallery_camids=None)
    file = read_features(path, camera_aware=False)
    zeros = {"query_camids": np.zeros(5, int), "gallery_camids": np.zeros(9, int)}
    check(file, content | zeros)
    assert all(len(file.labels.positives_and_junk(q)[1]) == 0 for q in range(5))
    assert "there is no array query_camids" in refused(path)


def test_cameras_that_are_there_are_checked_all_the_same(tmp_path):
    path = save(tmp_path / "f.npz", gallery_camids=np.zeros(3, dtype=int))
    assert "gallery_camids" in refused(path, camera_aware=False)


# -- what is refused ---------------------------------------------------------------------------------------------------


def refused(path, **rules):
    """The message of the DataError that reading the file raises."""
    with pytest.raises(DataError) as caught:
        read_features(path, **rules)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_array(tmp_path, name):
    path = save(tmp_path / "f.npz", **{name: None})
    message = refused(path)
    assert f"there is no array {name}, only " in message
    assert all(other in message for other in NAMES if other != name)


def test_an_archive_of_nothing(tmp_path):
    path = tmp_path / "f.npz"
    np.savez(path)
    assert "only nothing" in refused(path)


WRONG_FEATURES = {
    "one dimension": np.zeros(5, dtype=np.float32),
    "three dimensions": np.zeros((5, 2, 2), dtype=np.float32),
    "a number": np.float32(3),
    "no images": np.zeros((0, 4), dtype=np.float32),
    "no features": np.zeros((5, 0), dtype=np.float32),
    "integers": np.zeros((5, 4), dtype=np.int64),
    "complex": np.zeros((5, 4), dtype=np.complex64),
    "booleans": np.zeros((5, 4), dtype=bool),
    "text": np.full((5, 4), "x"),
    "a record": np.zeros((5, 4), dtype=[("x", np.float32)]),
}


@pytest.mark.parametrize("name", ["query", "gallery"])
@pytest.mark.parametrize("wrong", WRONG_FEATURES)
@pytest.mark.parametrize("write", [np.savez, np.savez_compressed])
def test_wrong_features(tmp_path, name, wrong, write):
    message = refused(save(tmp_path / "f.npz", write=write, **{name: WRONG_FEATURES[wrong]}))
    assert f"{name} is " in message


WRONG_LABELS = {
    "too few": np.zeros(3, dtype=int),
    "too many": np.zeros(10, dtype=int),
    "a column": np.zeros((5, 1), dtype=int),
    "a number": np.int64(3),
    "floats": np.zeros(5),
    "booleans": np.zeros(5, dtype=bool),
    "text": np.full(5, "0001"),
    "none": np.zeros(0, dtype=int),
}


@pytest.mark.parametrize("name", ["query_pids", "query_camids", "gallery_pids", "gallery_camids"])
@pytest.mark.parametrize("wrong", WRONG_LABELS)
def test_wrong_labels(tmp_path, name, wrong):
    message = refused(save(tmp_path / "f.npz", arrays(queries=5, gallery=5), **{name: WRONG_LABELS[wrong]}))
    assert f"{name} is " in message


class Bomb:
    """Leaves a trace when it is unpickled."""

    opened = False

    def __reduce__(self):
        return (setattr, (Bomb, "opened", True))


@pytest.mark.parametrize("write", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("name", NAMES)
def test_objects_are_refused_without_being_unpickled(tmp_path, write, name):
    shape = (5, 4) if name in ("query", "gallery") else (5,)
    bombs = np.array([Bomb() for _ in range(int(np.prod(shape)))], dtype=object).reshape(shape)
    path = save(tmp_path / "f.npz", arrays(gallery=5), write, **{name: bombs})
    refused(path)
    assert not Bomb.opened


def test_widths_that_differ(tmp_path):
    path = save(tmp_path / "f.npz", gallery=np.zeros((9, 7), dtype=np.float32))
    assert "different width, 4 and 7" in refused(path)


@pytest.mark.parametrize("content", [b"", b"no archive at all", b"PK\x03\x04" + bytes(100)])
def test_a_file_that_is_no_archive(tmp_path, content):
    path = tmp_path / "f.npz"
    path.write_bytes(content)
    assert "cannot be read as an npz file" in refused(path)


def test_a_single_array_is_no_archive(tmp_path):
    np.save(tmp_path / "f.npy", arrays()["query"])
    assert "cannot be read as an npz file" in refused(tmp_path / "f.npy")


def test_files_that_are_not_there(tmp_path):
    assert "No such file" in refused(tmp_path / "f.npz")
    assert "cannot be read as an npz file" in refused(tmp_path)


@pytest.mark.parametrize("write", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
def test_a_truncated_file(tmp_path, write, share):
    path = save(tmp_path / "f.npz", arrays(gallery=500), write)
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    assert "cannot be read as an npz file" in refused(path)


def test_damaged_compressed_features(tmp_path):
    # depending on the place, it is the decompression, the checksum or the array's header that fails
    zeros = {"gallery": np.zeros((500, 4), dtype=np.float32)}
    path = save(tmp_path / "f.npz", write=np.savez_compressed, **zeros)
    content = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        size = archive.getinfo("gallery.npy").compress_size
    start = content.find(b"gallery.npy") + 31
    for place in range(start, start + size, 3):
        path.write_bytes(content[:place] + bytes([content[place] ^ 0x55]) + content[place + 1 :])
        refused(path)


def test_a_damaged_header_of_an_array(tmp_path):
    path = save(tmp_path / "f.npz")
    content = path.read_bytes()
    path.write_bytes(content.replace(b"\x93NUMPY", b"\x93NUMPX", 1))
    assert "cannot be read as an npz file" in refused(path)
    path.write_bytes(content.replace(b"(5, 4)", b"(5, 40", 1))
    assert "cannot be read as an npz file" in refused(path)


def test_a_header_that_promises_more_than_the_file_holds(tmp_path):
    content = arrays()
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"shape": (999_999, 4), "fortran_order": False, "descr": "<f4"})
    promise = header.getvalue() + content["gallery"].tobytes()
    path = tmp_path / "f.npz"
    with zipfile.ZipFile(path, "w") as archive:
        for name in NAMES:
            data = io.BytesIO()
            np.save(data, content[name])
            archive.writestr(f"{name}.npy", promise if name == "gallery" else data.getvalue())
    refused(path)
