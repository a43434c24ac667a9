"""From the federation's models and images to outputs: which images a rank reads, and which model it loads for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import final

import numpy as np
import torch
from torch import Tensor

from fedsim.data.images import Images
from fedsim.data.pixels import Pixels
from fedsim.evaluation.plan import EvaluationPlan, ScoringJob
from fedsim.evaluation.scorer import Outputs, Scorer
from fedsim.evaluation.summary import ScoreRow
from fedsim.methods.declared import message_to
from fedsim.strategy.machine import Machine
from fedsim.strategy.strategy import FederatedStrategy
from fedsim.training.client import Client
from fedsim.training.features import shard_of
from fedsim.training.snapshots import Snapshots


@final
@dataclass
class Extractor:
    """Runs the server's models and the clients' on data sets, and gathers the outputs of ranks that share one.

    ``plan`` has the models, ``scorer`` defines their outputs. ``clients`` are those that this rank may load,
    ``snapshots`` holds local models, ``machine`` the ranks that share the clients. A forward pass takes ``batch_size``
    images. ``open_images``: images, name, device -> their pixels. ``progress`` receives the name of each model and set
    before they are scored.
    """

    plan: EvaluationPlan
    scorer: Scorer
    clients: Mapping[str, Client]
    snapshots: Snapshots
    machine: Machine | None
    strategy: FederatedStrategy
    batch_size: int
    open_images: Callable[[Images, str, torch.device], Pixels]
    progress: Callable[[str], None]
    opened: dict[tuple[str, int, int], Pixels] = field(default_factory=dict, init=False)
    """name of a list, first image, last image + 1 -> pixels"""

    def read(self, jobs: Sequence[ScoringJob], whole_machine: bool) -> None:
        """Read the images of this rank's jobs, of ``whole_machine`` also those of the machine's other ranks."""
        takes_part = self._is_on_machine if whole_machine else self._is_owned
        for job in reversed(jobs):  # whole sets first: shares are parts of them
            if job.is_shared or takes_part(job):
                for name, images in job.data.lists.items():
                    self._open(images, name, self._share(images, job))

    def outputs(self, jobs: Sequence[ScoringJob]) -> Iterator[tuple[ScoringJob, Outputs]]:
        """Yield the outputs of the jobs in which this rank takes part; all ranks call it: it has collectives."""
        for job in self._assigned(jobs):
            self.progress(f"{job.row.kind} model on {job.data.domain}")
            run = self._run_all if job.is_ensemble else self._run
            with nullcontext() if job.is_ensemble else self._loaded(job.row):
                query, gallery = (run(job, *item) for item in job.data.lists.items())
            yield job, Outputs(query, gallery)

    def _assigned(self, jobs: Sequence[ScoringJob]) -> Iterator[ScoringJob]:
        """Yield the jobs in which this rank takes part; those of one rank are taken from the queue, the largest first.

        Outputs of equal images cost about the same with all models: sizes need no measurement.
        """
        yield from (job for job in jobs if job.is_shared)
        single = [job for job in jobs if not job.is_shared and self._is_on_machine(job)]
        if self.machine is None:
            yield from single
        else:
            yield from self.machine.queue(sorted(single, key=lambda job: -job.data.num_images))

    def _is_on_machine(self, job: ScoringJob) -> bool:
        """Whether this rank may do a job that is not shared."""
        return job.row.owner in self.machine.ranks if self.machine else self._is_owned(job)

    def _is_owned(self, job: ScoringJob) -> bool:
        return job.row.owner == self.strategy.global_rank

    def _run(self, job: ScoringJob, name: str, images: Images) -> Tensor:
        """Return the loaded model's outputs [n, D], on the device; shares of a shared job are gathered."""
        model = self.plan.models[job.row.arch]
        share = self._share(images, job)
        part = self.scorer.outputs(model, self._open(images, name, share))
        if not job.is_shared or self.strategy.world_size == 1:
            return part
        outputs = torch.zeros(len(images), self.scorer.width(model), device=model.device)
        outputs[share] = part
        self.strategy.barrier()  # ranks may wait long here, but not in a collective
        return self.strategy.sum_(outputs)

    def _run_all(self, job: ScoringJob, name: str, images: Images) -> Tensor:
        """Return the outputs [n, sum of D] of all clients' personalised models, side by side."""
        models, archs = self.plan.models, self.plan.archs
        widths = [self.scorer.width(models[arch]) for arch in archs.values()]
        outputs = torch.zeros(len(images), sum(widths), device=self._device)
        for (client, arch), columns in zip(archs.items(), outputs.split(widths, dim=1), strict=True):
            if self.plan.placement.ranks[client] == self.strategy.global_rank:
                with self._loaded(ScoreRow("personalised", job.data.domain, client, arch, 0)):
                    pixels = self._open(images, name, self._share(images, job))
                    columns.copy_(self.scorer.outputs(models[arch], pixels))
        self.strategy.barrier()
        return self.strategy.sum_(outputs)

    def _share(self, images: Images, job: ScoringJob) -> slice:
        """Return the images on which this rank runs the model."""
        if job.is_ensemble or not job.is_shared:
            return slice(0, len(images))
        return shard_of(len(images), self.batch_size, self.strategy.global_rank, self.strategy.world_size)

    @contextmanager
    def _loaded(self, row: ScoreRow) -> Iterator[None]:
        """Load a row's weights into the rank's model; the client forgets its session, even if the block fails."""
        plan = self.plan
        if plan.weights_of(row)[0] == "global":
            tensors = plan.method.server_tensors(plan.server, row.arch)
            plan.models[row.arch].load_global(plan.server.vector(row.arch), tensors)
            yield
            return
        assert row.client is not None
        client = self.clients[row.client]
        try:
            if row.kind == "local":
                client.model.flat.buffer.copy_(self.snapshots.of(row.client))
            else:
                client.load()
                client.received = message_to(plan.method, plan.server, client.model.arch)
                plan.method.personalise(client)
            yield
        finally:
            client.unload()

    @property
    def _device(self) -> torch.device:
        return next(iter(self.plan.models.values())).device

    def _open(self, images: Images, name: str, rows: slice) -> Pixels:
        """Open some of a list of images, once."""
        key, whole = (name, rows.start, rows.stop), self.opened.get((name, 0, len(images)))
        if whole is not None:
            return whole.part(rows)
        if key not in self.opened:
            index = np.arange(rows.start, rows.stop, dtype=np.int64)
            part = "" if len(index) == len(images) else f", images {rows.start + 1} to {rows.stop}"
            self.opened[key] = self.open_images(images.take(index), name + part, self._device)
        return self.opened[key]
