"""Feature files: npz archives with features, identities and cameras of queries and gallery, from any program."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import ZIP_STORED, ZipFile

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.core.errors import DataError
from fedsim.core.files import replacing
from fedsim.evaluation.ranking import RetrievalLabels

__all__ = ["FeatureFile", "read_features", "write_features"]

_LOCAL_HEADER = 30  # bytes before name and extra field of a member of a zip archive


@dataclass(frozen=True)
class FeatureFile:
    """What a feature file holds."""

    query: Tensor
    """[Q, D]"""
    gallery: Tensor
    """[G, D]"""
    labels: RetrievalLabels


def write_features(path: Path, query: Tensor, gallery: Tensor, labels: RetrievalLabels) -> None:
    """Write a feature file.

    Args:
        path: the file.
        query: [Q, D].
        gallery: [G, D].
        labels: identities and cameras of both.
    """
    with replacing(path) as partial, partial.open("wb") as file:
        np.savez(
            file, query=query.cpu().numpy(), gallery=gallery.cpu().numpy(),
            query_pids=labels.query_pids, query_camids=labels.query_camids,
            gallery_pids=labels.gallery_pids, gallery_camids=labels.gallery_camids,
        )  # fmt: skip


def read_features(path: Path, camera_aware: bool = True, junk_pids: tuple[int, ...] = (-1,)) -> FeatureFile:
    """Read a feature file; arrays that are not compressed stay on the disk until they are used.

    Args:
        path: an npz file with query [Q, D], query_pids [Q], query_camids [Q], and the same for the gallery.
        camera_aware: see :class:`RetrievalLabels`; without, cameras may be missing.
        junk_pids: see there.

    Raises:
        DataError: naming the array at fault.
    """
    arrays: dict[str, NDArray[Any]] = {}
    try:
        with ZipFile(path) as archive:
            for kind in ("query", "gallery"):
                arrays[kind] = _features(path, archive, kind)
                size = len(arrays[kind])
                arrays[f"{kind}_pids"] = _labels(path, archive, f"{kind}_pids", size)
                if camera_aware or f"{kind}_camids.npy" in archive.namelist():
                    arrays[f"{kind}_camids"] = _labels(path, archive, f"{kind}_camids", size)
                else:
                    arrays[f"{kind}_camids"] = np.zeros(size, dtype=np.int64)
    except DataError:
        raise
    except Exception as error:  # whatever zipfile and numpy make of a damaged file
        raise DataError(f"{path}: cannot be read as an npz file ({error})") from error
    if arrays["query"].shape[1] != arrays["gallery"].shape[1]:
        widths = f"{arrays['query'].shape[1]} and {arrays['gallery'].shape[1]}"
        raise DataError(f"{path}: query and gallery have features of different width, {widths}")
    labels = RetrievalLabels(
        arrays["query_pids"], arrays["query_camids"], arrays["gallery_pids"], arrays["gallery_camids"],
        camera_aware, junk_pids,
    )  # fmt: skip
    return FeatureFile(torch.from_numpy(arrays["query"]), torch.from_numpy(arrays["gallery"]), labels)


def _features(path: Path, archive: ZipFile, name: str) -> NDArray[Any]:
    array = _array(path, archive, name)
    if array.ndim != 2 or 0 in array.shape or array.dtype.kind != "f":
        raise DataError(
            f"{path}: {name} is {array.dtype} {list(array.shape)}; it must be an array of floats [images, features]"
        )
    if not array.dtype.isnative or array.dtype.itemsize > 8:  # torch cannot take them as they are
        array = array.astype(np.float32)
    return array


def _labels(path: Path, archive: ZipFile, name: str, size: int) -> NDArray[np.int64]:
    array = _array(path, archive, name)
    if array.shape != (size,) or array.dtype.kind not in "iu":
        raise DataError(f"{path}: {name} is {array.dtype} {list(array.shape)}; it must be {size} integers")
    return np.asarray(array, dtype=np.int64)


def _array(path: Path, archive: ZipFile, name: str) -> NDArray[Any]:
    """Return a member, mapped into memory if it is stored as it is."""
    try:
        info = archive.getinfo(f"{name}.npy")
    except KeyError as error:
        there = ", ".join(n.removesuffix(".npy") for n in archive.namelist()) or "nothing"
        raise DataError(f"{path}: there is no array {name}, only {there}") from error
    with archive.open(info) as file:
        if info.compress_type != ZIP_STORED:
            whole: NDArray[Any] = np.lib.format.read_array(file, allow_pickle=False)
            return whole
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, is_fortran, dtype = read(file)
        begin = file.tell()
    if dtype.hasobject or 0 in shape:
        raise DataError(f"{path}: {name} is {dtype} {list(shape)}; it must hold numbers")
    with path.open("rb") as file:
        file.seek(info.header_offset)
        header = file.read(_LOCAL_HEADER)
    # lengths of name and extra field; the archive's directory may have others
    start = info.header_offset + _LOCAL_HEADER + sum(int.from_bytes(header[i : i + 2], "little") for i in (26, 28))
    # copy on write: torch cannot take memory that is read-only
    return np.memmap(path, dtype, "c", start + begin, shape, "F" if is_fortran else "C")
