"""CIFAR-10's pickles are read without calling what they name."""

import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedsim.core.errors import DataError
from fedsim.data.check import find_data
from fedsim.data.datasets import CIFAR10, Counts
from fedsim.data.federated import RetrievalSet
from fedsim.data.images import ImageArray
from fedsim.data.standins import write_standin
from fedsim.evaluation.retrieval import trials_of


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_standin("cifar10", tmp_path_factory.mktemp("data"), people=10)


@pytest.fixture
def copied(root, tmp_path):
    return Path(shutil.copytree(root, tmp_path / "cifar-10-batches-py"))


def only(root):
    (domain,) = CIFAR10(str(root)).domains()
    return domain


def test_images_and_classes_are_those_of_the_files(root):
    domain = only(root.parent)
    assert (domain.name, len(domain.train), len(domain.query), len(domain.gallery)) == ("cifar10", 200, 0, 40)
    names = [f"data_batch_{number}" for number in range(1, 6)]
    for split, files in ((domain.train, names), (domain.gallery, ["test_batch"])):
        row, pixels = 0, split.images.decode((32, 32))
        for file in files:
            content = pickle.loads((root / file).read_bytes(), encoding="bytes")
            for image, label in zip(content[b"data"], content[b"labels"], strict=True):
                assert split.pids[row] == label + 1
                for channel, y, x in ((0, 0, 0), (1, 0, 5), (2, 31, 7), (0, 30, 31)):
                    assert pixels[row, channel, y, x] == image[1024 * channel + 32 * y + x]
                row += 1
        assert row == len(split)
    assert set(domain.train.camids.tolist()) == {0}


def test_one_half_of_the_test_images_asks_the_other(root):
    domain = only(root)
    assert set(domain.gallery.camids.tolist()) == {1, 2}
    (split,) = domain.splits
    assert sorted([*split.query, *split.gallery]) == list(range(40))
    assert len(split.query) == len(split.gallery) == 20
    (trial,) = trials_of(RetrievalSet(domain.query, domain.gallery, splits=domain.splits), True, (-1,))
    assert trial.labels.num_valid == trial.num_queries == 20


def python2_pickle(data, labels):
    """What Python 2 wrote: its strings have an opcode of their own, and become bytes."""
    shape = b"K" + bytes([len(data)]) + b"M\x00\x0c\x86"  # (n, 3072)
    kind = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    raw = data.tobytes()
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R(K\x01"
        + shape + kind + b"\x89T" + len(raw).to_bytes(4, "little") + raw + b"tb"
    )  # fmt: skip
    listed = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    return b"\x80\x02}(U\x04data" + array + b"U\x06labels" + listed + b"U\x0bbatch_labelU\x07batch 1u."


@pytest.mark.filterwarnings("ignore:numpy.core:DeprecationWarning")  # the reference imports what the file names
def test_files_of_python_2_are_read(copied):
    data = np.random.Generator(np.random.Philox(0)).integers(0, 256, (2, 3072)).astype(np.uint8)
    content = python2_pickle(data, [3, 9])
    assert (pickle.loads(content, encoding="bytes")[b"data"] == data).all()
    (copied / "test_batch").write_bytes(content)
    gallery = only(copied).gallery
    assert gallery.pids.tolist() == [4, 10]
    assert (gallery.images.decode((32, 32)).numpy().reshape(2, 3072) == data).all()


