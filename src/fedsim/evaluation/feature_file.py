"""Feature files: npz archives with features, identities and cameras of queries and gallery, from any program."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple
from zipfile import ZIP_STORED, ZipFile

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.core.errors import DataError
from fedsim.core.files import replacing
from fedsim.evaluation.ranking import Ints, RetrievalLabels

_LOCAL_HEADER = 30  # bytes before name and extra field of a member of a zip archive


class FeatureFile(NamedTuple):
    """The features of a file, [Q, D] and [G, D] of any float type, with identities and cameras."""

    query: Tensor
    gallery: Tensor
    labels: RetrievalLabels


class Files(NamedTuple):
    """The names of image files."""

    query: NDArray[np.str_]
    """[Q] paths; empty texts for images without a file"""
    gallery: NDArray[np.str_]
    """[G]"""

    @property
    def arrays(self) -> dict[str, Any]:
        """The arrays of an npz file; none if no image has a file."""
        has_files = any(map(len, (*self.query, *self.gallery)))
        return {"query_files": self.query, "gallery_files": self.gallery} if has_files else {}


def write_features(
    path: Path, query: Tensor, gallery: Tensor, labels: RetrievalLabels, files: Files | None = None
) -> None:
    """Write a feature file of ``query`` [Q, D], ``gallery`` [G, D], their identities, cameras and files."""
    names: dict[str, Any] = {} if files is None else files.arrays
    with replacing(path) as partial, partial.open("wb") as file:
        np.savez(
            file, query=query.cpu().numpy(), gallery=gallery.cpu().numpy(),
            query_pids=labels.query_pids, query_camids=labels.query_camids,
            gallery_pids=labels.gallery_pids, gallery_camids=labels.gallery_camids, **names,
        )  # fmt: skip


def read_features(path: Path, camera_aware: bool = True, junk_pids: tuple[int, ...] = (-1,)) -> FeatureFile:
    """Read a feature file; arrays that are not compressed stay on the disk until they are used.

    It is an npz file with query [Q, D], query_pids [Q], query_camids [Q], and the same for the gallery; unless
    ``camera_aware``, cameras may be missing. Raises DataError, naming the wrong array. See :class:`RetrievalLabels`.
    """
    try:
        with ZipFile(path) as archive:
            query, query_pids, query_camids = _read_kind(path, archive, "query", camera_aware)
            gallery, gallery_pids, gallery_camids = _read_kind(path, archive, "gallery", camera_aware)
    except DataError:
        raise
    except Exception as error:  # zipfile and numpy raise many types for damaged files
        raise DataError(f"{path}: cannot be read as an npz file ({error})") from error
    if query.shape[1] != gallery.shape[1]:
        widths = f"{query.shape[1]} and {gallery.shape[1]}"
        raise DataError(f"{path}: query and gallery have features of different width, {widths}")
    labels = RetrievalLabels(query_pids, query_camids, gallery_pids, gallery_camids, camera_aware, junk_pids)
    return FeatureFile(torch.from_numpy(query), torch.from_numpy(gallery), labels)


def _read_kind(path: Path, archive: ZipFile, role: str, camera_aware: bool) -> tuple[NDArray[Any], Ints, Ints]:
    """Return features, identities and cameras of queries or gallery."""
    features = _array(path, archive, role)
    if features.ndim != 2 or 0 in features.shape or features.dtype.kind != "f":
        description = f"{features.dtype} {list(features.shape)}"
        raise DataError(f"{path}: {role} is {description}; it must be an array of floats [images, features]")
    if not features.dtype.isnative or features.dtype.itemsize > 8:  # torch cannot take them as they are
        features = features.astype(np.float32)
    pids, camids = _labels(path, archive, f"{role}_pids", len(features)), np.zeros(len(features), dtype=np.int64)
    if camera_aware or f"{role}_camids.npy" in archive.namelist():
        camids = _labels(path, archive, f"{role}_camids", len(features))
    return features, pids, camids


def _labels(path: Path, archive: ZipFile, name: str, size: int) -> Ints:
    array = _array(path, archive, name)
    if array.shape != (size,) or array.dtype.kind not in "iu":
        raise DataError(f"{path}: {name} is {array.dtype} {list(array.shape)}; it must be {size} integers")
    return np.asarray(array, dtype=np.int64)


def _array(path: Path, archive: ZipFile, name: str) -> NDArray[Any]:
    """Return a member, mapped into memory if it is not compressed."""
    try:
        info = archive.getinfo(f"{name}.npy")
    except KeyError as error:
        names = ", ".join(n.removesuffix(".npy") for n in archive.namelist()) or "nothing"
        raise DataError(f"{path}: there is no array {name}, only {names}") from error
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
