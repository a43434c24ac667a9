"""Ranked lists and scores of features in memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedsim.core.errors import ConfigError, DataError
from fedsim.evaluation.ranker import rank_features
from fedsim.evaluation.ranking import Ints, Ranking, RetrievalLabels
from fedsim.functional.similarity import Distance, NotFiniteError, Similarity

Numbers = Sequence[int] | Ints | Tensor


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


def rank(
    query: Tensor,
    gallery: Tensor,
    *,
    names: Sequence[str | os.PathLike[str]] | None = None,
    pids: tuple[Numbers, Numbers] | None = None,
    cameras: tuple[Numbers, Numbers] | None = None,
    distance: Distance = "cosine",
    top: int = 10,
) -> Ranked:
    """Rank a gallery for each query.

    >>> ranked = rank(torch.eye(2), torch.tensor([[1.0, 0.2], [0.0, 1.0]]), names=["a", "b"])
    >>> ranked.names
    [['a', 'b'], ['b', 'a']]

    Args:
        query: features [Q, D].
        gallery: features [G, D].
        names: of the gallery's images, such as their paths.
        pids: identities of queries and gallery, [Q] and [G]; gallery images with -1 are junk. They give scores.
        cameras: cameras of both; the same identity in the same camera is junk for scores. None: nothing is.
        distance: cosine, or euclidean on features as they are.
        top: k, images per list.

    Raises:
        ConfigError: if the sizes do not fit together.
        DataError: if features are not finite, or no query has a match.
    """
    _check_sizes(query, gallery, names, pids, cameras)
    num_best, orders, values = min(top, len(gallery)), [], []
    labels = None if pids is None else _labels(pids, cameras)
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
    listed = None if names is None else [[os.fspath(names[i]) for i in row] for row in order.tolist()]
    return Ranked(order, torch.cat(values).cpu(), listed, scores)


def _distances(query: Tensor, gallery: Tensor, order: Tensor) -> Tensor:
    """Return the Euclidean distances [q, k] of queries [q, D] to the gallery images in ``order`` [q, k]."""
    return torch.stack(
        [(gallery[images] - features).norm(dim=1) for features, images in zip(query, order, strict=True)]
    )


def _labels(pids: tuple[Numbers, Numbers], cameras: tuple[Numbers, Numbers] | None) -> RetrievalLabels:
    query_pids, gallery_pids = map(_as_ints, pids)
    camids = [np.zeros(len(query_pids), np.int64), np.zeros(len(gallery_pids), np.int64)]
    if cameras is not None:
        camids = list(map(_as_ints, cameras))
    labels = RetrievalLabels(query_pids, camids[0], gallery_pids, camids[1], cameras is not None, (-1,))
    if labels.num_valid == 0:
        raise DataError(f"pids: no query has a match: {labels.why_no_match()}")
    return labels


def _as_ints(numbers: Numbers) -> Ints:
    return np.asarray(numbers.cpu() if isinstance(numbers, Tensor) else numbers, dtype=np.int64)


def _check_sizes(
    query: Tensor,
    gallery: Tensor,
    names: Sequence[object] | None,
    pids: tuple[Numbers, Numbers] | None,
    cameras: tuple[Numbers, Numbers] | None,
) -> None:
    shapes = query.shape, gallery.shape
    if any(len(shape) != 2 or not shape[0] for shape in shapes) or query.shape[1] != gallery.shape[1]:
        raise ConfigError(f"features: {list(query.shape)} and {list(gallery.shape)} must be [Q, D] and [G, D]")
    if names is not None and len(names) != len(gallery):
        raise ConfigError(f"names: {len(names)} names for {len(gallery)} gallery images")
    for field, pair in (("pids", pids), ("cameras", cameras)):
        if pair is not None and (sizes := [len(of_kind) for of_kind in pair]) != [len(query), len(gallery)]:
            raise ConfigError(f"{field}: {sizes} numbers for {len(query)} queries and {len(gallery)} gallery images")
    if cameras is not None and pids is None:
        raise ConfigError("cameras: are for scores, which need pids, too")
