"""The task of retrieval: galleries are ranked by similarity to each query. Q queries, G gallery images, D features."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np
import torch
from torch import Tensor

from fedsim.core.errors import DataError
from fedsim.core.metrics import METRICS
from fedsim.data.federated import RetrievalSet
from fedsim.data.pixels import Pixels
from fedsim.evaluation.backends import make_backend
from fedsim.evaluation.feature_file import write_features
from fedsim.evaluation.pictures import files_of, write_lists
from fedsim.evaluation.ranker import Ranker
from fedsim.evaluation.ranking import Floats, QueryScores, RetrievalLabels, average_scores
from fedsim.evaluation.scorer import Outputs, ScoredSet, Scorer, Scores, Writer, passes_of
from fedsim.evaluation.settings import Evaluation
from fedsim.evaluation.summary import QueryResults
from fedsim.functional.similarity import Similarity, query_blocks
from fedsim.training.features import extract_features
from fedsim.training.flat_model import FlatModel

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
    trials: Sequence[Trial],
    outputs: Outputs,
    is_assigned: Callable[[int], bool],
    num_columns: int,
    score: Callable[[Tensor, Tensor, RetrievalLabels, list[slice]], Floats],
) -> list[Floats]:
    """Score this rank's blocks of queries; ``is_assigned`` gets their numbers, counted through all trials of the set.

    ``score`` gets a trial's features, [Q, D] and [G, D], its labels and the blocks, and returns the blocks' rows of the
    trial's table [Q, ``num_columns``]. Returns the table of each trial, zero for all blocks of other ranks.
    """
    tables, number = [], 0
    for trial in trials:
        table = np.zeros((trial.num_queries, num_columns))
        blocks = query_blocks(trial.num_queries, len(trial.labels.gallery_pids))
        assigned = [rows for i, rows in enumerate(blocks, number) if is_assigned(i)]
        number += len(blocks)
        if assigned:
            scores = score(*trial.select(*outputs), trial.labels, assigned)
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


@final
class Retrieval(Scorer):
    """Scores features by CMC, mAP and mINP; a set with random splits has a trial per split, else one.

    ``precision`` is that of the run: 32-true or bf16-mixed. ``choose`` takes some images of each set; None: all.
    """

    metrics = METRICS

    def __init__(
        self,
        settings: Evaluation,
        precision: str = "32-true",
        choose: Callable[[RetrievalSet], RetrievalSet] | None = None,
    ) -> None:
        self.settings, self.precision, self.choose = settings, precision, choose
        rules = settings.single_gallery_shot, settings.invalid_as_zero
        self.ranker = Ranker(settings.distance, make_backend(settings.backend), *rules)
        self._trials: dict[ScoredSet, list[Trial]] = {}

    def select(self, images: RetrievalSet) -> RetrievalSet:
        """Return the images that are ranked."""
        return images if self.choose is None else self.choose(images)

    def check(self, data: ScoredSet) -> None:
        """Raise DataError if no query can have a match."""
        remedy = "model.evaluation" + (", or set data.val to none" if data.split == "val" else "")
        check_matches(data.name, self._trials_of(data), remedy)

    def width(self, model: FlatModel) -> int:
        """Return the number of features."""
        return model.network.width_of(self.settings.layer)

    def outputs(self, model: FlatModel, images: Pixels) -> Tensor:
        """Return features, float32 [n, D], not normalised."""
        passes = passes_of(self.settings, self.precision, model)
        return extract_features(model.network, images, self.settings, model.device, passes)

    def blank(self, data: ScoredSet) -> list[Tensor]:
        """Return zero tables of :class:`QueryScores`."""
        sizes = [trial.num_queries for trial in self._trials_of(data)]
        return [torch.zeros(size, self.ranker.num_columns, dtype=torch.float64) for size in sizes]

    def score(self, data: ScoredSet, outputs: Outputs, is_assigned: Callable[[int], bool]) -> list[Floats]:
        """Rank this rank's blocks of queries; raise NotFiniteError if features are not finite."""
        return score_trials(
            self._trials_of(data), outputs, is_assigned, self.ranker.num_columns,
            lambda *blocks: self.ranker.score_queries(*blocks).to_table(),
        )  # fmt: skip

    def results(self, data: ScoredSet, tables: Sequence[Tensor]) -> Scores:
        """Return means over valid queries, and the queries of all trials one after the other."""
        scores = (QueryScores.from_table(table.numpy()) for table in tables)
        rankings = [average_scores(of_trial, self.settings.invalid_as_zero) for of_trial in scores]
        metrics = np.array([[*ranking.metrics.values()] for ranking in rankings])
        curve = np.mean([ranking.cmc for ranking in rankings], axis=0)
        trials = self._trials_of(data)
        pids = np.concatenate([trial.labels.query_pids for trial in trials])
        of_all = QueryScores.from_table(np.concatenate([table.numpy() for table in tables]))
        counts = (of_all.first > 0) | self.settings.invalid_as_zero  # others are not averaged
        columns = {"mAP": of_all.precision, "mAP_trapezoid": of_all.precision_trapezoid, "rank1": of_all.hits[:, 0]}
        columns = {name: np.where(counts, column, np.nan) for name, column in columns.items()}
        sizes = tuple(trial.num_queries for trial in trials)
        return Scores(metrics, QueryResults(columns, pids, sizes, tuple(curve.tolist())))

    def feature_writer(self, folder: Path) -> Writer:
        """Return a function that writes the features of the first trial, float32, not normalised."""

        def write(name: str, data: ScoredSet, outputs: Outputs) -> None:
            trial = self._trials_of(data)[0]
            write_features(folder / f"{name}.npz", *trial.select(*outputs), trial.labels, files_of(data))

        return write

    def list_writer(self, folder: Path) -> Writer:
        """Return a function that writes ranked lists of the first trial, and a picture of some."""

        def write(name: str, data: ScoredSet, outputs: Outputs) -> None:
            trial = self._trials_of(data)[0]
            similarity = Similarity(*trial.select(*outputs), self.settings.distance)
            write_lists(folder / name, similarity, trial.labels, data)

        return write

    def _trials_of(self, data: ScoredSet) -> list[Trial]:
        if data not in self._trials:
            self._trials[data] = trials_of(data.images, self.settings.camera_aware, self.settings.junk_pids)
        return self._trials[data]