class Trace:
    """Leaves a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


class Evaluate:
    def __reduce__(self):
        return eval, ("1",)


def test_nothing_in_a_file_is_called(copied, tmp_path):
    for value in (Trace(tmp_path / "trace"), {b"data": Trace(tmp_path / "trace")}, [Evaluate()]):
        (copied / "data_batch_3").write_bytes(pickle.dumps(value, protocol=2))
        with pytest.raises(DataError, match=r"data_batch_3: is not a batch of CIFAR-10 .*it names .*, which no such"):
            only(copied)
    assert not (tmp_path / "trace").exists()


class Unfilled:
    """An array of the right shape, whose memory nothing has filled."""

    def __reduce__(self):
        return np.ndarray, ((2, 3072), "u1")


class Reconstructed(Unfilled):
    def __reduce__(self):
        return np.zeros(0).__reduce__()[0], (np.ndarray, (2, 3072), b"u1")


@pytest.mark.parametrize("kind", [Unfilled, Reconstructed])
def test_memory_that_nothing_has_filled_is_no_image(copied, kind):
    (copied / "test_batch").write_bytes(pickle.dumps({b"data": kind(), b"labels": [1, 2]}, protocol=2))
    with pytest.raises(DataError, match="test_batch: "):
        only(copied)


PIXELS = np.zeros((2, 3072), dtype=np.uint8)


@pytest.mark.parametrize(
    ("content", "message"),
    [({b"data": PIXELS.astype(np.float32), b"labels": [1, 2]}, "data are not bytes"),
     ({b"data": np.array([[None] * 3072] * 2), b"labels": [1, 2]}, "data are not bytes"),
     ({b"data": PIXELS, b"labels": [1]}, r"1 labels and data of shape \(2, 3072\)"),
     ({b"data": PIXELS[:, :100], b"labels": [1, 2]}, r"shape \(2, 100\), which should be \(2, 3072\)"),
     ({b"data": PIXELS, b"labels": [1, 10]}, "classes 0 to 9"),
     ({b"data": PIXELS, b"labels": [1, "2"]}, "classes 0 to 9"),
     ({b"data": PIXELS, b"fine_labels": [1, 2]}, "b'labels'"),
     ([1, 2], "is not a batch of CIFAR-10")],
    ids=str,
)  # fmt: skip
def test_what_is_no_batch_is_refused_by_name(copied, content, message):
    (copied / "data_batch_2").write_bytes(pickle.dumps(content, protocol=2))
    with pytest.raises(DataError, match=message) as error:
        only(copied)
    assert str(copied / "data_batch_2") in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("keep", [0, 1, 50, 20_000])
def test_a_file_that_was_cut_short_is_refused(copied, keep):
    path = copied / "data_batch_1"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match=r"data_batch_1: is not a batch of CIFAR-10"):
        only(copied)


@pytest.mark.parametrize("module", [b"numpy.core.numeric", b"numpy._core.numeric"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_files_of_protocol_5_are_read(copied, module, order):
    data = (np.arange(2 * 3072).reshape(2, 3072) % 251).astype(np.uint8, order=order)
    text = pickle.dumps({b"data": data, b"labels": [0, 1]}, protocol=5)
    # without the frame, whose length would change; a name's length stands before it
    (name,) = (n for n in (b"numpy.core.numeric", b"numpy._core.numeric") if n in text)
    text = text[:2] + text[11:].replace(bytes([len(name)]) + name, bytes([len(module)]) + module)
    (copied / "test_batch").write_bytes(text)
    assert (only(copied).gallery.images.decode((32, 32)).numpy().reshape(2, 3072) == data).all()


class OutOfArray:
    """Protocol 5's array of the memory of another object."""

    def __reduce__(self):
        rebuild = PIXELS.__reduce_ex__(5)[0]
        return rebuild, (PIXELS.astype("u2"), np.dtype("u1"), (2, 6144), "C")


def test_an_array_of_another_object_s_memory_is_refused(copied):
    (copied / "test_batch").write_bytes(pickle.dumps({b"data": OutOfArray(), b"labels": [0, 1]}, protocol=5))
    with pytest.raises(DataError, match="an array's content is not bytes"):
        only(copied)


def test_columns_may_come_first(copied):
    data = np.asfortranarray(np.arange(2 * 3072, dtype=np.int64).reshape(2, 3072) % 251).astype(np.uint8, order="F")
    (copied / "test_batch").write_bytes(pickle.dumps({b"data": data, b"labels": [0, 1]}, protocol=2))
    assert (only(copied).gallery.images.decode((32, 32)).numpy().reshape(2, 3072) == data).all()


def test_cifar10_of_official_size_is_complete(tmp_path):
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    content = {b"data": np.zeros((10_000, 3072), dtype=np.uint8), b"labels": [i % 10 for i in range(10_000)]}
    (folder / "data_batch_1").write_bytes(pickle.dumps(content, protocol=2))
    for name in (*(f"data_batch_{number}" for number in range(2, 6)), "test_batch"):
        (folder / name).hardlink_to(folder / "data_batch_1")
    (finding,) = (finding for finding in find_data(tmp_path) if finding.name == "cifar10")
    assert finding.found == Counts(10, 50_000, 0, 10_000)
    assert finding.problem == ""


def test_images_in_memory_are_resized_like_files(tmp_path):
    pixels = np.random.Generator(np.random.Philox(1)).integers(0, 256, (3, 32, 32, 3)).astype(np.uint8)
    images = ImageArray(pixels)
    for row in range(3):
        Image.fromarray(pixels[row]).save(tmp_path / f"{row}.png")
    with Image.open(tmp_path / "2.png") as image:
        expected = np.asarray(image.resize((10, 20), Image.Resampling.BICUBIC))
    decoded = images.take(np.array([2, 0])).decode((20, 10))
    assert decoded.shape == (2, 3, 20, 10)
    assert decoded.dtype == torch.uint8
    assert (decoded[0].permute(1, 2, 0).numpy() == expected).all()
    assert images.take(np.array([], dtype=np.int64)).decode((20, 10)).shape == (0, 3, 20, 10)
    assert sum(map(len, images.chunks())) == 3
