"""Ranked lists and scores of features in memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.core.annotations import check_value, python_number
from fedsim.core.checked import checked
from fedsim.core.checks import Count
from fedsim.core.errors import ConfigError, DataError
from fedsim.core.names import one_line
from fedsim.evaluation.ranker import rank_features
from fedsim.evaluation.ranking import Ints, Ranking, RetrievalLabels
from fedsim.functional.similarity import Distance, NotFiniteError, Similarity

Numbers = Sequence[int] | Ints | Tensor
Floats = NDArray[np.floating[Any]]


class FeaturesKind:
    """Features [n, D], floats in a tensor or an array: a kind of argument of :func:`rank`."""

    def check(self, value: Any, name: str) -> Tensor:
        """Return features as a tensor [n, D]; raise ConfigError, beginning with ``name``, if they are none."""
        if isinstance(value, np.ndarray) and value.dtype.kind == "f":  # a tensor takes no other order of bytes
            value = torch.from_numpy(np.require(value, np.float64 if value.itemsize > 4 else np.float32, ["C", "W"]))
        is_here = isinstance(value, Tensor) and value.layout == torch.strided and not value.is_meta
        if not is_here or not value.is_floating_point() or value.dim() != 2 or not value.numel():
            raise ConfigError(f"{name}: expected a tensor or an array of floats [n, D], got {_described(value)}")
        features: Tensor = value.detach()
        return features


class LabelsKind:
    """Integers of queries and of gallery images: a kind of argument of :func:`rank`."""

    def check(self, value: Any, name: str) -> tuple[Ints, Ints]:
        """Return both as arrays int64; raise ConfigError, beginning with ``name``, if they are none."""
        if not isinstance(value, tuple | list) or len(value) != 2:
            raise ConfigError(f"{name}: expected a pair, (of queries, of gallery images), got {_described(value)}")
        return _as_ints(value[0], name), _as_ints(value[1], name)


def _as_ints(numbers: Any, name: str) -> Ints:
    plain = numbers.cpu() if isinstance(numbers, Tensor) and not numbers.is_floating_point() else numbers
    try:
        array = np.asarray(plain)
    except (TypeError, ValueError, RuntimeError):  # lists of several lengths
        array = np.asarray(None)
    if array.ndim != 1 or array.dtype.kind not in "iu" or not np.can_cast(array.dtype, np.int64):
        raise ConfigError(f"{name}: expected integers, a list, an array or a tensor [n], got {_described(numbers)}")
    return array.astype(np.int64)


def _described(value: Any) -> str:
    """Return a value in a few words: the dtype and shape of numbers."""
    is_array = isinstance(value, Tensor | np.ndarray)
    return f"{value.dtype} {list(value.shape)}".removeprefix("torch.") if is_array else one_line(repr(value), 60)


Features = Annotated[Tensor | Floats, FeaturesKind()]
Labels = Annotated[tuple[Numbers, Numbers], LabelsKind()]


@dataclass(frozen=True)
class Ranked:
    """The first gallery images of each query, and the scores if identities are known."""

    order: Tensor
    """[Q, k] int64: positions in the gallery, the most similar image first; of equal ones the first"""
    similarity: Tensor
    """[Q, k] float32: their cosine, or negative distance"""
    names: list[list[str]] | None
    """their names"""
    scores: Ranking | None
    """CMC, mAP and the like, with ``rank1`` and ``mAP`` in [0, 1]; junk is left out"""


@checked()
def rank(
    query: Features,
    gallery: Features,
    *,
    names: Sequence[str | os.PathLike[str]] | NDArray[np.str_] | None = None,
    pids: Labels | None = None,
    cameras: Labels | None = None,
    distance: Distance = "cosine",
    top: Count = 10,
) -> Ranked:
    """Rank a gallery for each query.

    >>> ranked = rank(torch.eye(2), torch.tensor([[1.0, 0.2], [0.0, 1.0]]), names=["a", "b"])
    >>> ranked.names
    [['a', 'b'], ['b', 'a']]

    Args:
        query: features [Q, D], floats in a tensor or an array.
        gallery: features [G, D].
        names: of the gallery's images, such as their paths.
        pids: identities of queries and gallery, [Q] and [G]; gallery images with -1 are junk. They give scores.
        cameras: cameras of both; the same identity in the same camera is junk for scores. None: nothing is.
        distance: cosine, or euclidean on features as they are.
        top: k, images per list.

    Raises:
        ConfigError: naming an argument that is none, or if the sizes do not fit together.
        DataError: if features are not finite, or no query has a match.
    """
    assert isinstance(query, Tensor)
    assert isinstance(gallery, Tensor)
    _check_sizes(query, gallery, names, pids, cameras)
    num_best, orders, values = min(top, len(gallery)), [], []
    labels = None if pids is None else _labels(pids, cameras)  # type: ignore[arg-type] # arrays by now
    try:
        for rows, block in Similarity(query, gallery, distance):
            order = block.argsort(dim=1, descending=True, stable=True)[:, :num_best]
            orders.append(order)
            # of Euclidean distances, a block has what orders them
            is_cosine = distance == "cosine"
            values.append(block.gather(1, order) if is_cosine else -_distances(query[rows], gallery, order))
        scores = None if labels is None else rank_features(query, gallery, labels, distance)
    except NotFiniteError as error:
        raise DataError(f"features: {error}") from error
    order = torch.cat(orders).cpu()
    paths = None if names is None else [os.fspath(python_number(check_value(name, str, "names"))) for name in names]
    listed = None if paths is None else [[paths[i] for i in row] for row in order.tolist()]
    return Ranked(order, torch.cat(values).cpu(), listed, scores)


def _distances(query: Tensor, gallery: Tensor, order: Tensor) -> Tensor:
    """Return the Euclidean distances [q, k] of queries [q, D] to the gallery images in ``order`` [q, k]."""
    return torch.stack(
        [(gallery[images] - features).norm(dim=1) for features, images in zip(query, order, strict=True)]
    )


def _labels(pids: tuple[Ints, Ints], cameras: tuple[Ints, Ints] | None) -> RetrievalLabels:
    camids = cameras or (np.zeros_like(pids[0]), np.zeros_like(pids[1]))
    labels = RetrievalLabels(pids[0], camids[0], pids[1], camids[1], cameras is not None, (-1,))
    if labels.num_valid == 0:
        raise DataError(f"pids: no query has a match: {labels.why_no_match()}")
    return labels


def _check_sizes(query: Tensor, gallery: Tensor, names: Any, pids: Any, cameras: Any) -> None:
    if query.shape[1] != gallery.shape[1]:
        raise ConfigError(f"features: {list(query.shape)} and {list(gallery.shape)} must be [Q, D] and [G, D]")
    if names is not None and len(names) != len(gallery):
        raise ConfigError(f"names: {len(names)} names for {len(gallery)} gallery images")
    for field, pair in (("pids", pids), ("cameras", cameras)):
        if pair is not None and (sizes := [len(of_kind) for of_kind in pair]) != [len(query), len(gallery)]:
            raise ConfigError(f"{field}: {sizes} numbers for {len(query)} queries and {len(gallery)} gallery images")
    if cameras is not None and pids is None:
        raise ConfigError("cameras: are for scores, which need pids, too")
