"""Rankings of a retrieval set: one of all its queries, or one per random split of its pool of images."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedsim.core.errors import DataError
from fedsim.data.federated import RetrievalSet
from fedsim.evaluation.ranker import Ranker
from fedsim.evaluation.ranking import Floats, RetrievalLabels
from fedsim.functional.similarity import query_blocks

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trial:
    """One ranking: all queries of a retrieval set, or one random split of its pool of images."""

    labels: RetrievalLabels
    query: Tensor | None = None
    """[Q] positions in the pool; None: the set's own queries"""
    gallery: Tensor | None = None
    """[G] positions in the pool; None: the set's whole gallery"""

    @property
    def num_queries(self) -> int:
        """Q."""
        return len(self.labels.query_pids)

    def select(self, query: Tensor, gallery: Tensor) -> tuple[Tensor, Tensor]:
        """Return this trial's features, [Q, D] and [G, D], from those of the set."""
        if self.query is None or self.gallery is None:
            return query, gallery
        return gallery[self.query.to(gallery.device)], gallery[self.gallery.to(gallery.device)]


def trials_of(sets: RetrievalSet, camera_aware: bool, junk_pids: tuple[int, ...]) -> list[Trial]:
    """Return one trial, or one per split."""
    query, gallery, rules = sets.query, sets.gallery, (camera_aware, tuple(junk_pids))
    if not sets.splits:
        return [Trial(RetrievalLabels(query.pids, query.camids, gallery.pids, gallery.camids, *rules, sets.own))]
    pool = RetrievalLabels(gallery.pids, gallery.camids, gallery.pids, gallery.camids, *rules)
    return [Trial(pool.take(q, g), torch.from_numpy(q), torch.from_numpy(g)) for q, g in sets.splits]


def score_trials(
    trials: Sequence[Trial], query: Tensor, gallery: Tensor, ranker: Ranker, is_assigned: Callable[[int], bool]
) -> list[Floats]:
    """Score this rank's blocks of queries; ``is_assigned`` gets their numbers, counted through all trials of the set.

    ``query`` [Q, D] are the features of its queries, ``gallery`` [G, D] those of its gallery, or pool. Returns per
    trial the table of :class:`fedsim.evaluation.ranking.QueryScores`, zero for all blocks of other ranks.
    """
    tables, number = [], 0
    for trial in trials:
        table = np.zeros((trial.num_queries, ranker.num_columns))
        blocks = query_blocks(trial.num_queries, len(trial.labels.gallery_pids))
        assigned = [rows for i, rows in enumerate(blocks, number) if is_assigned(i)]
        number += len(blocks)
        if assigned:
            scores = ranker.score_queries(*trial.select(query, gallery), trial.labels, assigned).to_table()
            table[np.concatenate([np.arange(rows.start, rows.stop) for rows in assigned])] = scores
        tables.append(table)
    return tables


def check_matches(name: str, trials: Sequence[Trial], remedy: str) -> None:
    """Raise DataError if no query of the set ``name`` can have a match; log how many queries have none.

    ``remedy`` names the options that may change this.
    """
    for trial in trials:
        valid, queries = trial.labels.num_valid, trial.num_queries
        if valid == 0:
            raise DataError(f"{name}: no query has a match: {trial.labels.why_no_match()} ({remedy})")
        if valid < queries:
            log.info("%s: %d of %d queries have a match, the others do not count", name, valid, queries)
