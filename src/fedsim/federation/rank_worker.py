"""The work of one rank in a round: it trains one client after another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from fedsim.core.errors import BadUpdateError, LeftOutError, TrainingError
from fedsim.federation.aggregation.sums import Aggregator
from fedsim.federation.events import RoundCallback
from fedsim.federation.parts import Parts
from fedsim.federation.round_table import RoundTable, SessionReport
from fedsim.federation.settings import Settings
from fedsim.methods.declared import message_to
from fedsim.strategy.rank_group import RankGroup
from fedsim.strategy.strategy import FederatedStrategy
from fedsim.training.client import BatchReport, Client, Outcome
from fedsim.training.messages import Upload
from fedsim.training.timetable import Timetable


class Start(NamedTuple):
    """The beginning of a session."""

    round_: int
    """to which it contributes"""
    called: int
    """round in which the client was called: its random streams and rates are those of that round"""
    vector: Tensor | None
    """the model of that round, on the device; None: the current one"""


@dataclass(frozen=True)
class RankWorker:
    """A rank, and everything that clients need to train on it."""

    settings: Settings
    """the settings of the federation"""
    parts: Parts
    """the parts of the federation"""
    aggregator: Aggregator
    """adds up the uploads"""
    strategy: FederatedStrategy
    """the collectives and the control channel"""
    precision: str
    """of forward passes, by Lightning's name"""
    callbacks: Sequence[RoundCallback]
    """called at the start of rounds and after batches"""

    def train(self, round_: int, timetable: Timetable, table: RoundTable, keep_snapshots: bool) -> Exception | None:
        """Train the clients of the ``timetable`` that the scheduler gives to this rank; fill their rows of ``table``.

        ``keep_snapshots`` keeps local models for an evaluation. Returns the error, if there was one, for the exchange
        with the other ranks.
        """
        scheduler, device = self.parts.rank_share.scheduler, self.strategy.root_device
        rank = self.strategy.global_rank
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        orders = scheduler.orders(timetable.answering, timetable.work)
        if keep_snapshots:
            self.parts.rank_share.snapshots.begin(orders.all)
        try:
            if round_ in timetable.kept:
                vectors = {arch: self.parts.server.vector(arch) for arch in self.parts.models}
                self.parts.rank_share.old_models.keep(round_, vectors)
            for callback in self.callbacks:
                callback.on_round_start(round_, orders.all)
            for name, rank_group in scheduler.turns(orders):
                self.strategy.describe_activity(f"round {round_ + 1}, client {name}")
                client = self.parts.clients.to_train(name)
                start = self._start_of(client, round_, timetable)
                session = self._train_client(client, start, timetable.work[name], rank_group, keep_snapshots)
                table.enter(rank, name, session)
        except Exception as error:  # of any type: the other ranks must stop, too
            return error
        if device.type == "cuda":
            table.enter_peak(rank, torch.cuda.max_memory_allocated(device))
        self.strategy.describe_activity(f"round {round_ + 1}, after its clients")
        if self.strategy.stop_signal is not None:
            table.ask_to_stop(rank, self.strategy.stop_signal)
        return None

    def _start_of(self, client: Client, round_: int, timetable: Timetable) -> Start:
        called = timetable.versions.get(client.client_name, round_)
        arch, old_models = client.model.arch, self.parts.rank_share.old_models
        vector = None if called == round_ else old_models.of(called, arch).to(client.model.device)
        return Start(round_, called, vector)

    def _train_client(
        self, client: Client, start: Start, work: float, rank_group: RankGroup | None, keep_snapshot: bool
    ) -> SessionReport:
        """Train one client and return the numbers of its session; an update that does not count is left out.

        The ranks of a ``rank_group`` run the same session, each with its micro-batches; the first sends the results.
        """
        try:
            client.model.flat.check()
            attack = self.settings.attack
            attacks = attack is not None and attack.acts(client.client_name, start.round_)
            poison = attack.poison(client) if attack is not None and attacks else None
            client.begin_round(start.called, work, self.precision, self.on_batch, rank_group, poison)
            try:
                session = self._do_round(client, start.vector, attacks, keep_snapshot)
            finally:
                client.leave()
        except LeftOutError as error:
            if isinstance(error, BadUpdateError) and self.settings.on_bad_update == "stop":
                raise
            session = SessionReport(sends=rank_group is None or rank_group.is_first, left_out=error)
        except SystemExit as error:  # of a library, or of the user's method: the run has not come to its end
            raise TrainingError(
                f"client {client.client_name}, round {start.called + 1}: its code asked the process to exit (code "
                f"{error.code}); let it raise an error instead"
            ) from error
        except (RuntimeError, MemoryError) as error:
            if (explained := client.out_of_memory(error)) is not None:
                raise explained from error
            raise
        return session._replace(work=client.work)

    def _do_round(self, client: Client, vector: Tensor | None, attacks: bool, keep_snapshot: bool) -> SessionReport:
        """Download, train, measure, upload.

        ``vector``: the model that it downloads, None for the current one; ``attacks``: whether it attacks in this
        round.
        """
        method, server, privacy = self.settings.method, self.parts.server, self.settings.privacy
        message = message_to(method, server, client.model.arch, vector)
        client.received = message if privacy is None else privacy.received(client, server, message)
        method.download(client)
        method.train(client)
        client.end_training()
        checked = self.aggregator.checked
        upload = checked(method, client, method.upload(client))
        if attacks and (attack := self.settings.attack) is not None:
            upload = checked(attack, client, attack.uploaded(client, upload))
        sent = upload if privacy is None else checked(privacy, client, privacy.uploaded(client, server, upload))
        contribution = self.aggregator.encode(client.client_name, sent)
        signals = {**upload.signals, **self.aggregator.facts(client.client_name, sent)}
        # before privacy, whose noise may be larger than a variance
        places = self.parts.statistics[client.model.arch].variances
        variances = upload.vector[places] if places.numel() else None
        outcome = client.end_round(self.aggregator.limited(contribution), signals, variances)
        numbers, tensor_numbers = self._sorted(outcome, upload)
        sends = client.session.is_first
        if sends and keep_snapshot:
            self.parts.rank_share.snapshots.keep(client.client_name, client.model.flat.buffer)
        if sends:
            self.aggregator.add(client.client_name, contribution)
        return SessionReport(sends, outcome, {**outcome.facts, **numbers}, tensor_numbers)

    def _sorted(self, outcome: Outcome, upload: Upload) -> tuple[Mapping[str, float], Mapping[str, Sequence[float]]]:
        """Return the signals of the client, and those with a number for each tensor; refuse undeclared ones."""
        numbers: dict[str, float] = {}
        tensor_numbers: dict[str, Sequence[float]] = {}
        for name, value in outcome.signals.items():
            if isinstance(value, int | float):
                numbers[name] = value
            else:
                tensor_numbers[name] = value
        kinds = {name: "tensor" if name in tensor_numbers else "client" for name in upload.signals}
        assert kinds == self.settings.method.measures, "upload must have the signals that measures names"
        return numbers, tensor_numbers

    def on_batch(self, report: BatchReport) -> None:
        """Note a session's progress after a batch, and call the callbacks."""
        self.strategy.poll()
        for callback in self._batch_callbacks:
            callback.on_client_batch(report)
        if self.strategy.stop_deadline is not None:
            for callback in self.callbacks:
                callback.on_batch_before_stop(report)

    @cached_property
    def _batch_callbacks(self) -> list[RoundCallback]:
        """The callbacks that do something after a batch."""
        return [c for c in self.callbacks if type(c).on_client_batch is not RoundCallback.on_client_batch]
