"""One communication round, step by step. Read this file first."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedsim.core.seeding import derive_seed
from fedsim.evaluation.summary import MAX_NAMES
from fedsim.federation.aggregation.sums import Aggregator, aggregation_weights
from fedsim.federation.components.clock import Clock
from fedsim.federation.components.listener import RoundListener, RoundRecord
from fedsim.federation.parts import Parts
from fedsim.federation.rank_worker import RankWorker
from fedsim.federation.root import RootTraining
from fedsim.federation.round_table import Columns, RoundTable
from fedsim.federation.settings import Settings
from fedsim.methods.base import Method, Weights
from fedsim.methods.declared import has_server_step, tensors_on_ranks
from fedsim.strategy.strategy import FederatedStrategy
from fedsim.training.messages import Report
from fedsim.training.server import Server
from fedsim.training.timetable import Timetable


@dataclass(frozen=True)
class RoundResult:
    """The outcome of a round, equal on all ranks except for measured times."""

    reports: Mapping[str, Report]
    """client -> its report, of the clients whose updates count"""
    metrics: Mapping[str, float]
    """the numbers that are logged about training"""
    stop_signal: int | None
    """the signal that asked a rank to end the run, if there was one"""


@dataclass(frozen=True)
class Round:
    """A round; every rank runs it, and all get the same result."""

    settings: Settings
    """the settings of the federation"""
    parts: Parts
    """the parts of the federation"""
    listeners: Sequence[RoundListener]
    """components besides the method; they act before a round and observe its outcome"""
    clock: Clock
    """one of them: the simulated time"""
    worker: RankWorker
    """trains this rank's clients"""
    aggregator: Aggregator
    """sums the uploads"""
    strategy: FederatedStrategy
    """the collectives"""
    root: RootTraining | None = None
    """trains the server's own model; None: it has none"""

    def run(self, round_: int, optimizer_step: Callable[[], Any], keep_snapshots: bool) -> RoundResult:
        """Run round ``round_``, from 0.

        ``optimizer_step`` steps the server's optimizer; ``keep_snapshots`` keeps local models for an evaluation.
        """
        started, settings, parts = time.perf_counter(), self.settings, self.parts
        method = settings.method
        # 1. The server selects clients; some of them do not answer, or are slow, or answer in a later round.
        parts.server.round, parts.server.work = round_, (0, 0)
        for listener in self.listeners:
            listener.begin(round_)
        timetable = self.clock.plan(round_)
        # 2. If the weights are known already, uploads are summed as they arrive; otherwise they wait.
        payloads = {arch: method.payload(parts.server, arch, round_) for arch in parts.models}
        extras = {arch: payload.up for arch, payload in payloads.items()}
        tables = {name: columns for payload in payloads.values() for name, columns in payload.tables.items()}
        self.aggregator.begin(round_, extras, self._early_weights(timetable), tables=tables)
        # 3. Each rank trains its clients, one after another.
        table = self._empty_table(timetable.answering)
        error = self.worker.train(round_, timetable, table, keep_snapshots)
        # 4. All ranks exchange reports, clients that are left out, stop signals, and small sums.
        self.strategy.exchange([*table.parts, *self.aggregator.ready()], error)
        table.warn_of_skipped(round_, timetable.answering)
        reports = {name: self._report(table, name) for name in table.returned(timetable.answering)}
        # 5. Every rank computes the same weights, normalised before they multiply any upload.
        weights = self.clock.discounted_weights(aggregation_weights(method, reports, parts.archs), timetable)
        # 6. Weighted sums over all clients, one collective per architecture if large; noise, if configured.
        if self.root is not None and reports:
            self.root.train(round_)
        means = self.clock.rebased_means(self.aggregator.means(weights, reports), weights, timetable)
        means = settings.noise.aggregated(parts.server, means, weights)
        # 7. The server steps towards the means, and does the server step of the method.
        if means:  # without any answer there is no step, not even of the momentum
            parts.server.answers = self.aggregator.answers(reports)
            parts.server.join(self.aggregator.joined(reports))
            self._step_server(means, weights, optimizer_step)
        # 8. The listeners observe the round.
        overall = method.weights(reports).clients if reports and settings.selection.learns else {}
        shown = {name: overall[name] for name in reports if overall}
        record = RoundRecord(
            round_, settings.training_seed, timetable.called, reports, shown, parts.archs, timetable.too_old,
            timetable.seconds,
        )  # fmt: skip
        for listener in self.listeners:
            listener.observe(record)
        shares = {name: weights[parts.archs[name]].clients[name] for name in reports}
        metrics = self._metrics(round_) | table.metrics(
            shares, reports, time.perf_counter() - started, on_server=parts.server.work
        )
        return RoundResult(reports, metrics, table.stop_signal)

    def _early_weights(self, timetable: Timetable) -> dict[str, Weights] | None:
        """Return the round's weights if they depend neither on measured signals nor on clients that are left out."""
        method, parts = self.settings.method, self.parts
        if method.measures or self.settings.on_bad_update == "skip_client" or parts.federated.has_unlabelled:
            return None
        reports = {name: Report(parts.data_of[name].num_images, {}) for name in timetable.answering}
        return self.clock.discounted_weights(aggregation_weights(method, reports, parts.archs), timetable)

    def _empty_table(self, called: list[str]) -> RoundTable:
        method, parts = self.settings.method, self.parts
        numbers, tensors = (
            tuple(n for n, signal in method.measures.items() if signal == k) for k in ("client", "tensor")
        )
        columns = Columns(parts.facts, numbers, self.aggregator.columns, tensors)
        num_tensors = {name: len(parts.statistics[parts.archs[name]].parameters) for name in called if tensors}
        named = len(parts.names) <= MAX_NAMES  # few selected clients per round add up to many names
        return RoundTable(called, columns, self.strategy.world_size, num_tensors, named)

    def _report(self, table: RoundTable, name: str) -> Report:
        hardware = self.settings.hardware
        return table.report(name, self.parts.data_of[name].num_images, hardware.speed(name) if hardware else None)

    def _metrics(self, round_: int) -> dict[str, float]:
        named = self.parts.names if len(self.parts.names) <= MAX_NAMES else ()
        metrics = {"round": float(round_ + 1), "client/lr": self.parts.training.lr_in(round_)}
        for listener in self.listeners:
            metrics |= listener.metrics(round_, named)
        return metrics

    def _step_server(
        self, means: Mapping[str, Tensor], weights: Mapping[str, Weights], optimizer_step: Callable[[], Any]
    ) -> None:
        settings, parts = self.settings, self.parts
        exact = {a: s.span if settings.server_optimizer else slice(None) for a, s in parts.statistics.items()}
        sizes = {arch: w.step_size for arch, w in weights.items()}
        steps, recalibrates = has_server_step(settings.method, parts.server.round), settings.bn_stats == "recalibrate"
        if steps and self.strategy.global_rank == 0:
            parts.server.before = {arch: parts.server.vector(arch).clone() for arch in parts.models}
        parts.server.step(optimizer_step, means, exact, sizes, self.aggregator.untouched)
        if recalibrates or steps:
            size = settings.evaluation.batch_size if recalibrates else None
            work_on_server(self.strategy, parts.server, settings.method, size)


