"""What is ranked in a retrieval set: its queries in its gallery, or several random splits of one pool of images."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.core.errors import DataError
from fedsim.data.federated import RetrievalSet
from fedsim.evaluation.labels import RetrievalLabels
from fedsim.evaluation.ranker import Ranker
from fedsim.functional.similarity import query_blocks

__all__ = ["Trial", "check_matches", "score_trials", "trials_of"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trial:
    """One ranking of queries in a gallery."""

    labels: RetrievalLabels
    query: Tensor | None = None
    """[Q] positions in the pool; None: the set's own queries"""
    gallery: Tensor | None = None
    """[G] positions in the pool; None: the set's whole gallery"""

    @property
    def num_queries(self) -> int:
        """Q."""
        return len(self.labels.query_pids)

    @property
    def blocks(self) -> list[slice]:
        """Blocks of queries; see :func:`fedsim.functional.similarity.query_blocks`."""
        return query_blocks(self.num_queries, len(self.labels.gallery_pids))

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
    trials: Sequence[Trial], query: Tensor, gallery: Tensor, ranker: Ranker, is_mine: Callable[[int], bool]
) -> list[NDArray[np.float64]]:
    """Score some blocks of queries of all trials.

    Args:
        trials: of one retrieval set.
        query: [Q, D] features of its queries.
        gallery: [G, D] features of its gallery, or pool.
        ranker: how.
        is_mine: number of a block, counted through all trials -> whether it is to be done.

    Returns:
        per trial the table of :class:`fedsim.evaluation.ranking.QueryScores`, zero for blocks that were not to be done.
    """
    tables, number = [], 0
    for trial in trials:
        table = np.zeros((trial.num_queries, ranker.num_columns))
        mine = [rows for i, rows in enumerate(trial.blocks) if is_mine(number + i)]
        number += len(trial.blocks)
        if mine:
            scores = ranker.score_queries(*trial.select(query, gallery), trial.labels, mine).to_table()
            table[np.concatenate([np.arange(rows.start, rows.stop) for rows in mine])] = scores
        tables.append(table)
    return tables


def check_matches(split: str, domain: str, trials: Sequence[Trial]) -> None:
    """Raise DataError if no query can have a match; say how many have none."""
    for trial in trials:
        valid, queries = trial.labels.num_valid, trial.num_queries
        if valid == 0:
            raise DataError(
                f"{split} set of {domain}: no query has a match: {trial.labels.why_no_match()} "
                "(model.evaluation" + (", or set data.val to none)" if split == "val" else ")")
            )
        if valid < queries:
            log.info(
                "%s set of %s: %d of %d queries have a match, the others do not count", split, domain, valid, queries
            )
