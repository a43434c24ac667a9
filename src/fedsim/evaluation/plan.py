"""Which models are scored on which data sets, which rows are the same model, and how a data set is ranked (trials)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.core.errors import DataError
from fedsim.core.placement import Placement
from fedsim.data.federated import FederatedData, RetrievalSet
from fedsim.evaluation.ranker import Ranker
from fedsim.evaluation.ranking import RetrievalLabels
from fedsim.evaluation.summary import Kind, ScoreRow
from fedsim.functional.similarity import query_blocks
from fedsim.methods.base import Method
from fedsim.training.flat_model import FlatModel
from fedsim.training.server import Server

log = logging.getLogger(__name__)

SplitName = Literal["val", "test"]


class ScoringJob(NamedTuple):
    """One model on one retrieval set, for all rows with these weights."""

    row: ScoreRow
    """the first row"""
    rows: list[int]
    """positions of all its rows"""
    is_shared: bool
    """whether all ranks take part"""
    is_ensemble: bool

    @property
    def domain(self) -> str:
        """The retrieval set."""
        return self.row.domain


@dataclass(frozen=True)
class EvaluationPlan:
    """The models and data sets of an evaluation; the server's state at this moment decides on unseen domains.

    ``needs`` and ``ensemble`` are those of :class:`fedsim.evaluation.settings.Evaluation`, the other arguments those of
    :class:`fedsim.evaluation.extraction.Extractor`.
    """

    method: Method
    server: Server
    models: Mapping[str, FlatModel]
    archs: Mapping[str, str]
    federated: FederatedData
    placement: Placement
    needs: Literal["neck", "pool", "head"]
    ensemble: bool

    @property
    def has_global(self) -> bool:
        """Whether the server's models can be scored without a client."""
        return all(model.serves(self.needs) for model in self.models.values())

    @property
    def primary(self) -> Kind:
        """The model that the method delivers, by which checkpoints are selected."""
        return "global" if self.method.delivers == "global" and self.has_global else "personalised"

    @property
    def _unseen_by_server(self) -> bool:
        """Whether the server has a model for unseen domains by now."""
        known = self.method.server_tensors
        return all(model.serves(self.needs, known(self.server, arch)) for arch, model in self.models.items())

    @property
    def _unseen_by_all(self) -> bool:
        return self.method.delivers == "ensemble" and not self._unseen_by_server

    def rows(self, split: SplitName, trained: tuple[str, ...]) -> list[ScoreRow]:
        """Return all models with their domains; ``trained`` clients have a local model from this round."""
        rows: list[ScoreRow] = []
        for data in self.federated.clients:
            arch, owner = self.archs[data.name], self.placement.ranks[data.name]
            domains = data.tests if split == "test" else ((data.name,) if data.val is not None else ())
            for domain in domains:
                if self.models[arch].serves(self.needs):
                    rows.append(ScoreRow("global", domain, None, arch, owner))
                if data.name in trained:
                    rows.append(ScoreRow("local", domain, data.name, arch, owner))
                rows.append(ScoreRow("personalised", domain, data.name, arch, owner))
        return rows + (self._unseen_rows() if split == "test" else [])

    def _unseen_rows(self) -> list[ScoreRow]:
        rows: list[ScoreRow] = []
        num_ranks = len(self.placement.loads)
        by_server, by_all = self._unseen_by_server, self._unseen_by_all
        for domain in self.federated.unseen:
            if by_server:
                for arch in sorted(self.models):
                    rows.append(ScoreRow("global", domain, None, arch, len(rows) % num_ranks))
            elif not by_all:
                rows += [ScoreRow("personalised", domain, c, self.archs[c], r) for c, r in self.placement.ranks.items()]
            if by_all or self.ensemble:
                rows.append(ScoreRow("ensemble", domain, None, "", 0))
        return rows

    def is_delivered(self, row: ScoreRow) -> bool:
        """Whether the method delivers the row's model for its domain; features and lists are written for these."""
        if row.kind == "ensemble":
            return self._unseen_by_all
        return row.kind == self.primary or (row.kind == "global" and row.domain in self.federated.unseen)

    def jobs(self, rows: list[ScoreRow], is_large: Callable[[str], bool]) -> list[ScoringJob]:
        """Join rows with equal weights and data to jobs; jobs of all ranks come first.

        ``is_large``: whether all ranks should score a domain together.
        """
        members: dict[tuple[str, str, str], list[int]] = {}
        for number, row in enumerate(rows):
            members.setdefault((*self.weights_of(row), row.domain), []).append(number)
        jobs = []
        for (weights, _, domain), numbers in members.items():
            is_shared = weights == "ensemble" or (weights == "global" and is_large(domain))
            jobs.append(ScoringJob(rows[numbers[0]], numbers, is_shared, weights == "ensemble"))
        return sorted(jobs, key=lambda job: not job.is_shared)

    def weights_of(self, row: ScoreRow) -> tuple[str, str]:
        """Name the weights behind a row: rows with equal weights are computed once.

        Where everything that retrieval needs is shared, a personalised model is the global one; where nothing is, it is
        the local one.
        """
        if row.kind == "ensemble":
            return row.kind, row.arch
        plain = not self.method.has_own_models
        model = self.models[row.arch]
        if row.client is None or (row.kind == "personalised" and plain and model.serves(self.needs)):
            return "global", row.arch
        if plain and model.flat.num_shared == 0:
            return "private", row.client
        return row.kind, row.client


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
    trials: Sequence[Trial], query: Tensor, gallery: Tensor, ranker: Ranker, is_mine: Callable[[int], bool]
) -> list[NDArray[np.float64]]:
    """Score the blocks of queries that are mine; ``is_mine`` gets their numbers, counted through all trials of the set.

    ``query`` [Q, D] are the features of its queries, ``gallery`` [G, D] those of its gallery, or pool. Returns per
    trial the table of :class:`fedsim.evaluation.ranking.QueryScores`, zero for the other blocks.
    """
    tables, number = [], 0
    for trial in trials:
        table = np.zeros((trial.num_queries, ranker.num_columns))
        blocks = query_blocks(trial.num_queries, len(trial.labels.gallery_pids))
        mine = [rows for i, rows in enumerate(blocks, number) if is_mine(i)]
        number += len(blocks)
        if mine:
            scores = ranker.score_queries(*trial.select(query, gallery), trial.labels, mine).to_table()
            table[np.concatenate([np.arange(rows.start, rows.stop) for rows in mine])] = scores
        tables.append(table)
    return tables


def check_matches(split: str, domain: str, trials: Sequence[Trial]) -> None:
    """Raise DataError if no query can have a match; log how many queries have none."""
    for trial in trials:
        name, valid, queries = f"{split} set of {domain}", trial.labels.num_valid, trial.num_queries
        if valid == 0:
            remedy = "model.evaluation" + (", or set data.val to none" if split == "val" else "")
            raise DataError(f"{name}: no query has a match: {trial.labels.why_no_match()} ({remedy})")
        if valid < queries:
            log.info("%s: %d of %d queries have a match, the others do not count", name, valid, queries)
