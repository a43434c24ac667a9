"""The task of retrieval: galleries are ranked by similarity to each query. Q queries, G gallery images, D features."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import final

import numpy as np
import torch
from torch import Tensor

from fedsim.core.metrics import METRICS
from fedsim.data.federated import RetrievalSet
from fedsim.data.pixels import Pixels
from fedsim.evaluation.backends import make_backend
from fedsim.evaluation.feature_file import write_features
from fedsim.evaluation.query_file import QueryResults
from fedsim.evaluation.ranker import Ranker
from fedsim.evaluation.ranking import Floats, QueryScores, average_scores
from fedsim.evaluation.result_files import files_of, write_lists
from fedsim.evaluation.scored_set import ScoredSet
from fedsim.evaluation.scorer import Outputs, Scorer, Scores, Writer, passes_of
from fedsim.evaluation.settings import Evaluation
from fedsim.evaluation.trials import Trial, check_matches, score_trials, trials_of
from fedsim.functional.similarity import Similarity
from fedsim.training.features import extract_features
from fedsim.training.flat_model import FlatModel


@final
class Retrieval(Scorer):
    """Scores features by CMC, mAP and mINP; a set with random splits has a trial per split, else one.

    ``precision`` is that of the run: 32-true or bf16-mixed.
    """

    def __init__(self, settings: Evaluation, precision: str = "32-true") -> None:
        self.settings, self.precision = settings, precision
        rules = settings.single_gallery_shot, settings.invalid_as_zero
        self.ranker = Ranker(settings.distance, make_backend(settings.backend), *rules)
        self._trials: dict[ScoredSet, list[Trial]] = {}

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics."""
        return METRICS

    def select(self, images: RetrievalSet) -> RetrievalSet:
        """Return all images."""
        return images

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
        return score_trials(self._trials_of(data), *outputs, self.ranker, is_assigned)

    def results(self, data: ScoredSet, tables: Sequence[Tensor]) -> Scores:
        """Return means over valid queries, and the queries of all trials one after the other."""
        scores = (QueryScores.from_table(table.numpy()) for table in tables)
        rankings = [average_scores(of_trial, self.settings.invalid_as_zero) for of_trial in scores]
        metrics = np.array([[*ranking.metrics.values()] for ranking in rankings])
        curve = np.mean([ranking.cmc for ranking in rankings], axis=0)
        trials = self._trials_of(data)
        pids = np.concatenate([trial.labels.query_pids for trial in trials])
        columns = self._query_scores(np.concatenate([table.numpy() for table in tables]))
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

    def _query_scores(self, table: Floats) -> dict[str, Floats]:
        """Return the scores [Q] of single queries; NaN for those that are not averaged."""
        scores = QueryScores.from_table(table)
        counts = (scores.first > 0) | self.settings.invalid_as_zero
        columns = {"mAP": scores.precision, "mAP_trapezoid": scores.precision_trapezoid, "rank1": scores.hits[:, 0]}
        return {name: np.where(counts, column, np.nan) for name, column in columns.items()}
