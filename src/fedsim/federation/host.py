"""The share of one rank in a round: its clients visit the resident models, one after another."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from fedsim.core.errors import BadUpdateError, LeftOutError
from fedsim.federation.aggregation import Aggregator
from fedsim.federation.events import RoundCallback
from fedsim.federation.privacy import Privacy
from fedsim.federation.round_table import RoundTable
from fedsim.methods.base import Method, message_to
from fedsim.strategy.strategy import FederatedStrategy
from fedsim.training.client import BatchReport, Client
from fedsim.training.messages import Upload
from fedsim.training.server import Server


@dataclass(frozen=True)
class Host:
    """A rank's clients and what they need to train.

    Args:
        clients: hosted by this rank.
        method: whose hooks make the round.
        server: the global models.
        aggregator: takes the uploads.
        strategy: tells when to leave.
        on_bad_update: what to do with an update that is not finite.
        precision: of forward passes, Lightning's name.
        callbacks: told about rounds and batches.
        privacy: the noise that is added to downloads and uploads.
    """

    clients: Mapping[str, Client]
    method: Method
    server: Server
    aggregator: Aggregator
    strategy: FederatedStrategy
    on_bad_update: Literal["stop", "skip_client"]
    precision: str
    callbacks: Sequence[RoundCallback]
    privacy: Privacy

    def train(
        self, round_: int, called: Sequence[str], work: Mapping[str, float], table: RoundTable, keep_snapshots: bool
    ) -> Exception | None:
        """Train the clients ``called``, as far as they are hosted here.

        Args:
            round_: from 0.
            called: clients that answer in this round, of all ranks.
            work: client -> share of its work that gets done.
            table: its rows are filled.
            keep_snapshots: whether local models are kept for an evaluation.

        Returns:
            the error, if there was one: the other ranks must hear of it.
        """
        mine = [name for name in called if name in self.clients]
        try:
            for callback in self.callbacks:
                callback.on_round_start(round_, mine)
            for name in mine:
                self.strategy.describe_activity(f"round {round_ + 1}, client {name}")
                self._visit(self.clients[name], round_, work[name], table, keep_snapshots)
        except Exception as error:  # whatever it is
            return error
        self.strategy.describe_activity(f"round {round_ + 1}, after its clients")
        if self.strategy.stop_signal is not None:
            table.ask_to_stop(self.strategy.global_rank, self.strategy.stop_signal)
        return None

    def _visit(self, client: Client, round_: int, work: float, table: RoundTable, keep_snapshot: bool) -> None:
        """Train one client and write its row of the table; an update that does not count is left out."""
        try:
            self._train_client(client, round_, work, table, keep_snapshot)
        except LeftOutError as error:
            if isinstance(error, BadUpdateError) and self.on_bad_update == "stop":
                raise
            table.skip(client.client_name, error)
        except (RuntimeError, MemoryError) as error:
            if (explained := client.out_of_memory(error)) is not None:
                raise explained from error
            raise

    def _train_client(self, client: Client, round_: int, work: float, table: RoundTable, keep_snapshot: bool) -> None:
        client.model.flat.check()
        client.begin_round(round_, work, self.precision, self._on_batch)
        try:
            message = message_to(self.method, self.server, client.model.arch)
            client.received = self.privacy.received(client, self.server, message)
            self._do_round(client, table, keep_snapshot)
        finally:
            client.leave()

    def _do_round(self, client: Client, table: RoundTable, keep_snapshot: bool) -> None:
        """Download, train, measure, upload."""
        self.method.download(client)
        self.method.train(client)
        client.check_labels()
        upload = self.method.upload(client)
        self._check_signals(client, upload)
        numbers, tensors = upload.numbers, upload.tensor_numbers
        upload = self.privacy.uploaded(client, self.server, upload)
        contribution = self.aggregator.encode(client.client_name, upload)
        parts = (contribution.vector, *contribution.extras.values())
        outcome = client.end_round(parts, self.aggregator.limit, keep_snapshot)
        self.aggregator.add(client.client_name, contribution)
        traffic = zip(self.aggregator.columns, self.aggregator.facts(client.client_name, upload), strict=True)
        row = {**outcome.facts, **numbers, **dict(traffic)}
        table.fill(client.client_name, self.strategy.global_rank, outcome, row, tensors)

    def _check_signals(self, client: Client, upload: Upload) -> None:
        """Refuse signals that are not declared; those that are not finite make a bad update."""
        kinds = dict.fromkeys(upload.numbers, "client") | dict.fromkeys(upload.tensor_numbers, "tensor")
        assert kinds == dict(self.method.measures), "upload must have the signals that measures names"
        names = [entry.name for entry in client.model.flat.shared_parameters]
        of_tensors = [pair for values in upload.tensor_numbers.values() for pair in zip(names, values, strict=True)]
        for name, value in [*upload.numbers.items(), *of_tensors]:
            if not math.isfinite(value):
                raise BadUpdateError(f"client {client.client_name}, round {client.round + 1}: its {name} is {value}")

    def _on_batch(self, report: BatchReport) -> None:
        self.strategy.poll()
        for callback in self.callbacks:
            callback.on_client_batch(report)
