"""Scoring the federation's models: global, local (before averaging) and personalised (with private parts).

All ranks score a global model on a large data set together: each extracts the features of a share of the images,
features are gathered once, and each ranks a share of the queries. A personal model is scored by the rank that owns the
client, on the client's own domains. Unseen domains are for the server's model. If it has none, they are for all
personal models: their scores are averaged, or they form an ensemble, whose feature is all of theirs side by side.

One rank computes each number, all other ranks hold zero. A sum over ranks then gives every rank all numbers, with the
same bits on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from fedsim.core.errors import TrainingError
from fedsim.evaluation.extraction import Extractor
from fedsim.evaluation.pictures import write_maps
from fedsim.evaluation.plan import EvaluationPlan, ScoringJob
from fedsim.evaluation.ranking import Floats
from fedsim.evaluation.scorer import Outputs, ScoredSet, Scorer, images_of
from fedsim.evaluation.summary import Curve, Kind, QueryResults, ScoreRow, SplitName, mean_results, summarise
from fedsim.functional.similarity import NotFiniteError
from fedsim.strategy.strategy import FederatedStrategy


@final
class Evaluator:
    """Scores models.

    ``plan`` chooses models and data sets, ``extractor`` runs the models, ``scorer`` scores their outputs. All ranks
    score a data set of ``share_from`` images or more together.
    """

    def __init__(
        self,
        plan: EvaluationPlan,
        extractor: Extractor,
        scorer: Scorer,
        *,
        strategy: FederatedStrategy,
        share_from: int,
    ) -> None:
        self.plan, self.extractor, self.scorer = plan, extractor, scorer
        self.strategy, self.share_from = strategy, share_from
        self.queries: dict[Curve, QueryResults] = {}
        """scores of single queries in the last evaluation"""
        self._sets: dict[tuple[SplitName, str], ScoredSet] = {}

    def with_scorer(self, scorer: Scorer) -> Evaluator:
        """Return an evaluator of the same models on the same images, which are not read again, by another scorer."""
        extractor = replace(self.extractor, scorer=scorer)
        extractor.opened = self.extractor.opened
        return Evaluator(self.plan, extractor, scorer, strategy=self.strategy, share_from=self.share_from)

    @property
    def primary(self) -> Kind:
        """See :attr:`EvaluationPlan.primary`."""
        return self.plan.primary

    @property
    def curves(self) -> dict[Curve, list[float]]:
        """CMC of the last evaluation: shares of the queries at rank 1, 2, ..."""
        return {key: list(results.cmc) for key, results in self.queries.items() if results.cmc}

    def prepare(self, split: SplitName, trained: Iterable[str] = (), whole_machine: bool = False) -> None:
        """Check labels and read this rank's images now: a damaged image is reported before hours of training.

        ``trained`` are clients whose local models will be scored. ``whole_machine``: read also the images of the
        machine's other ranks.
        """
        jobs = self._jobs(split, self.plan.rows(split, tuple(trained)))
        for data in dict.fromkeys(job.data for job in jobs):
            self.scorer.check(data)
        self.extractor.read(jobs, whole_machine)

    def score(self, split: SplitName, trained: Iterable[str] = (), rankings: Path | None = None) -> dict[str, float]:
        """Score all models; see :func:`fedsim.evaluation.summary.summarise` for the names of the scores.

        ``trained`` clients have a local model from this round. ``rankings`` is a folder for ranked lists of the primary
        model; None: none are written. Raises ConfigError if there are no such lists, TrainingError if a model's outputs
        are not finite.
        """
        write_lists = None if rankings is None else self.scorer.list_writer(rankings)
        rows = self.plan.rows(split, tuple(trained))
        jobs = self._jobs(split, rows)
        tables = {job: self.scorer.blank(job.data) for job in jobs}
        with self.strategy.together():
            for job, outputs in self.extractor.outputs(jobs):
                for table, scores in zip(tables[job], self._score(job, outputs), strict=True):
                    table.copy_(torch.from_numpy(scores))
                if write_lists is not None and self._writes_files(job):
                    write_lists(self.plan.file_name(job), job.data, outputs)
        self.strategy.exchange([table for of_job in tables.values() for table in of_job])
        return self._summarise(split, rows, tables)

    def write_features(self, folder: Path, maps: Path | None = None) -> list[Path]:
        """Write the primary model's features of each test set to ``folder``/DOMAIN.npz; return the files of all ranks.

        Arrays: query, gallery (float32 [n, D], not normalised), query_pids, query_camids, gallery_pids, gallery_camids.
        If a data set has several random splits, the first one is written. ``maps`` is a folder for pictures of the
        model's maps; None: none are drawn. Raises ConfigError if the task has no features.
        """
        plan, write = self.plan, self.scorer.feature_writer(folder)
        jobs = self._jobs("test", [row for row in plan.rows("test", ()) if plan.is_delivered(row)])
        with self.strategy.together():
            for job, outputs in self.extractor.outputs(jobs):
                if self._writes_files(job):
                    name = plan.file_name(job)
                    write(name, job.data, outputs)
                    if maps is not None and not job.is_ensemble:  # the job's model is still in place
                        model = plan.models[job.row.arch]
                        write_maps(maps / f"{name}.png", model, job.data, self.extractor.open_images)
        return [folder / f"{plan.file_name(job)}.npz" for job in jobs]

    def global_jobs(self) -> list[ScoringJob]:
        """Return the jobs of the server's models on all test sets, for :meth:`Extractor.outputs`."""
        return self._jobs("test", [row for row in self.plan.rows("test", ()) if row.kind == "global"])

    def _jobs(self, split: SplitName, rows: list[ScoreRow]) -> list[ScoringJob]:
        return self.plan.jobs(rows, partial(self._set, split), self.share_from)

    def _set(self, split: SplitName, domain: str) -> ScoredSet:
        if (split, domain) not in self._sets:
            images = self.scorer.select(images_of(self.plan.federated, split, domain))
            self._sets[split, domain] = ScoredSet(split, domain, images)
        return self._sets[split, domain]

    def _writes_files(self, job: ScoringJob) -> bool:
        """Whether this rank, which takes part in a job, writes files about it."""
        is_writer = not job.is_shared or job.row.owner == self.strategy.global_rank
        return self.plan.is_delivered(job.row) and is_writer

    def _score(self, job: ScoringJob, outputs: Outputs) -> list[Floats]:
        """Return the tables with this rank's rows; all other rows are zero."""
        rank, num_ranks = self.strategy.global_rank, self.strategy.world_size
        try:
            return self.scorer.score(job.data, outputs, lambda block: not job.is_shared or block % num_ranks == rank)
        except NotFiniteError as error:
            client = "" if job.row.client is None else f" of client {job.row.client}"
            raise TrainingError(
                f"{job.row.kind} model{client} on {job.data.split} {job.data.domain}: {error}; "
                "its weights are too large: train with a lower learning rate"
            ) from error

    def _summarise(
        self, split: SplitName, rows: list[ScoreRow], tables: Mapping[ScoringJob, Sequence[Tensor]]
    ) -> dict[str, float]:
        """Name the scores in full tables; keep those of single queries instead of the split's earlier ones."""
        scores = {job: self.scorer.results(job.data, of_job) for job, of_job in tables.items()}
        of_rows = {number: scores[job] for job in scores for number in job.rows}
        members: dict[Curve, list[QueryResults]] = {}
        for number, row in enumerate(rows):
            members.setdefault((split, row.kind, row.domain), []).append(of_rows[number].queries)
        kept = {key: results for key, results in self.queries.items() if key[0] != split}
        # several models of a kind on one domain share their mean
        self.queries = kept | {key: mean_results(results) for key, results in members.items()}
        unseen = set(self.plan.federated.unseen) if split == "test" else set()
        values = [of_rows[number].metrics for number in range(len(rows))]
        return summarise(split, rows, values, unseen, self.primary, len(self.plan.archs), self.scorer.metrics)
