"""What one rank does in a round: its clients visit the resident models, one after another."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from fedsim.core.errors import BadUpdateError, NoClustersError
from fedsim.core.messages import Upload
from fedsim.federation.aggregation import Aggregator
from fedsim.federation.events import RoundCallback
from fedsim.federation.privacy import Privacy
from fedsim.federation.round_table import MaskReport, RoundTable, Signals
from fedsim.methods.base import Method
from fedsim.strategy.strategy import FederatedStrategy
from fedsim.training.client import BatchReport, Client, Outcome
from fedsim.training.server import Server

__all__ = ["Host"]


@dataclass(frozen=True)
class Host:
    """A rank's clients and what they need to train.

    Args:
        clients: hosted by this rank.
        method: whose hooks make the round.
        server: the global models.
        aggregator: takes what clients upload.
        strategy: tells when to leave.
        on_bad_update: what to do with an update that is not finite.
        precision: of forward passes, Lightning's name.
        callbacks: told about rounds and batches.
        privacy: what noise is added to downloads and uploads.
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
            what went wrong, if anything did: the other ranks must hear of it.
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
        """Train one client, unless its update is to be left out, and write its row of the table."""
        try:
            outcome, signals = self._train_client(client, round_, work, keep_snapshot)
        except BadUpdateError:
            if self.on_bad_update == "stop":
                raise
            table.skip(client.client_name)
        except NoClustersError:
            table.skip(client.client_name, "no clusters")
        except (RuntimeError, MemoryError) as error:
            if (explained := client.out_of_memory(error)) is not None:
                raise explained from error
            raise
        else:
            table.fill(client.client_name, outcome, signals, self.strategy.global_rank)

    def _train_client(self, client: Client, round_: int, work: float, keep_snapshot: bool) -> tuple[Outcome, Signals]:
        """One client's visit."""
        client.resident.flat.check()
        client.begin_round(round_, work, self.precision, self._on_batch)
        try:
            with self.privacy.visit(client, self.server):
                return self._do_round(client, keep_snapshot)
        finally:
            client.leave()

    def _do_round(self, client: Client, keep_snapshot: bool) -> tuple[Outcome, Signals]:
        """Download, train, measure, upload."""
        self.method.download(client, self.server)
        self.method.train(client, self.server)
        if client.clusters and not client.visit.found_clusters:
            raise NoClustersError(f"client {client.client_name}, round {client.round + 1}: no clusters of its images")
        signals = self._measure(client)
        upload = self.privacy.uploaded(client, self.server, self.method.upload(client, self.server))
        contribution = self.aggregator.encode(client.client_name, upload)
        parts = (contribution.vector, *contribution.extras.values())
        outcome = client.end_round(parts, self.aggregator.limit, keep_snapshot)
        self.aggregator.add(client.client_name, contribution)
        return outcome, signals._replace(mask=_report_mask(client, upload)) if self.method.has_masks else signals

    def _measure(self, client: Client) -> Signals:
        """Ask the method for its signals; what is not finite is a bad update."""
        by_name = self.method.signals(client, self.server)
        of_tensors = self.method.tensor_signals(client, self.server) if self.method.has_tensor_signals else ()
        tensors = [entry.name for entry in client.resident.flat.shared_parameters] if of_tensors else []
        for name, value in [*by_name.items(), *zip(tensors, of_tensors, strict=True)]:
            if not math.isfinite(value):
                raise BadUpdateError(f"client {client.client_name}, round {client.round + 1}: its {name} is {value}")
        return Signals(by_name, of_tensors)

    def _on_batch(self, report: BatchReport) -> None:
        self.strategy.poll()
        for callback in self.callbacks:
            callback.on_client_batch(report)


def _report_mask(client: Client, upload: Upload) -> MaskReport:
    """Count what an upload's mask leaves."""
    total = client.resident.flat.num_shared_elements
    pruned = 0 if upload.mask is None else int((~upload.mask).count_nonzero())
    return MaskReport(total - pruned, upload.mask is not None and upload.is_new_mask)
