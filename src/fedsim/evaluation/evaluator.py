"""Scoring the federation's models: global, local (before averaging) and personalised (with private parts).

All ranks score a global model on a large data set together: each extracts the features of a share of the images,
features are gathered once, and each ranks a share of the queries. A personal model is scored by the rank that hosts the
client, on the client's own domains. Unseen domains are for the server's model. If it has none, they are for all
personal models: their scores are averaged, or they form an ensemble, whose feature is all of theirs side by side.

One rank computes each number, the others hold zero. A sum over ranks then gives every rank all numbers, with the same
bits on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedsim.core.errors import TrainingError
from fedsim.core.placement import Placement
from fedsim.data.federated import FederatedData, RetrievalSet
from fedsim.data.images import Images
from fedsim.data.pixels import Pixels
from fedsim.evaluation.backends import make_backend
from fedsim.evaluation.feature_file import write_features
from fedsim.evaluation.pictures import draw_maps, draw_ranked_lists, rank_lists, write_picture, write_ranked_lists
from fedsim.evaluation.plan import Job, Plan, SplitName, Trial, check_matches, score_trials, trials_of
from fedsim.evaluation.ranker import Ranker
from fedsim.evaluation.ranking import Floats, QueryScores, average_scores
from fedsim.evaluation.settings import Evaluation
from fedsim.evaluation.summary import METRICS, Curve, Kind, Row, summarise
from fedsim.functional.similarity import NotFiniteError, Similarity
from fedsim.methods.base import Method, message_to
from fedsim.strategy.strategy import FederatedStrategy
from fedsim.training.client import Client
from fedsim.training.features import extract_features, shard_of
from fedsim.training.flat_model import FlatModel
from fedsim.training.server import Server

_MAPS = 8
"""Images whose maps are drawn."""


@dataclass
class Evaluator:
    """Scores models.

    Args:
        settings: how.
        method: defines the personalised model.
        server: the global models.
        clients: hosted by this rank.
        models: one model per architecture.
        archs: client -> architecture, for all clients.
        federated: all clients' data, not decoded.
        placement: client -> rank.
        strategy: the collectives.
        open_images: images, name, device -> their pixels.
        progress: receives the name of each model and set before they are scored.
    """

    settings: Evaluation
    method: Method
    server: Server
    clients: Mapping[str, Client]
    models: Mapping[str, FlatModel]
    archs: Mapping[str, str]
    federated: FederatedData
    placement: Placement
    strategy: FederatedStrategy
    open_images: Callable[[Images, str, torch.device], Pixels]
    progress: Callable[[str], None]

    def __post_init__(self) -> None:
        """Make the ranker; images are read later."""
        self.metrics: tuple[str, ...] = METRICS
        self.needs: Literal["neck", "pool", "head"] = self.settings.layer
        """part of the model that must be shared for a global model to be scored"""
        self.curves: dict[Curve, list[float]] = {}
        """CMC of the last evaluation: shares of the queries at rank 1, 2, ..."""
        self._opened: dict[tuple[str, int, int], Pixels] = {}
        self._trials: dict[tuple[SplitName, str], list[Trial]] = {}
        how = self.settings
        self._ranker = Ranker(how.distance, make_backend(how.backend), how.single_gallery_shot, how.invalid_as_zero)

    @property
    def plan(self) -> Plan:
        """The models and data sets of an evaluation at this moment."""
        return Plan(
            self.method, self.server, self.models, self.archs, self.federated, self.placement,
            self.needs, self.settings.ensemble,
        )  # fmt: skip

    @property
    def has_global(self) -> bool:
        """See :attr:`Plan.has_global`."""
        return self.plan.has_global

    @property
    def primary(self) -> Kind:
        """See :attr:`Plan.primary`."""
        return self.plan.primary

    def prepare(self, split: SplitName, trained: Iterable[str] = ()) -> None:
        """Check labels and read this rank's images now: a damaged image is reported before hours of training.

        Args:
            split: ``val`` or ``test``.
            trained: clients whose local models will be scored.
        """
        jobs = self._jobs(split, self.plan.rows(split, tuple(trained)))
        for domain in dict.fromkeys(job.domain for job in jobs):
            self._check(split, domain)
        for job in reversed(jobs):  # whole sets first: shares are parts of them
            if self._takes_part(job):
                for name, images in self._images(split, job.domain).items():
                    self._read(images, name, self._share(images, job))

    def score(self, split: SplitName, trained: Iterable[str] = (), rankings: Path | None = None) -> dict[str, float]:
        """Score all models; see :func:`fedsim.evaluation.summary.summarise` for the names of the scores.

        Args:
            split: ``val`` or ``test``.
            trained: clients that have a local model from this round.
            rankings: a folder for ranked lists of the primary model; None: none are written.
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
        scores: dict[int, tuple[Floats, Floats]] = {}
        for job, parts in zip(jobs, tables, strict=True):
            scores |= dict.fromkeys(job.rows, self._metrics_of(parts))
        values, curves = ([scores[number][part] for number in range(len(rows))] for part in (0, 1))
        self._keep_curves(split, rows, curves)
        unseen = set(self.federated.unseen) if split == "test" else set()
        return summarise(split, rows, values, unseen, plan.primary, len(self.archs), self.metrics)

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
                if job.row.owner == self.strategy.global_rank:
                    trial = self._trials_of("test", job.domain)[0]
                    write_features(files[number], *trial.select(query, gallery), trial.labels)
                    if maps is not None and not job.is_ensemble:
                        self._draw_maps(maps / f"{self._file_name(job)}.png", job)
        return files

    def _jobs(self, split: SplitName, rows: list[Row]) -> list[Job]:
        def num_images(domain: str) -> int:
            return sum(map(len, self._images(split, domain).values()))

        return self.plan.jobs(rows, lambda domain: num_images(domain) >= self.settings.share_from)

    def _takes_part(self, job: Job) -> bool:
        return job.is_shared or job.row.owner == self.strategy.global_rank

    def _is_mine(self, job: Job) -> Callable[[int], bool]:
        """Return a test of the number of a block of queries: does this rank rank it?"""
        rank, world_size = self.strategy.global_rank, self.strategy.world_size
        return (lambda block: block % world_size == rank) if job.is_shared else (lambda _: True)

    # -- features ------------------------------------------------------------------------------------------------------

    def _features(self, split: SplitName, jobs: list[Job]) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield (number of the job, query features, gallery features) of the jobs in which this rank takes part."""
        for number, job in enumerate(jobs):
            if not self._takes_part(job):
                continue
            self.progress(f"{job.row.kind} model on {job.domain}")
            if not job.is_ensemble:
                self._load_model(job.row)
            extract = self._extract_all if job.is_ensemble else self._extract
            query, gallery = (extract(job, images, name) for name, images in self._images(split, job.domain).items())
            if job.row.client is not None and self.plan.weights_of(job.row)[0] != "global":
                self.clients[job.row.client].unload()
            yield number, query, gallery

    def _extract(self, job: Job, images: Images, name: str) -> Tensor:
        """Return the features [n, D] of ``images``, on the device; shares of a shared job are gathered."""
        model = self.models[job.row.arch]
        share = self._share(images, job)
        part = self._outputs(model, self._read(images, name, share))
        if not job.is_shared or self.strategy.world_size == 1:
            return part
        features = torch.zeros(len(images), self._width(model), device=model.device)
        features[share] = part
        self.strategy.barrier()  # ranks may wait long here, but not in a collective
        return self.strategy.sum_(features)

    def _extract_all(self, job: Job, images: Images, name: str) -> Tensor:
        """Return the features [n, sum of D] of all clients' personalised models, side by side."""
        models = {client: self.models[arch] for client, arch in self.archs.items()}
        widths = [self._width(model) for model in models.values()]
        features = torch.zeros(len(images), sum(widths), device=self._device)
        for (client, model), columns in zip(models.items(), features.split(widths, dim=1), strict=True):
            if client in self.clients:
                self._load_model(Row("personalised", job.domain, client, self.archs[client], 0))
                columns.copy_(self._outputs(model, self._read(images, name, self._share(images, job))))
                self.clients[client].unload()
        self.strategy.barrier()
        return self.strategy.sum_(features)

    def _width(self, model: FlatModel) -> int:
        return model.network.width_of(self.settings.layer)

    def _outputs(self, model: FlatModel, images: Pixels) -> Tensor:
        return extract_features(model.network, images, self.settings, model.device)

    def _share(self, images: Images, job: Job) -> slice:
        """Return the images whose features this rank extracts."""
        if job.is_ensemble or not job.is_shared:
            return slice(0, len(images))
        return shard_of(len(images), self.settings.batch_size, self.strategy.global_rank, self.strategy.world_size)

    def _load_model(self, row: Row) -> None:
        if self.plan.weights_of(row)[0] == "global":
            tensors = self.method.server_tensors(self.server, row.arch)
            self.models[row.arch].load_global(self.server.vector(row.arch), tensors)
            return
        assert row.client is not None
        client = self.clients[row.client]
        if row.kind == "local":
            assert client.snapshot is not None
            client.model.flat.buffer.copy_(client.snapshot)
        else:
            client.load()
            client.received = message_to(self.method, self.server, client.model.arch)
            self.method.personalise(client)

    # -- data ----------------------------------------------------------------------------------------------------------

    @property
    def _device(self) -> torch.device:
        return next(iter(self.models.values())).device

    def _read(self, images: Images, name: str, rows: slice) -> Pixels:
        """Open some of a list of images, once."""
        key, whole = (name, rows.start, rows.stop), self._opened.get((name, 0, len(images)))
        if whole is not None:
            return whole.part(rows)
        if key not in self._opened:
            index = np.arange(rows.start, rows.stop, dtype=np.int64)
            self._opened[key] = self.open_images(images.take(index), name, self._device)
        return self._opened[key]

    def _images(self, split: SplitName, domain: str) -> dict[str, Images]:
        """Return queries and gallery by their names in messages."""
        sets = self._sets(split, domain)
        return {f"{split} {domain} queries": sets.query.images, f"{split} {domain} gallery": sets.gallery.images}

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
        """Return the domain, with the model's client or architecture if the method delivers several models for it."""
        if job.is_ensemble:
            return job.domain
        several = len(self.models) > 1 if job.row.client is None else job.domain in self.federated.unseen
        return f"{job.domain}@{job.row.client or job.row.arch}" if several else job.domain

    def _write_lists(self, path: Path, split: SplitName, job: Job, query: Tensor, gallery: Tensor) -> None:
        """Write ranked lists, of the first random split, and a picture of some."""
        trial, sets = self._trials_of(split, job.domain)[0], self._sets(split, job.domain)
        lists = rank_lists(Similarity(*trial.select(query, gallery), self.settings.distance), trial.labels)
        write_ranked_lists(path.with_name(f"{path.name}.npz"), lists)
        query_images, gallery_images = sets.query.images, sets.gallery.images
        if sets.splits:
            query_images, gallery_images = (gallery_images.take(part) for part in sets.splits[0])
        picture = draw_ranked_lists(lists, query_images, gallery_images, (128, 64))
        write_picture(path.with_name(f"{path.name}.png"), picture)

    def _draw_maps(self, path: Path, job: Job) -> None:
        """Draw the loaded model's maps of the first queries, or of the first gallery images if there are no queries."""
        sets, model = self._sets("test", job.domain), self.models[job.row.arch]
        images = sets.query.images if len(sets.query) else sets.gallery.images
        first = images.take(np.arange(min(_MAPS, len(images))))
        [pixels] = self.open_images(first, f"maps of {job.domain}", model.device).batches([torch.arange(len(first))])
        write_picture(path, draw_maps(model.network.backbone, pixels))

    def _blank(self, split: SplitName, job: Job) -> list[Tensor]:
        """Return empty tables for a job's scores, a row per query."""
        sizes = [trial.num_queries for trial in self._trials_of(split, job.domain)]
        return [torch.zeros(size, self._ranker.num_columns, dtype=torch.float64) for size in sizes]

    def _score(self, split: SplitName, job: Job, query: Tensor, gallery: Tensor) -> Iterable[Floats]:
        """Return the tables with this rank's rows; the others are zero."""
        trials = self._trials_of(split, job.domain)
        try:
            return score_trials(trials, query, gallery, self._ranker, self._is_mine(job))
        except NotFiniteError as error:
            whose = "" if job.row.client is None else f" of client {job.row.client}"
            raise TrainingError(
                f"{job.row.kind} model{whose} on {split} {job.domain}: {error}; "
                "its weights are too large: train with a lower learning rate"
            ) from error

    def _metrics_of(self, tables: list[Tensor]) -> tuple[Floats, Floats]:
        """Return means over queries [trials, metrics], and the CMC curve, mean over trials [MAX_RANK]."""
        rankings = [
            average_scores(QueryScores.from_table(table.numpy()), self.settings.invalid_as_zero) for table in tables
        ]
        metrics = np.array([attrgetter(*METRICS)(ranking) for ranking in rankings])
        return metrics, np.mean([ranking.cmc for ranking in rankings], axis=0)

    def _keep_curves(self, split: SplitName, rows: list[Row], curves: list[Floats]) -> None:
        """Replace the curves of ``split``; several models of a kind on one domain share their mean curve."""
        members: dict[Curve, list[Floats]] = {}
        for row, curve in zip(rows, curves, strict=True):
            members.setdefault((split, row.kind, row.domain), []).append(curve)
        others = {key: curve for key, curve in self.curves.items() if key[0] != split}
        self.curves = others | {key: np.mean(same, axis=0).tolist() for key, same in members.items()}