def work_on_server(strategy: FederatedStrategy, server: Server, method: Method, recalibrate: int | None) -> None:
    """Do the server's work on rank 0, and broadcast the result: separate computations would drift apart.

    ``recalibrate`` is the batch size for new running statistics from public images; None: they stay.
    """
    with strategy.together():
        if strategy.global_rank == 0:
            torch.manual_seed(derive_seed(server.seed, server.round, "server"))
            if recalibrate is not None:
                server.recalibrate(recalibrate)
            if has_server_step(method, server.round):
                with server.counting():
                    method.server_step(server)
    server.before = {}
    broadcast_server(strategy, server, method if has_server_step(method, server.round) else None)


def broadcast_server(strategy: FederatedStrategy, server: Server, method: Method | None) -> None:
    """Broadcast the server of rank 0: the global models, and the tensors that the ``method`` declares for all ranks.

    The other ranks drop the tensors that only rank 0 needs. None: the method has not changed its tensors.
    """
    for arch in sorted(server.vectors):
        strategy.broadcast_(server.vector(arch))
    if method is None:
        return
    sent = {arch: tensors_on_ranks(method, server, arch) & tensors.keys() for arch, tensors in server.kept.items()}
    kept = {(arch, name): server.kept[arch][name] for arch, names in sent.items() for name in sorted(names)}
    layout = {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in kept.items()}
    layout, server.work = strategy.broadcast((layout, server.work))
    if strategy.global_rank != 0:
        server.kept = {arch: {} for arch in server.kept}
    for (arch, name), (shape, dtype) in layout.items():
        if strategy.global_rank != 0:
            server.kept[arch][name] = torch.empty(shape, dtype=dtype, device=server.models[arch].device)
        strategy.broadcast_(server.kept[arch][name])
