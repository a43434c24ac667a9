"""Counts of waits in sessions and between batches, and of kernels in steps, for budgets."""

from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest import mock

import torch

from fedsim.federation.rank_worker import RankWorker
from fedsim.methods import APFL, DACS, SSCU, FedAvg, FedSAM
from small import fit, make_data, make_model

MOST = {FedAvg: 52, FedSAM: 125, APFL: 180, DACS: 350, SSCU: 455}
"""Method -> launches of a batch of 32 images of 6 people by SmallCNN. DACS and SSCU have three networks, of which two
see the images twice; SSCU's memory has a pass for each image of the person who is there most often."""


@dataclass
class Waits:
    """Waits of the host for the simulated GPU, and launches."""

    of_sessions: list[int] = field(default_factory=list)
    """in the last round, of each session"""
    sites: str = ""
    """of the last session, a line for each"""
    between_batches: int = 0
    """in all rounds, from the first batch of a local epoch to its last"""
    launches: int = 0
    """most of a batch, in all rounds; of the first batch of a local epoch they are not known"""


@contextmanager
def counted_waits(gpu):
    """Count waits during training, but for those of recording a graph."""
    waits, session, on_batch = Waits(), RankWorker._train_client, RankWorker.on_batch
    last = {}  # of the last batch: (client, place in its epoch), waits and launches so far
    rounds = Counter()

    def counted_session(self, client, round_, *args):
        if not rounds[round_]:
            waits.of_sessions.clear()
        rounds[round_] += 1
        before, sites = _waits(gpu), Counter(gpu.waits)
        result = session(self, client, round_, *args)
        waits.of_sessions.append(_waits(gpu) - before)
        waits.sites = gpu.waits_since(sites)
        return result

    def counted_batch(self, report):
        now = _waits(gpu), gpu.reading().kernels
        if (before := last.get((report.client, report.done - 1))) is not None:
            waits.between_batches += now[0] - before[0]
            waits.launches = max(waits.launches, now[1] - before[1])
        on_batch(self, report)
        last.clear()
        last[report.client, report.done] = _waits(gpu), gpu.reading().kernels

    with (
        mock.patch.object(RankWorker, "_train_client", counted_session),
        mock.patch.object(RankWorker, "on_batch", counted_batch),
    ):
        yield waits


def _waits(gpu):
    return sum(count for (_, where), count in gpu.waits.items() if not where.startswith("core/allocator"))


def kernels_of_a_step(gpu, method, *, precision="32-true", **options):
    """Return the launches of one batch of 4 images of 32 x 16 pixels, after the first batch."""
    first, second = kernels_until(gpu, method, 2, precision, **options)
    return second - first


def kernels_until(gpu, method, batches, precision="32-true", **options):
    """Return the launches until the end of each of so many batches of a session."""
    model, data, device = make_model(method, **options), make_data(size=(32, 16)), torch.device("cuda", 0)
    model.assemble(data, 0, 1, device)
    model.server.to(device)
    client = next(iter(model.parts.clients.values()))
    client.images.open(data.open_train)
    marks = []
    client.begin_round(1, 1.0, precision, lambda report: marks.append(gpu.reading().kernels))
    client.limit_batches = batches
    client.received = model.server.send(client.model.arch, ())
    method.download(client)
    method.train(client)
    return marks


def kernels_of_a_session(gpu, method, precision, **options):
    """Return the launches of a whole session of one batch of images of 64 x 32 pixels, in a second round."""
    sessions, train = [], RankWorker._train_client

    def counted(self, *args):
        before = gpu.reading().kernels
        result = train(self, *args)
        sessions.append(gpu.reading().kernels - before)
        return result

    data = make_data(size=(64, 32), limit_client_batches=1)  # of less, torch's bfloat16 convolutions may be NaN on CPUs
    with mock.patch.object(RankWorker, "_train_client", counted):
        fit(make_model(method, **options), data, rounds=2, accelerator="gpu", precision=precision)
    return sessions[-1]
