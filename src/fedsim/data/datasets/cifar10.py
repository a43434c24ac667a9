"""CIFAR-10 (Krizhevsky, 2009): the classification task of paper 001, Table 2."""

from __future__ import annotations

import pickle
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsim.core.errors import DataError
from fedsim.data.datasets.base import Counts, DataSet
from fedsim.data.images import Domain, GallerySplit, ImageArray, Split

_TRAIN = tuple(f"data_batch_{number}" for number in range(1, 6))
_TEST = "test_batch"
_SHAPE = (3, 32, 32)
_CLASSES = 10
_KNOWN = {
    ("numpy.core.multiarray", "_reconstruct"), ("numpy.core.numeric", "_frombuffer"), ("numpy", "ndarray"),
    ("numpy", "dtype"), ("_codecs", "encode"),
}  # fmt: skip
"""module, as NumPy 1 calls it, and name"""


class CIFAR10(DataSet):
    """CIFAR-10's Python version: 50,000 training and 10,000 test images of 10 classes, 32 x 32 pixels.

    Identity = class + 1. Training and test have the same classes: set ``data.val`` to images, first_image or none.
    Training images are camera 0. ``gallery`` is all test images in the order of their file, for top-1 accuracy;
    ``query`` is empty. For retrieval there is one split of the gallery: queries are the first half (camera 1), the
    gallery is the second half (camera 2), so no image finds itself and no match is junk.

    The files are pickles, of which only NumPy's arrays are made: see :class:`_BatchReader`.
    """

    name = "cifar10"
    folders = ("cifar-10-batches-py",)
    holds: tuple[str, ...] = (*_TRAIN, _TEST)
    official: Counts | None = Counts(10, 50_000, 0, 10_000)
    ask = "it is free: the Python version, from www.cs.toronto.edu/~kriz/cifar.html"

    def _read(self, folder: Path) -> Domain:
        batches = [_read_batch(folder / name) for name in _TRAIN]
        pixels, classes = (np.concatenate(parts) for parts in zip(*batches, strict=True))
        train = Split(ImageArray(pixels), classes + 1, np.zeros(len(classes), dtype=np.int64))
        pixels, classes = _read_batch(folder / _TEST)
        rows = np.arange(len(classes), dtype=np.int64)
        answers = rows >= len(rows) // 2
        test = Split(ImageArray(pixels), classes + 1, np.where(answers, 2, 1).astype(np.int64))
        split = GallerySplit(rows[~answers], rows[answers])
        return Domain(self.name, train, test.take(rows[:0]), test, (split,))


def _read_batch(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return pixels, uint8 [n, 32, 32, 3], and classes [n], from 0; raise DataError for any other file."""
    try:
        if not path.is_file():  # a pipe would be waited for
            raise FileNotFoundError("no such file")
        with path.open("rb") as file:
            content = _BatchReader(file, encoding="bytes").load()
        pixels = content[b"data"]
        if pixels.dtype != np.uint8:
            raise ValueError("data are not bytes")
        labels = content[b"labels"]
    except Exception as error:  # a damaged or forged pickle can raise any type
        raise DataError(f"{path}: is not a batch of CIFAR-10 ({error!r}); get the Python version again") from error
    if not isinstance(labels, list) or not all(type(label) is int and 0 <= label < _CLASSES for label in labels):
        raise DataError(f"{path}: labels are not a list of classes 0 to {_CLASSES - 1}; get the Python version again")
    if pixels.shape != (len(labels), prod(_SHAPE)) or not labels:
        raise DataError(
            f"{path}: has {len(labels)} labels and data of shape {pixels.shape}, which should be "
            f"({len(labels)}, {prod(_SHAPE)}); get the Python version again"
        )
    images = pixels.reshape(-1, *_SHAPE).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(images), np.array(labels, dtype=np.int64)


class _BatchReader(pickle.Unpickler):
    """Reads lists, dictionaries, numbers, strings, and NumPy's arrays; a pickle that names anything else is refused."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a known name."""
        if (module.replace("_core", "core"), name) not in _KNOWN:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no such file needs")
        if name in _STAND_INS:
            return _STAND_INS[name]
        return super().find_class(module, name)


def _new_array(*_: Any) -> NDArray[np.uint8]:
    """Return an array without elements, which the next instruction fills; NumPy's would have undefined values."""
    return np.empty(0, np.uint8)


def _array_of(content: Any, dtype: np.dtype[Any], shape: tuple[int, ...], order: Any) -> NDArray[Any]:
    """Return the array of protocol 5, of the bytes in the file."""
    if not isinstance(content, bytes | bytearray):
        raise pickle.UnpicklingError("an array's content is not bytes")
    return np.frombuffer(content, dtype).reshape(shape, order=order)


_STAND_INS = {"_reconstruct": _new_array, "_frombuffer": _array_of, "ndarray": "numpy.ndarray"}
"""what a pickle gets for NumPy's names; the class is only named, and cannot be called"""
