"""Which models are scored on which data sets, which of them are the same model, and which ones the method delivers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from fedsim.core.placement import Placement
from fedsim.data.federated import FederatedData
from fedsim.evaluation.summary import Kind, Row
from fedsim.methods.base import Method
from fedsim.training.flat_model import Resident
from fedsim.training.server import Server

__all__ = ["Job", "Plan", "SplitName"]

SplitName = Literal["val", "test"]


class Job(NamedTuple):
    """One model on one retrieval set; rows with equal weights are one job."""

    row: Row
    """the first of them"""
    rows: list[int]
    """their positions in the list of rows"""
    is_shared: bool
    """whether all ranks take part"""
    is_ensemble: bool

    @property
    def domain(self) -> str:
        """The retrieval set."""
        return self.row.domain


@dataclass(frozen=True)
class Plan:
    """What is scored; the server's state decides on unseen domains, so it holds for one evaluation.

    Args:
        method: says what a personalised model is.
        server: the global models.
        residents: one model per architecture.
        archs: client -> architecture, for all clients.
        federated: all clients' data.
        placement: who hosts whom.
        needs: what must be shared for a global model to be scored.
        ensemble: whether unseen domains are also for all personalised models together.
    """

    method: Method
    server: Server
    residents: Mapping[str, Resident]
    archs: Mapping[str, str]
    federated: FederatedData
    placement: Placement
    needs: Literal["neck", "pool", "head"]
    ensemble: bool

    @property
    def has_global(self) -> bool:
        """Whether the server's models can be scored on their own."""
        return all(resident.serves(self.needs) for resident in self.residents.values())

    @property
    def primary(self) -> Kind:
        """The model that the method delivers, by which checkpoints are selected."""
        makes_its_own = type(self.method).personalise is not Method.personalise
        return "personalised" if makes_its_own or not self.has_global else "global"

    @property
    def _unseen_by_server(self) -> bool:
        """Whether the server has a model for unseen domains by now."""
        groups = self.method.server_groups
        return all(r.serves(self.needs, groups(self.server, arch)) for arch, r in self.residents.items())

    @property
    def _unseen_by_all(self) -> bool:
        return self.method.unseen_by_all and not self._unseen_by_server

    def rows(self, split: SplitName, trained: tuple[str, ...]) -> list[Row]:
        """Return all models with the domains that they are scored on.

        Args:
            split: ``val`` or ``test``.
            trained: clients that have a local model from this round.
        """
        rows: list[Row] = []
        for data in self.federated.clients:
            arch, owner = self.archs[data.name], self.placement.ranks[data.name]
            domains = data.tests if split == "test" else ((data.name,) if data.val is not None else ())
            for domain in domains:
                if self.residents[arch].serves(self.needs):
                    rows.append(Row("global", domain, None, arch, owner))
                if data.name in trained:
                    rows.append(Row("local", domain, data.name, arch, owner))
                rows.append(Row("personalised", domain, data.name, arch, owner))
        return rows + (self._unseen_rows() if split == "test" else [])

    def _unseen_rows(self) -> list[Row]:
        rows: list[Row] = []
        num_ranks = len(self.placement.loads)
        by_server, by_all = self._unseen_by_server, self._unseen_by_all
        for domain in self.federated.unseen:
            if by_server:
                for arch in sorted(self.residents):
                    rows.append(Row("global", domain, None, arch, len(rows) % num_ranks))
            elif not by_all:
                rows += [Row("personalised", domain, c, self.archs[c], r) for c, r in self.placement.ranks.items()]
            if by_all or self.ensemble:
                rows.append(Row("ensemble", domain, None, "", 0))
        return rows

    def is_delivered(self, row: Row) -> bool:
        """Whether a row is of the model that the method delivers for its domain; features and lists are this one's."""
        if row.kind == "ensemble":
            return self._unseen_by_all
        return row.kind == self.primary or (row.kind == "global" and row.domain in self.federated.unseen)

    def jobs(self, rows: list[Row], is_large: Callable[[str], bool]) -> list[Job]:
        """Put rows with equal weights and data together; what needs all ranks comes first.

        Args:
            rows: see :meth:`rows`.
            is_large: whether a domain is worth that all ranks score it together.
        """
        members: dict[tuple[str, str, str], list[int]] = {}
        for number, row in enumerate(rows):
            members.setdefault((*self.weights_of(row), row.domain), []).append(number)
        jobs = []
        for (weights, _, domain), numbers in members.items():
            is_shared = weights == "ensemble" or (weights == "global" and is_large(domain))
            jobs.append(Job(rows[numbers[0]], numbers, is_shared, weights == "ensemble"))
        return sorted(jobs, key=lambda job: not job.is_shared)

    def weights_of(self, row: Row) -> tuple[str, str]:
        """Name the weights behind a row: rows with equal weights are computed once.

        Where everything that retrieval needs is shared, a personalised model is the global one; where nothing is, it is
        the local one.
        """
        if row.kind == "ensemble":
            return row.kind, row.arch
        kind = type(self.method)
        plain = kind.personalise is Method.personalise and kind.download is Method.download
        resident = self.residents[row.arch]
        if row.client is None or (row.kind == "personalised" and plain and resident.serves(self.needs)):
            return "global", row.arch
        if plain and resident.flat.num_shared == 0:
            return "private", row.client
        return row.kind, row.client
