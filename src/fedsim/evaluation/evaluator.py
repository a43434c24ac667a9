"""Scoring the federation's models: global, local (before aggregation) and personalised (global + private groups).

A model that every rank has, which is the global one, is scored by all ranks together where the data set is worth it:
each extracts a share of the images, features are gathered once, and each ranks a share of the queries. Personal models
are scored by the rank that hosts the client, on the client's own domain. Unseen domains are for the server's model, or,
where it has none, for everybody's personal model, whose scores are averaged, or for their ensemble. An ensemble is all
personal models together; its feature is theirs side by side, each extracted by the rank that hosts the client. Every
number is computed by one rank and zero elsewhere; a sum over ranks then gives all numbers to everybody, and the same
bits on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.core.errors import TrainingError
from fedsim.core.files import replacing
from fedsim.core.placement import Placement
from fedsim.data.federated import FederatedData, RetrievalSet
from fedsim.data.images import Images
from fedsim.data.pixels import Pixels
from fedsim.evaluation.backends import make_backend
from fedsim.evaluation.feature_file import write_features
from fedsim.evaluation.maps import write_maps
from fedsim.evaluation.plan import Job, Plan, SplitName
from fedsim.evaluation.ranked_lists import draw_ranked_lists, rank_lists, write_ranked_lists
from fedsim.evaluation.ranker import Ranker
from fedsim.evaluation.ranking import QueryScores, average_scores
from fedsim.evaluation.settings import Evaluation
from fedsim.evaluation.summary import METRICS, Curve, Kind, Row, summarise
from fedsim.evaluation.trials import Trial, check_matches, score_trials, trials_of
from fedsim.functional.similarity import NotFiniteError, Similarity
from fedsim.methods.base import Method
from fedsim.strategy.strategy import FederatedStrategy
from fedsim.training.client import Client
from fedsim.training.features import extract_features, shard_of
from fedsim.training.flat_model import Resident
from fedsim.training.server import Server

__all__ = ["METRICS", "Evaluator", "Kind", "Row"]

_MAPS = 8
"""Images whose maps are drawn."""


@dataclass
class Evaluator:
    """Scores models.

    Args:
        settings: how.
        method: says what a personalised model is.
        server: the global models.
        clients: hosted by this rank.
        residents: one model per architecture.
        archs: client -> architecture, for all clients.
        federated: all clients' data, not decoded.
        placement: who hosts whom.
        strategy: the collectives.
        open_images: images, name, device -> their pixels.
        progress: told the name of each set before it is scored.
    """

    settings: Evaluation
    method: Method
    server: Server
    clients: Mapping[str, Client]
    residents: Mapping[str, Resident]
    archs: Mapping[str, str]
    federated: FederatedData
    placement: Placement
    strategy: FederatedStrategy
    open_images: Callable[[Images, str, torch.device], Pixels]
    progress: Callable[[str], None]

    def __post_init__(self) -> None:
        """Start with nothing read."""
        self.metrics: tuple[str, ...] = METRICS
        self.needs: Literal["neck", "pool", "head"] = self.settings.layer
        """what must be shared for a global model to be scored"""
        self.curves: dict[Curve, list[float]] = {}
        """CMC of the last evaluation, shares of the queries at rank 1, 2, ..."""
        self._opened: dict[tuple[str, int, int], Pixels] = {}
        self._trials: dict[tuple[SplitName, str], list[Trial]] = {}
        how = self.settings
        self._ranker = Ranker(how.distance, make_backend(how.backend), how.single_gallery_shot, how.invalid_as_zero)

    @property
    def plan(self) -> Plan:
        """What is scored now."""
        return Plan(
            self.method, self.server, self.residents, self.archs, self.federated, self.placement,
            self.needs, self.settings.ensemble,
        )  # fmt: skip

    @property
    def has_global(self) -> bool:
        """Whether the server's models can be scored on their own."""
        return self.plan.has_global

    @property
    def primary(self) -> Kind:
        """The model that the method delivers, by which checkpoints are selected."""
        return self.plan.primary

    def prepare(self, split: SplitName, trained: Iterable[str] = ()) -> None:
        """Check and read what this rank needs now, so that a damaged image is reported before hours of training.

        Args:
            split: ``val`` or ``test``.
            trained: clients whose local models will be scored.
        """
        jobs = self._jobs(split, self.plan.rows(split, tuple(trained)))
        for domain in dict.fromkeys(job.domain for job in jobs):
            self._check(split, domain)
        for job in reversed(jobs):  # whole sets first: shares are parts of them
            if job.is_shared or job.row.owner == self.strategy.global_rank:
                sets = self._sets(split, job.domain)
                for name, images in (("queries", sets.query.images), ("gallery", sets.gallery.images)):
                    self._read(images, f"{split} {job.domain} {name}", self._share(images, job))

    def score(self, split: SplitName, trained: Iterable[str] = (), rankings: Path | None = None) -> dict[str, float]:
        """Score all models.

        Args:
            split: ``val`` or ``test``.
            trained: clients that have a local model from this round.
            rankings: a folder for ranked lists of the primary model; None: none are written.

        Returns:
            ``split/kind/domain/metric`` -> fraction of 1; ``domain`` is also ``seen`` and ``unseen``, the means over
            those; and ``split/metric``, the mean over clients of the method's primary model.
        """
        plan, rank = self.plan, self.strategy.global_rank
        rows = plan.rows(split, tuple(trained))
        jobs = self._jobs(split, rows)
        tables = [self._blank(split, job) for job in jobs]
        with self.strategy.together():
            for number, query, gallery in self._features(split, jobs):
                job = jobs[number]
                for table, own in zip(tables[number], self._score(split, job, query, gallery), strict=True):
                    table.copy_(torch.from_numpy(own))
                if rankings is not None and plan.is_delivered(job.row) and job.row.owner == rank:
                    self._write_lists(rankings / self._file_name(job), split, job, query, gallery)
        self.strategy.exchange([table for parts in tables for table in parts])
        values: list[NDArray[np.float64]] = [np.empty(0)] * len(rows)
        curves: list[NDArray[np.float64]] = [np.empty(0)] * len(rows)
        for job, parts in zip(jobs, tables, strict=True):
            metrics, curve = self._metrics_of(parts)
            for row in job.rows:
                values[row], curves[row] = metrics, curve
        self._keep_curves(split, rows, curves)
        unseen = set(self.federated.unseen) if split == "test" else set()
        return summarise(split, rows, values, unseen, plan.primary, len(self.archs), self.metrics)

    def write_features(self, folder: Path, maps: Path | None = None) -> list[Path]:
        """Write the primary model's features of each test set to ``folder``/DOMAIN.npz.

        Arrays: query, gallery (float32 [n, D], not normalised), query_pids, query_camids, gallery_pids, gallery_camids.
        Of a data set with several random splits, the first.

        Args:
            folder: of the files.
            maps: a folder for pictures of its maps of the first images; None: none are drawn.

        Returns:
            the files of all ranks.
        """
        plan = self.plan
        jobs = self._jobs("test", [row for row in plan.rows("test", ()) if plan.is_delivered(row)])
        files = [folder / f"{self._file_name(job)}.npz" for job in jobs]
        with self.strategy.together():
            for number, query, gallery in self._features("test", jobs):
                job = jobs[number]
                if job.row.owner == self.strategy.global_rank:
                    trial = self._trials_of("test", job.domain)[0]
                    write_features(files[number], *trial.select(query, gallery), trial.labels)
                    if maps is not None and not job.is_ensemble:
                        self._write_maps(maps / f"{self._file_name(job)}.png", job)
        return files

    def _jobs(self, split: SplitName, rows: list[Row]) -> list[Job]:
        def is_large(domain: str) -> bool:
            sets = self._sets(split, domain)
            return len(sets.query) + len(sets.gallery) >= self.settings.share_from

        return self.plan.jobs(rows, is_large)

    def _is_mine(self, job: Job) -> Callable[[int], bool]:
        """Which blocks of a job's queries this rank ranks."""
        rank, world_size = self.strategy.global_rank, self.strategy.world_size
        return (lambda block: block % world_size == rank) if job.is_shared else (lambda _: True)

    # -- features ------------------------------------------------------------------------------------------------------

    def _features(self, split: SplitName, jobs: list[Job]) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield (number of the job, query features, gallery features) of the jobs in which this rank takes part."""
        for number, job in enumerate(jobs):
            if not (job.is_shared or job.row.owner == self.strategy.global_rank):
                continue
            self.progress(f"{job.row.kind} model on {job.domain}")
            if not job.is_ensemble:
                self._load_model(job.row)
            sets, extract = self._sets(split, job.domain), self._extract_all if job.is_ensemble else self._extract
            query, gallery = (
                extract(job, images, f"{split} {job.domain} {name}")
                for name, images in (("queries", sets.query.images), ("gallery", sets.gallery.images))
            )
            if job.row.client is not None and self.plan.weights_of(job.row)[0] != "global":
                self.clients[job.row.client].unload()
            yield number, query, gallery

    def _extract(self, job: Job, images: Images, what: str) -> Tensor:
        """Return the features [n, D] of ``images``, on the device; shared models' are gathered from all ranks."""
        resident = self.residents[job.row.arch]
        share = self._share(images, job)
        part = self._outputs(resident, self._read(images, what, share))
        if not job.is_shared or self.strategy.world_size == 1:
            return part
        features = torch.zeros(len(images), self._width(resident), device=resident.device)
        features[share] = part
        self.strategy.barrier()  # here ranks may wait for long, in a collective they may not
        return self.strategy.sum_(features)

    def _extract_all(self, job: Job, images: Images, what: str) -> Tensor:
        """Return the features [n, sum of D] of all clients' personalised models, side by side."""
        models = {name: self.residents[arch] for name, arch in self.archs.items()}
        widths = [self._width(resident) for resident in models.values()]
        device = next(iter(models.values())).device
        features = torch.zeros(len(images), sum(widths), device=device)
        for (name, resident), columns in zip(models.items(), features.split(widths, dim=1), strict=True):
            if name in self.clients:
                self._load_model(Row("personalised", job.domain, name, self.archs[name], 0))
                pixels = self._read(images, what, self._share(images, job))
                columns.copy_(self._outputs(resident, pixels))
                self.clients[name].unload()
        self.strategy.barrier()
        return self.strategy.sum_(features)

    def _width(self, resident: Resident) -> int:
        return resident.model.width_of(self.settings.layer)

    def _outputs(self, resident: Resident, images: Pixels) -> Tensor:
        return extract_features(resident.model, images, self.settings, resident.device)

    def _share(self, images: Images, job: Job) -> slice:
        if job.is_ensemble or not job.is_shared:
            return slice(0, len(images))
        return shard_of(len(images), self.settings.batch_size, self.strategy.global_rank, self.strategy.world_size)

    def _load_model(self, row: Row) -> None:
        if self.plan.weights_of(row)[0] == "global":
            self.method.generalise(self.residents[row.arch], self.server)
            return
        assert row.client is not None
        client = self.clients[row.client]
        if row.kind == "local":
            assert client.snapshot is not None
            client.resident.flat.buffer.copy_(client.snapshot)
        else:
            client.load()
            self.method.personalise(client, self.server)

    # -- data ----------------------------------------------------------------------------------------------------------

    def _read(self, images: Images, what: str, rows: slice) -> Pixels:
        """Open some of a list of images, once."""
        key, whole = (what, rows.start, rows.stop), self._opened.get((what, 0, len(images)))
        if whole is not None:
            return whole.part(rows)
        if key not in self._opened:
            index = np.arange(rows.start, rows.stop, dtype=np.int64)
            device = next(iter(self.residents.values())).device
            self._opened[key] = self.open_images(images.take(index), what, device)
        return self._opened[key]

    def _sets(self, split: SplitName, domain: str) -> RetrievalSet:
        if split == "test":
            return self.federated.tests[domain]
        sets = next(client.val for client in self.federated.clients if client.name == domain)
        assert sets is not None
        return sets

    def _trials_of(self, split: SplitName, domain: str) -> list[Trial]:
        if (split, domain) not in self._trials:
            how = self.settings
            self._trials[split, domain] = trials_of(self._sets(split, domain), how.camera_aware, how.junk_pids)
        return self._trials[split, domain]

    def _check(self, split: SplitName, domain: str) -> None:
        check_matches(split, domain, self._trials_of(split, domain))

    # -- results and files ---------------------------------------------------------------------------------------------

    def _file_name(self, job: Job) -> str:
        """The domain, and whose model it is where the method delivers several for it."""
        if job.is_ensemble:
            return job.domain
        several = len(self.residents) > 1 if job.row.client is None else job.domain in self.federated.unseen
        return f"{job.domain}@{job.row.client or job.row.arch}" if several else job.domain

    def _write_lists(self, path: Path, split: SplitName, job: Job, query: Tensor, gallery: Tensor) -> None:
        """Write ranked lists and a picture of some; of a data set with several random splits, the first."""
        trial, sets = self._trials_of(split, job.domain)[0], self._sets(split, job.domain)
        lists = rank_lists(Similarity(*trial.select(query, gallery), self.settings.distance), trial.labels)
        write_ranked_lists(path.with_name(f"{path.name}.npz"), lists)
        query_images, gallery_images = sets.query.images, sets.gallery.images
        if sets.splits:
            query_images, gallery_images = (gallery_images.take(part) for part in sets.splits[0])
        picture = draw_ranked_lists(lists, query_images, gallery_images, (128, 64))
        with replacing(path.with_name(f"{path.name}.png")) as partial:
            picture.save(partial, format="png")

    def _write_maps(self, path: Path, job: Job) -> None:
        """Draw maps of the first queries, or of the first gallery images where there are none, by the loaded model."""
        sets, resident = self._sets("test", job.domain), self.residents[job.row.arch]
        images = sets.query.images if len(sets.query) else sets.gallery.images
        first = images.take(np.arange(min(_MAPS, len(images))))
        [pixels] = self.open_images(first, f"maps of {job.domain}", resident.device).batches([torch.arange(len(first))])
        write_maps(resident.model.backbone, pixels, path)

    def _blank(self, split: SplitName, job: Job) -> list[Tensor]:
        """Tables of a job's scores, a row per query."""
        sizes = [trial.num_queries for trial in self._trials_of(split, job.domain)]
        return [torch.zeros(size, self._ranker.num_columns, dtype=torch.float64) for size in sizes]

    def _score(self, split: SplitName, job: Job, query: Tensor, gallery: Tensor) -> Iterable[NDArray[np.float64]]:
        """Fill the rows that are this rank's; the others are zero."""
        trials = self._trials_of(split, job.domain)
        try:
            return score_trials(trials, query, gallery, self._ranker, self._is_mine(job))
        except NotFiniteError as error:
            whose = "" if job.row.client is None else f" of client {job.row.client}"
            raise TrainingError(
                f"{job.row.kind} model{whose} on {split} {job.domain}: {error}; "
                "its weights are too large: train with a lower learning rate"
            ) from error

    def _metrics_of(self, tables: list[Tensor]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Means over queries [trials, metrics], and the CMC curve, mean over trials [MAX_RANK]."""
        rankings = [
            average_scores(QueryScores.from_table(table.numpy()), self.settings.invalid_as_zero) for table in tables
        ]
        metrics = np.array([[ranking.__dict__[metric] for metric in METRICS] for ranking in rankings])
        return metrics, np.mean([ranking.cmc for ranking in rankings], axis=0)

    def _keep_curves(self, split: SplitName, rows: list[Row], curves: list[NDArray[np.float64]]) -> None:
        """Replace the curves of ``split``; a domain that several models of a kind are scored on gets their mean."""
        members: dict[Curve, list[NDArray[np.float64]]] = {}
        for row, curve in zip(rows, curves, strict=True):
            members.setdefault((split, row.kind, row.domain), []).append(curve)
        others = {key: curve for key, curve in self.curves.items() if key[0] != split}
        self.curves = others | {key: np.mean(same, axis=0).tolist() for key, same in members.items()}
