"""Features in, scores out.

Q queries, G gallery images, D features.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from fedsim.evaluation.backends import Backend, BackendName, TorchBackend, make_backend
from fedsim.evaluation.gallery_shot import expected_hits
from fedsim.evaluation.labels import RetrievalLabels
from fedsim.evaluation.ranking import MAX_RANK, QueryScores, Ranking, average_scores, score_ranks
from fedsim.evaluation.similarity import Distance, Similarity, query_blocks

__all__ = ["Ranker", "rank_features"]


@dataclass(frozen=True)
class Ranker:
    """How galleries are ranked.

    Args:
        distance: ``cosine``, or ``euclidean`` on features as they are.
        backend: what does it.
        single_gallery_shot: score CMC on galleries with one random image per identity, in expectation; see
            :func:`fedsim.evaluation.gallery_shot.expected_hits`.
        invalid_as_zero: average over all queries, those without a match as zeros.
    """

    distance: Distance = "cosine"
    backend: Backend = TorchBackend()  # noqa: RUF009 - has no state
    single_gallery_shot: bool = False
    invalid_as_zero: bool = False

    @property
    def num_columns(self) -> int:
        """Of the tables of scores; see :meth:`fedsim.evaluation.ranking.QueryScores.to_table`."""
        return 4 + MAX_RANK * self.single_gallery_shot

    def score_queries(
        self, query: Tensor, gallery: Tensor, labels: RetrievalLabels, blocks: Iterable[slice] | None = None
    ) -> QueryScores:
        """Return the scores of the queries in some blocks.

        Args:
            query: [Q, D].
            gallery: [G, D], on the same device.
            labels: of all of them.
            blocks: of :func:`fedsim.evaluation.similarity.query_blocks`; None: all.
        """
        blocks = query_blocks(len(query), len(gallery)) if blocks is None else blocks
        ranks = self.backend.ranks(query, gallery, labels, self.distance, blocks)
        if not self.single_gallery_shot:
            return score_ranks(ranks)
        similarity = Similarity(query, gallery, self.distance)
        hits = [expected_hits(similarity.block(rows).cpu().numpy(), labels.take(rows)) for rows in blocks]
        return score_ranks(ranks, np.concatenate(hits) if hits else None)

    def score(self, query: Tensor, gallery: Tensor, labels: RetrievalLabels) -> Ranking:
        """Return the mean scores of all queries."""
        return average_scores(self.score_queries(query, gallery, labels), self.invalid_as_zero)


def rank_features(
    query: Tensor,
    gallery: Tensor,
    labels: RetrievalLabels,
    distance: Distance = "cosine",
    backend: BackendName = "auto",
) -> Ranking:
    """Score features, in float32 whatever precision the model ran in.

    Args:
        query: [Q, D].
        gallery: [G, D], on the same device.
        labels: identities and cameras.
        distance: ``cosine``, or ``euclidean`` on features as they are.
        backend: ``torch``, ``faiss``, or ``auto``.

    >>> import torch
    >>> labels = RetrievalLabels(np.array([1, 2]), np.array([0, 0]), np.array([1, 2]), np.array([1, 1]))
    >>> rank_features(torch.eye(2), torch.eye(2), labels).mAP
    1.0
    """
    return Ranker(distance, make_backend(backend)).score(query, gallery, labels)
