"""Random splits of small test sets into queries and gallery, kept in a file so that everybody scores the same ones.

Papers score VIPeR, i-LIDS, GRID, PRID, 3DPeS and CAVIAR on ten random splits and publish none. Here a split is a
function of its number and of the sorted identities, and is written down with checksums of the images and of itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedsim.core.errors import ConfigError, DataError
from fedsim.core.files import replacing
from fedsim.core.seeding import numpy_generator
from fedsim.data.images import GallerySplit, Index

__all__ = ["SplitStyle", "draw_splits", "official_grid_splits", "read_splits", "write_splits"]

SplitStyle = Literal["one_query", "pairs"]

_MINIMUM = 2  # images of an identity that can be found


def draw_splits(
    pids: Index,
    camids: Index,
    *,
    num: int = 10,
    fraction: float = 0.5,
    style: SplitStyle = "one_query",
    cross_camera: bool = True,
) -> list[GallerySplit]:
    """Draw test identities, queries and galleries; split number i depends on i and the sorted identities alone.

    A random part of the identities with a possible match is tested on. ``one_query``: one random image of each is a
    query, its other images are the gallery. ``pairs``: one more random image of each is its gallery. Identities without
    a possible match, distractors (0) and junk (-1) are part of every gallery.

    Args:
        pids: [n] identities of the pool.
        camids: [n] cameras.
        num: splits to draw.
        fraction: of the identities that are tested on.
        style: see above.
        cross_camera: draw the query so that a gallery image is from another camera, where evaluation demands it
            (``camera_aware``); identities seen by one camera then have no possible match.

    Raises:
        ConfigError: if the fraction leaves no identity.
    """
    if num < 1:
        raise ConfigError(f"num: {num} is less than 1")
    if not 0 < fraction <= 1:
        raise ConfigError(f"fraction: {fraction} is not above 0 and at most 1")
    groups = [np.flatnonzero(pids == pid) for pid in np.unique(pids[pids > 0])]
    possible = [g for g in groups if len(g) >= _MINIMUM and not (cross_camera and len(np.unique(camids[g])) < _MINIMUM)]
    count = round(fraction * len(possible))
    if not 0 < count <= len(possible):
        raise ConfigError(
            f"fraction: {fraction} of {len(possible)} identities with a possible match is none; "
            "choose a larger one, or set cross_camera to false"
        )
    always = np.setdiff1d(np.arange(len(pids)), np.concatenate(possible))
    splits = []
    for number in range(num):
        rng = numpy_generator("splits", number)
        tested = [possible[i] for i in np.sort(rng.permutation(len(possible))[:count])]
        pairs = [_draw(group, camids[group], style, cross_camera, rng) for group in tested]
        query = np.array([q for q, _ in pairs], dtype=np.int64)
        splits.append(GallerySplit(query, np.sort(np.concatenate([always, *(g for _, g in pairs)]))))
    return splits


def _draw(
    group: Index, camids: Index, style: SplitStyle, cross_camera: bool, rng: np.random.Generator
) -> tuple[int, Index]:
    """Return one identity's query and gallery positions."""
    order = rng.permutation(len(group))
    query, rest = order[0], order[1:]
    if style == "one_query":
        return int(group[query]), group[rest]
    others = rest[camids[rest] != camids[query]] if cross_camera else rest
    return int(group[query]), group[others[:1]]


def official_grid_splits(path: Path, pids: Index, is_probe: NDArray[np.bool_]) -> list[GallerySplit]:
    """Read GRID's ten official partitions (``features_and_partitions.mat``, variable ``trainIdAll``).

    Each cell holds the 125 of 250 identities that are trained on. The others' probe images are queries; their gallery
    images and the 775 images of identity 0 are the gallery.

    Args:
        path: the file.
        pids: [n] identities of the pool of probe and gallery images.
        is_probe: [n] bool, which are probe images.

    Raises:
        DataError: if the file is not what it should be.
    """
    from scipy.io import loadmat

    try:
        cells = loadmat(path)["trainIdAll"].ravel()
        trained = [np.unique(np.asarray(cell).astype(np.int64)) for cell in cells]
    except Exception as error:  # whatever scipy makes of a damaged file
        raise DataError(
            f"{path}: is not GRID's file of partitions ({error}); get features_and_partitions.mat"
        ) from error
    paired = np.unique(pids[pids > 0])
    for number, identities in enumerate(trained):
        if not np.isin(identities, paired).all() or not 0 < len(identities) < len(paired):
            raise DataError(f"{path}: partition {number} does not fit the images; GRID has 250 identities with a pair")
    return [
        GallerySplit(
            np.flatnonzero(is_probe & (pids > 0) & ~np.isin(pids, identities)),
            np.flatnonzero(~is_probe & ~np.isin(pids, identities)),
        )
        for identities in trained
    ]


def write_splits(path: Path, splits: Sequence[GallerySplit], names: Sequence[str]) -> None:
    """Write splits as JSON, with checksums.

    Args:
        path: the file.
        splits: positions in the list of images.
        names: of the images, in that order.
    """
    content: list[Any] = [{name: part.tolist() for name, part in split._asdict().items()} for split in splits]
    text = json.dumps(
        {"num_images": len(names), "images_sha256": _sha256("\n".join(names)),
         "splits_sha256": _sha256(json.dumps(content)), "splits": content}
    )  # fmt: skip
    with replacing(path) as partial:
        partial.write_text(text + "\n")


def read_splits(path: Path, names: Sequence[str]) -> tuple[GallerySplit, ...]:
    """Read what :func:`write_splits` wrote.

    Args:
        path: the file.
        names: of the images that are there.

    Raises:
        DataError: if the file was changed, or belongs to other images.
    """
    try:
        content = json.loads(path.read_text())
        expected = (content["images_sha256"], content["splits_sha256"])
        splits = content["splits"]
        found = tuple(
            GallerySplit(*(np.array(split[n], dtype=np.int64) for n in ("query", "gallery"))) for split in splits
        )
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise DataError(f"{path}: is no file of splits ({error}); write one with fedsim data splits") from error
    if _sha256(json.dumps(splits)) != expected[1]:
        raise DataError(f"{path}: the splits are not those that were written (checksum); restore the file")
    if _sha256("\n".join(names)) != expected[0]:
        raise DataError(
            f"{path}: the splits belong to another list of images ({content['num_images']} files, here {len(names)}); "
            "restore the images, or write new splits"
        )
    positions = np.concatenate([part for split in found for part in split] or [np.zeros(0, dtype=np.int64)])
    if (
        not found
        or not all(len(part) for split in found for part in split)
        or not np.isin(positions, np.arange(len(names))).all()
    ):
        raise DataError(f"{path}: holds no splits of {len(names)} images; write new ones with fedsim data splits")
    return found


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
