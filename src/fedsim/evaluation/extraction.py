"""From the federation's models and images to features: which images a rank reads, and which model it loads for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedsim.core.placement import Placement
from fedsim.data.federated import FederatedData, RetrievalSet
from fedsim.data.images import Images
from fedsim.data.pixels import Pixels
from fedsim.evaluation.plan import EvaluationPlan, ScoringJob, SplitName
from fedsim.evaluation.settings import Evaluation
from fedsim.evaluation.summary import ScoreRow
from fedsim.methods.base import Method, message_to
from fedsim.strategy.machine import Machine
from fedsim.strategy.strategy import FederatedStrategy
from fedsim.training.client import Client
from fedsim.training.features import extract_features, shard_of
from fedsim.training.flat_model import FlatModel
from fedsim.training.server import Server
from fedsim.training.snapshots import Snapshots


@dataclass
class Extractor:
    """Runs the server's models and the clients' on retrieval sets.

    ``method`` defines the personalised model, ``server`` has the global ones. ``clients`` are those that this rank may
    load, ``archs`` the architectures of all, ``models`` the rank's model of each architecture. ``federated`` is all
    clients' data, not decoded; ``placement`` says which rank hosts whom, ``machine`` which ranks share them, and
    ``snapshots`` holds local models. ``open_images``: images, name, device -> their pixels. ``progress`` receives the
    name of each model and set before they are scored.
    """

    settings: Evaluation
    method: Method
    server: Server
    clients: Mapping[str, Client]
    models: Mapping[str, FlatModel]
    archs: Mapping[str, str]
    federated: FederatedData
    placement: Placement
    machine: Machine | None
    snapshots: Snapshots
    strategy: FederatedStrategy
    open_images: Callable[[Images, str, torch.device], Pixels]
    progress: Callable[[str], None]

    def __post_init__(self) -> None:
        """Open no images yet."""
        self._opened: dict[tuple[str, int, int], Pixels] = {}
        parts = (self.method, self.server, self.models, self.archs, self.federated, self.placement)
        self.plan = EvaluationPlan(*parts, self.settings.needs, self.settings.ensemble)

    def _jobs(self, split: SplitName, rows: list[ScoreRow]) -> list[ScoringJob]:
        def is_large(domain: str) -> bool:
            return sum(map(len, self._images(split, domain).values())) >= self.settings.share_from

        return self.plan.jobs(rows, is_large)

    def _features(self, split: SplitName, jobs: list[ScoringJob]) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield (number of the job, query features, gallery features) of the jobs in which this rank takes part."""
        for number in self._numbers(split, jobs):
            job = jobs[number]
            self.progress(f"{job.row.kind} model on {job.domain}")
            extract = self._extract_all if job.is_ensemble else self._extract
            with nullcontext() if job.is_ensemble else self._loaded(job.row):
                query, gallery = (extract(job, *item) for item in self._images(split, job.domain).items())
            yield number, query, gallery

    def _numbers(self, split: SplitName, jobs: list[ScoringJob]) -> Iterator[int]:
        """Yield the numbers of the jobs in which this rank takes part; those of one rank are dealt, the largest first.

        Features of equal images cost about the same with all models: sizes need no measurement.
        """
        yield from (number for number, job in enumerate(jobs) if job.is_shared)
        single = [number for number, job in enumerate(jobs) if not job.is_shared and self._is_near(job)]
        if self.machine is None:
            yield from single
        else:
            sizes = {n: sum(map(len, self._images(split, jobs[n].domain).values())) for n in single}
            yield from self.machine.queue(sorted(single, key=lambda number: -sizes[number]))

    def _is_near(self, job: ScoringJob) -> bool:
        """Whether this rank may do a job that is not shared."""
        return job.row.owner in self.machine.ranks if self.machine else self._is_own(job)

    def _is_own(self, job: ScoringJob) -> bool:
        return job.row.owner == self.strategy.global_rank

    def _extract(self, job: ScoringJob, name: str, images: Images) -> Tensor:
        """Return the loaded model's features [n, D], on the device; shares of a shared job are gathered."""
        model = self.models[job.row.arch]
        share = self._share(images, job)
        part = self._outputs(model, self._read(images, name, share))
        if not job.is_shared or self.strategy.world_size == 1:
            return part
        features = torch.zeros(len(images), self._width(model), device=model.device)
        features[share] = part
        self.strategy.barrier()  # ranks may wait long here, but not in a collective
        return self.strategy.sum_(features)

    def _extract_all(self, job: ScoringJob, name: str, images: Images) -> Tensor:
        """Return the features [n, sum of D] of all clients' personalised models, side by side."""
        widths = [self._width(self.models[arch]) for arch in self.archs.values()]
        features = torch.zeros(len(images), sum(widths), device=self._device)
        for (client, arch), columns in zip(self.archs.items(), features.split(widths, dim=1), strict=True):
            if self.placement.ranks[client] == self.strategy.global_rank:
                with self._loaded(ScoreRow("personalised", job.domain, client, arch, 0)):
                    pixels = self._read(images, name, self._share(images, job))
                    columns.copy_(self._outputs(self.models[arch], pixels))
        self.strategy.barrier()
        return self.strategy.sum_(features)

    def _width(self, model: FlatModel) -> int:
        return model.network.width_of(self.settings.layer)

    def _outputs(self, model: FlatModel, images: Pixels) -> Tensor:
        return extract_features(model.network, images, self.settings, model.device)

    def _share(self, images: Images, job: ScoringJob) -> slice:
        """Return the images whose features this rank extracts."""
        if job.is_ensemble or not job.is_shared:
            return slice(0, len(images))
        return shard_of(len(images), self.settings.batch_size, self.strategy.global_rank, self.strategy.world_size)

    @contextmanager
    def _loaded(self, row: ScoreRow) -> Iterator[None]:
        """Load a row's weights into the rank's model; the client forgets its session, even if the block fails."""
        if self.plan.weights_of(row)[0] == "global":
            tensors = self.method.server_tensors(self.server, row.arch)
            self.models[row.arch].load_global(self.server.vector(row.arch), tensors)
            yield
            return
        assert row.client is not None
        client = self.clients[row.client]
        try:
            if row.kind == "local":
                client.model.flat.buffer.copy_(self.snapshots.of(row.client))
            else:
                client.load()
                client.received = message_to(self.method, self.server, client.model.arch)
                self.method.personalise(client)
            yield
        finally:
            client.unload()

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
            part = "" if len(index) == len(images) else f", images {rows.start + 1} to {rows.stop}"
            self._opened[key] = self.open_images(images.take(index), name + part, self._device)
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
