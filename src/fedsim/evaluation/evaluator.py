"""Scoring the federation's models: global, local (before averaging) and personalised (with private parts).

All ranks score a global model on a large data set together: each extracts the features of a share of the images,
features are gathered once, and each ranks a share of the queries. A personal model is scored by the rank that hosts the
client, on the client's own domains. Unseen domains are for the server's model. If it has none, they are for all
personal models: their scores are averaged, or they form an ensemble, whose feature is all of theirs side by side.

One rank computes each number, the others hold zero. A sum over ranks then gives every rank all numbers, with the same
bits on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from operator import attrgetter
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedsim.core.errors import TrainingError
from fedsim.evaluation.backends import make_backend
from fedsim.evaluation.extraction import Extractor
from fedsim.evaluation.feature_file import write_features
from fedsim.evaluation.pictures import draw_maps, draw_ranked_lists, rank_lists, write_picture, write_ranked_lists
from fedsim.evaluation.plan import ScoringJob, SplitName, Trial, check_matches, score_trials, trials_of
from fedsim.evaluation.query_file import QueryResults, mean_results
from fedsim.evaluation.ranker import Ranker
from fedsim.evaluation.ranking import Floats, QueryScores, average_scores
from fedsim.evaluation.summary import METRICS, METRICS_OF, Curve, Kind, ScoreRow, summarise
from fedsim.functional.similarity import NotFiniteError, Similarity

_MAPS = 8  # images whose maps are drawn


class Evaluator(Extractor):
    """Scores models; see :class:`~fedsim.evaluation.extraction.Extractor` for the arguments."""

    def __post_init__(self) -> None:
        """Make the ranker; images are read later."""
        super().__post_init__()
        self.queries: dict[Curve, QueryResults] = {}
        """scores of single queries in the last evaluation"""
        self._trials: dict[tuple[SplitName, str], list[Trial]] = {}
        how = self.settings
        self._ranker = Ranker(how.distance, make_backend(how.backend), how.single_gallery_shot, how.invalid_as_zero)

    @property
    def primary(self) -> Kind:
        """See :attr:`Plan.primary`."""
        return self.plan.primary

    @property
    def curves(self) -> dict[Curve, list[float]]:
        """CMC of the last evaluation: shares of the queries at rank 1, 2, ..."""
        return {key: list(found.cmc) for key, found in self.queries.items() if found.cmc}

    def prepare(self, split: SplitName, trained: Iterable[str] = (), near: bool = False) -> None:
        """Check labels and read this rank's images now: a damaged image is reported before hours of training.

        ``trained`` are clients whose local models will be scored. ``near``: read also those of the machine's other
        ranks.
        """
        jobs = self._jobs(split, self.plan.rows(split, tuple(trained)))
        for domain in dict.fromkeys(job.domain for job in jobs):
            self._check(split, domain)
        takes_part = self._is_near if near else self._is_own
        for job in reversed(jobs):  # whole sets first: shares are parts of them
            if not job.is_shared and not takes_part(job):
                continue
            for name, images in self._images(split, job.domain).items():
                self._read(images, name, self._share(images, job))

    def score(self, split: SplitName, trained: Iterable[str] = (), rankings: Path | None = None) -> dict[str, float]:
        """Score all models; see :func:`fedsim.evaluation.summary.summarise` for the names of the scores.

        ``trained`` clients have a local model from this round. ``rankings`` is a folder for ranked lists of the primary
        model; None: none are written.
        """
        plan = self.plan
        rows = plan.rows(split, tuple(trained))
        jobs = self._jobs(split, rows)
        tables = [self._blank(split, job) for job in jobs]
        with self.strategy.together():
            for number, query, gallery in self._features(split, jobs):
                job = jobs[number]
                for table, own in zip(tables[number], self._score(split, job, query, gallery), strict=True):
                    table.copy_(torch.from_numpy(own))
                if rankings is not None and plan.is_delivered(job.row) and self._writes(job):
                    self._write_lists(rankings / self._file_name(job), split, job, query, gallery)
        self.strategy.exchange([table for parts in tables for table in parts])
        found: dict[int, tuple[Floats, QueryResults]] = {}
        for job, parts in zip(jobs, tables, strict=True):
            metrics, curve = self._metrics_of(parts)
            found |= dict.fromkeys(job.rows, (metrics, self._results_of(split, job, parts, curve)))
        self._keep(split, rows, [found[number][1] for number in range(len(rows))])
        values = [found[number][0] for number in range(len(rows))]
        unseen = set(self.federated.unseen) if split == "test" else set()
        return summarise(split, rows, values, unseen, plan.primary, len(self.archs), METRICS_OF[self.settings.task])

    def write_features(self, folder: Path, maps: Path | None = None) -> list[Path]:
        """Write the primary model's features of each test set to ``folder``/DOMAIN.npz; return the files of all ranks.

        Arrays: query, gallery (float32 [n, D], not normalised), query_pids, query_camids, gallery_pids, gallery_camids.
        If a data set has several random splits, the first one is written. ``maps`` is a folder for pictures of the
        model's maps; None: none are drawn.
        """
        plan = self.plan
        jobs = self._jobs("test", [row for row in plan.rows("test", ()) if plan.is_delivered(row)])
        files = [folder / f"{self._file_name(job)}.npz" for job in jobs]
        with self.strategy.together():
            for number, query, gallery in self._features("test", jobs):
                job = jobs[number]
                if self._writes(job):
                    trial = self._trials_of("test", job.domain)[0]
                    write_features(files[number], *trial.select(query, gallery), trial.labels)
                    if maps is not None and not job.is_ensemble:
                        self._draw_maps(maps / f"{self._file_name(job)}.png", job)
        return files

    def _writes(self, job: ScoringJob) -> bool:
        """Whether this rank, which takes part in a job, writes its files."""
        return not job.is_shared or self._is_own(job)

    def _is_mine(self, job: ScoringJob, block: int) -> bool:
        """Whether this rank ranks a block of queries."""
        return not job.is_shared or block % self.strategy.world_size == self.strategy.global_rank

    def _trials_of(self, split: SplitName, domain: str) -> list[Trial]:
        if (split, domain) not in self._trials:
            how = self.settings
            self._trials[split, domain] = trials_of(self._sets(split, domain), how.camera_aware, how.junk_pids)
        return self._trials[split, domain]

    def _check(self, split: SplitName, domain: str) -> None:
        check_matches(split, domain, self._trials_of(split, domain))

    def _file_name(self, job: ScoringJob) -> str:
        """Return the domain, with the model's client or architecture if the method delivers several models for it."""
        if job.is_ensemble:
            return job.domain
        several = len(self.models) > 1 if job.row.client is None else job.domain in self.federated.unseen
        return f"{job.domain}@{job.row.client or job.row.arch}" if several else job.domain

    def _write_lists(self, path: Path, split: SplitName, job: ScoringJob, query: Tensor, gallery: Tensor) -> None:
        """Write ranked lists, of the first random split, and a picture of some."""
        trial, sets = self._trials_of(split, job.domain)[0], self._sets(split, job.domain)
        lists = rank_lists(Similarity(*trial.select(query, gallery), self.settings.distance), trial.labels)
        write_ranked_lists(path.with_name(f"{path.name}.npz"), lists)
        query_images, gallery_images = sets.query.images, sets.gallery.images
        if sets.splits:
            query_images, gallery_images = (gallery_images.take(part) for part in sets.splits[0])
        picture = draw_ranked_lists(lists, trial.labels, query_images, gallery_images)
        write_picture(path.with_name(f"{path.name}.png"), picture)

    def _draw_maps(self, path: Path, job: ScoringJob) -> None:
        """Draw the loaded model's maps of the first queries, or of the first gallery images if there are no queries."""
        sets, model = self._sets("test", job.domain), self.models[job.row.arch]
        split = sets.query if len(sets.query) else sets.gallery
        first = split.images.take(np.arange(min(_MAPS, len(split))))
        captions = [f"{pid} c{camera}" for pid, camera in zip(split.pids, split.camids, strict=True)][:_MAPS]
        [pixels] = self.open_images(first, f"maps of {job.domain}", model.device).batches([torch.arange(len(first))])
        write_picture(path, draw_maps(model.network.backbone, pixels, captions))

    def _blank(self, split: SplitName, job: ScoringJob) -> list[Tensor]:
        """Return empty tables for a job's scores, a row per query."""
        sizes = [trial.num_queries for trial in self._trials_of(split, job.domain)]
        return [torch.zeros(size, self._ranker.num_columns, dtype=torch.float64) for size in sizes]

    def _score(self, split: SplitName, job: ScoringJob, query: Tensor, gallery: Tensor) -> Iterable[Floats]:
        """Return the tables with this rank's rows; the others are zero."""
        trials = self._trials_of(split, job.domain)
        try:
            return score_trials(trials, query, gallery, self._ranker, partial(self._is_mine, job))
        except NotFiniteError as error:
            whose = "" if job.row.client is None else f" of client {job.row.client}"
            raise TrainingError(
                f"{job.row.kind} model{whose} on {split} {job.domain}: {error}; "
                "its weights are too large: train with a lower learning rate"
            ) from error

    def _metrics_of(self, tables: list[Tensor]) -> tuple[Floats, Floats]:
        """Return means over queries [trials, metrics], and the CMC curve, mean over trials [MAX_RANK]."""
        scores = (QueryScores.from_table(table.numpy()) for table in tables)
        rankings = [average_scores(of_trial, self.settings.invalid_as_zero) for of_trial in scores]
        metrics = np.array([attrgetter(*METRICS)(ranking) for ranking in rankings])
        return metrics, np.mean([ranking.cmc for ranking in rankings], axis=0)

    def _results_of(self, split: SplitName, job: ScoringJob, tables: list[Tensor], curve: Floats) -> QueryResults:
        """Return a job's scores of single queries, those of all trials one after the other."""
        trials = self._trials_of(split, job.domain)
        pids = np.concatenate([trial.labels.query_pids for trial in trials])
        scores = self._of_queries(np.concatenate([table.numpy() for table in tables]))
        return QueryResults(scores, pids, tuple(trial.num_queries for trial in trials), tuple(curve.tolist()))

    def _of_queries(self, table: Floats) -> dict[str, Floats]:
        """Return the scores [Q] of single queries; NaN for those that are not averaged."""
        scores = QueryScores.from_table(table)
        counts = (scores.first > 0) | self.settings.invalid_as_zero
        columns = {"mAP": scores.precision, "mAP_trapezoid": scores.precision_trapezoid, "rank1": scores.hits[:, 0]}
        return {name: np.where(counts, column, np.nan) for name, column in columns.items()}

    def _keep(self, split: SplitName, rows: list[ScoreRow], results: list[QueryResults]) -> None:
        """Replace the results of ``split``; several models of a kind on one domain share their mean."""
        members: dict[Curve, list[QueryResults]] = {}
        for row, found in zip(rows, results, strict=True):
            members.setdefault((split, row.kind, row.domain), []).append(found)
        others = {key: found for key, found in self.queries.items() if key[0] != split}
        self.queries = others | {key: mean_results(same) for key, same in members.items()}
