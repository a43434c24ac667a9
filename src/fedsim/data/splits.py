"""Random splits of small test sets into queries and gallery, and files of splits, for equal scores everywhere.

Papers score VIPeR, i-LIDS, GRID, PRID, 3DPeS and CAVIAR on ten random splits and publish none. Here a split depends on
its number and the sorted identities alone. Its file has checksums of the splits and of the names of the images.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fedsim.core.errors import ConfigError, DataError
from fedsim.core.files import replacing
from fedsim.core.seeding import numpy_generator
from fedsim.data.images import GallerySplit, Index

SplitStyle = Literal["one_query", "pairs"]

_MINIMUM = 2  # images of an identity with a possible match


def sample_splits(
    pids: Index, camids: Index, *, num: int = 10, fraction: float = 0.5,
    style: SplitStyle = "one_query", cross_camera: bool = True, asking: Sequence[int] = (),
) -> list[GallerySplit]:  # fmt: skip
    """Sample test identities, queries and galleries; split number i depends on i and the sorted identities alone.

    A random part of the identities with a possible match is tested. ``one_query``: one random image of each is a query,
    its other images are in the gallery. ``pairs``: one other random image of each is in the gallery. Identities without
    a possible match, distractors (0) and junk (-1) are in every gallery.

    ``pids`` and ``camids`` [n]: identities and cameras of the pool. ``num``: number of splits. ``fraction``: share of
    the identities to test; ConfigError if it leaves none. ``cross_camera``: the match must be from another camera than
    the query, as evaluation with ``camera_aware`` demands; identities of one camera then have no possible match.
    ``asking``: the camera of all queries of a split. With c cameras, c splits in a row have the same people, whom all
    of these cameras saw, and the queries of each are from another camera. Empty: a random camera for each identity.
    """
    if num < 1:
        raise ConfigError(f"num: {num} is less than 1")
    if not 0 < fraction <= 1:
        raise ConfigError(f"fraction: {fraction} is not above 0 and at most 1")
    groups = [np.flatnonzero(pids == pid) for pid in np.unique(pids[pids > 0])]
    possible = [g for g in groups if len(g) >= _MINIMUM and not (cross_camera and len(np.unique(camids[g])) < _MINIMUM)]
    possible = [g for g in possible if np.isin(asking, camids[g]).all()]
    count = round(fraction * len(possible))
    if not 0 < count <= len(possible):
        raise ConfigError(
            f"fraction: {fraction} of {len(possible)} identities with a possible match is less than one; "
            "choose a larger fraction, or set cross_camera to false"
        )
    always = np.setdiff1d(np.arange(len(pids)), np.concatenate(possible))
    splits = []
    for number in range(num):
        half, turn = divmod(number, max(1, len(asking)))
        rng = numpy_generator("splits", half)
        tested = [possible[i] for i in np.sort(rng.permutation(len(possible))[:count])]
        first = asking[turn] if asking else None
        pairs = [_sample(group, camids[group], style, cross_camera, rng, first) for group in tested]
        query = np.array([q for q, _ in pairs], dtype=np.int64)
        splits.append(GallerySplit(query, np.sort(np.concatenate([always, *(g for _, g in pairs)]))))
    return splits


def _sample(
    group: Index, camids: Index, style: SplitStyle, cross_camera: bool, rng: np.random.Generator, first: int | None
) -> tuple[int, Index]:
    """Return one identity's query, from camera ``first`` unless that is None, and its gallery positions."""
    order = rng.permutation(len(group))
    if first is not None:
        order = order[np.argsort(camids[order] != first, kind="stable")]
    query, candidates = order[0], order[1:]
    if style == "one_query":
        return int(group[query]), group[candidates]
    matches = candidates[camids[candidates] != camids[query]] if cross_camera else candidates
    return int(group[query]), group[matches[:1]]


def official_grid_splits(path: Path, pids: Index, is_probe: NDArray[np.bool_]) -> list[GallerySplit]:
    """Read GRID's ten official partitions (``features_and_partitions.mat``, variable ``trainIdxAll``).

    The variable is a row of ten cells; each is a structure whose field ``personIdx`` has the 125 training identities of
    250 (the others, ``probeImIdx`` and ``galleryImIdx``, are rows of a table of features). Source: ``sample.m`` beside
    the file, and torchreid's grid.py. The probe images of the other identities are queries; their gallery images and
    the 775 images of identity 0 are the gallery. The pool is all probe and gallery images, with ``pids`` [n] and
    ``is_probe`` [n]. Raises DataError if the file has other content.
    """
    from scipy.io import loadmat

    try:
        if not path.is_file():  # a pipe would be waited for
            raise FileNotFoundError("no such file")
        cells = loadmat(path, variable_names=["trainIdxAll"])["trainIdxAll"].ravel()
        trained = [np.unique(np.asarray(cell["personIdx"].item()).astype(np.int64)) for cell in cells]
    except Exception as error:  # scipy raises many types for a damaged file
        problem = f"is not GRID's file of partitions ({error})"
        raise DataError(f"{path}: {problem}; get features_and_partitions.mat") from error
    paired = np.unique(pids[pids > 0])
    for number, identities in enumerate(trained):
        if not np.isin(identities, paired).all() or not 0 < len(identities) < len(paired):
            raise DataError(f"{path}: partition {number} does not fit the images; GRID has 250 identities with a pair")
    tested = [~np.isin(pids, identities) for identities in trained]
    return [
        GallerySplit(np.flatnonzero(is_probe & (pids > 0) & part), np.flatnonzero(~is_probe & part)) for part in tested
    ]


def write_splits(path: Path, splits: Sequence[GallerySplit], names: Sequence[str]) -> None:
    """Write splits, positions in the list of images with these ``names``, as JSON with checksums."""
    content = [{name: part.tolist() for name, part in split._asdict().items()} for split in splits]
    sums = {"images_sha256": _sha256("\n".join(names)), "splits_sha256": _sha256(json.dumps(content))}
    with replacing(path) as partial:
        partial.write_text(json.dumps({"num_images": len(names), **sums, "splits": content}) + "\n")


def read_splits(path: Path, names: Sequence[str]) -> tuple[GallerySplit, ...]:
    """Read a file of :func:`write_splits`; raise DataError if it was changed, or the images have other ``names``."""
    try:
        content = json.loads(path.read_text())
        expected = (content["images_sha256"], content["splits_sha256"])
        splits = content["splits"]
        parts = ((np.array(split[name], dtype=np.int64) for name in GallerySplit._fields) for split in splits)
        positions = tuple(GallerySplit(*pair) for pair in parts)
        if any(part.ndim != 1 for split in positions for part in split):
            raise ValueError("a part of a split is no list of numbers")
        checksum = _sha256(json.dumps(splits))
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise DataError(f"{path}: is no file of splits ({error}); write one with fedsim data splits") from error
    if checksum != expected[1]:
        raise DataError(f"{path}: the splits were changed after they were written (checksum); restore the file")
    if _sha256("\n".join(names)) != expected[0]:
        raise DataError(
            f"{path}: the splits belong to another list of images ({content.get('num_images', 'no')} files, here "
            f"{len(names)}); restore the images, or write new splits"
        )
    indices = np.concatenate([part for split in positions for part in split] or [np.zeros(0, dtype=np.int64)])
    are_full = positions and all(len(part) for split in positions for part in split)
    if not are_full or not np.isin(indices, np.arange(len(names))).all():
        raise DataError(f"{path}: holds no splits of {len(names)} images; write new ones with fedsim data splits")
    return positions


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
