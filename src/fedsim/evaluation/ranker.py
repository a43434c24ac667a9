"""Features in, scores out. Q queries, G gallery images, D features."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from fedsim.evaluation.backends import Backend, BackendName, TorchBackend, count_ranks, make_backend
from fedsim.evaluation.ranking import (
    COLUMNS,
    MAX_RANK,
    Ints,
    QueryScores,
    Ranking,
    RetrievalLabels,
    average_scores,
    expected_hits,
    score_ranks,
)
from fedsim.functional.similarity import Distance, Similarity, query_blocks


@dataclass(frozen=True)
class Ranker:
    """Ranks galleries and scores the ranks.

    ``distance`` is ``cosine``, or ``euclidean`` on features as they are. ``single_gallery_shot``: CMC on galleries with
    one random image per identity, in expectation, by torch; see :func:`fedsim.evaluation.ranking.expected_hits`.
    ``invalid_as_zero``: average over all queries; those without a match count as zeros.
    """

    distance: Distance = "cosine"
    backend: Backend = TorchBackend()  # noqa: RUF009 - has no state
    single_gallery_shot: bool = False
    invalid_as_zero: bool = False

    @property
    def num_columns(self) -> int:
        """Columns of the tables of scores; see :meth:`fedsim.evaluation.ranking.QueryScores.to_table`."""
        return COLUMNS + MAX_RANK * self.single_gallery_shot

    def score_queries(
        self, query: Tensor, gallery: Tensor, labels: RetrievalLabels, blocks: Iterable[slice] | None = None
    ) -> QueryScores:
        """Return the scores of the queries in some blocks (None: in all); see :meth:`Backend.ranks`."""
        num_queries, num_gallery = len(labels.query_pids), len(labels.gallery_pids)
        if (len(query), len(gallery)) != (num_queries, num_gallery):
            labelled = f"{num_queries} queries and {num_gallery} gallery images"
            raise ValueError(f"labels: of {labelled}; features: of {len(query)} and {len(gallery)}")
        blocks = query_blocks(len(query), len(gallery)) if blocks is None else blocks
        if not self.single_gallery_shot:
            return score_ranks(self.backend.ranks(query, gallery, labels, self.distance, blocks))
        similarity = Similarity(query, gallery, self.distance)
        return score_blocks(((rows, similarity.block(rows)) for rows in blocks), labels, single_gallery_shot=True)

    def score(self, query: Tensor, gallery: Tensor, labels: RetrievalLabels) -> Ranking:
        """Return the mean scores of all queries."""
        return average_scores(self.score_queries(query, gallery, labels), self.invalid_as_zero)


def score_blocks(
    blocks: Iterable[tuple[slice, Tensor]], labels: RetrievalLabels, single_gallery_shot: bool = False
) -> QueryScores:
    """Score blocks of (queries, their similarities [b, G]) from any source; junk is overwritten."""
    ranks: list[Ints] = []
    hits = [np.zeros((0, MAX_RANK))]
    for rows, block in blocks:
        part = labels.take(rows)
        if single_gallery_shot:
            hits.append(expected_hits(block.cpu().numpy(), part))
        ranks += count_ranks(block, part)
    return score_ranks(ranks, np.concatenate(hits) if single_gallery_shot else None)


def rank_features(
    query: Tensor,
    gallery: Tensor,
    labels: RetrievalLabels,
    distance: Distance = "cosine",
    backend: BackendName = "auto",
) -> Ranking:
    """Score the features of queries [Q, D] and gallery [G, D], on one device, in float32; see :class:`Ranker`.

    >>> import torch
    >>> labels = RetrievalLabels(np.array([1, 2]), np.array([0, 0]), np.array([1, 2]), np.array([1, 1]))
    >>> rank_features(torch.eye(2), torch.eye(2), labels).mAP
    1.0
    """
    return Ranker(distance, make_backend(backend)).score(query, gallery, labels)
