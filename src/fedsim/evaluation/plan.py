"""Which models are scored on which data sets, and which rows are the same model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal, final

from fedsim.core.names import file_names
from fedsim.core.placement import Placement
from fedsim.core.replaced_run import files_of_sets
from fedsim.data.federated import FederatedData
from fedsim.evaluation.scorer import ScoredSet
from fedsim.evaluation.summary import Kind, ScoreRow, SplitName
from fedsim.methods.base import Method
from fedsim.training.flat_model import FlatModel
from fedsim.training.server import Server


@final
@dataclass(frozen=True, eq=False)  # a key of dictionaries
class ScoringJob:
    """One model on one data set, for all rows with these weights."""

    row: ScoreRow
    """the first row"""
    rows: list[int]
    """positions of all its rows"""
    data: ScoredSet
    is_shared: bool
    """whether all ranks take part"""
    is_ensemble: bool


@final
@dataclass(frozen=True)
class EvaluationPlan:
    """The models and data sets of an evaluation; the server's state at this moment decides on unseen domains.

    ``needs`` and ``ensemble`` are those of :class:`fedsim.evaluation.settings.Evaluation` .
    """

    method: Method
    server: Server
    models: Mapping[str, FlatModel]
    archs: Mapping[str, str]
    federated: FederatedData
    placement: Placement
    needs: Literal["neck", "pool", "head"]
    ensemble: bool

    @property
    def has_global(self) -> bool:
        """Whether the server's models can be scored without a client."""
        return all(model.serves(self.needs) for model in self.models.values())

    @property
    def primary(self) -> Kind:
        """The model that the method delivers, by which checkpoints are selected."""
        return "global" if self.method.delivers == "global" and self.has_global else "personalised"

    @property
    def _unseen_by_server(self) -> bool:
        """Whether the server has a model for unseen domains by now."""
        tensors_of = partial(self.method.server_tensors, self.server)
        return all(model.serves(self.needs, tensors_of(arch)) for arch, model in self.models.items())

    @property
    def _unseen_by_all(self) -> bool:
        return self.method.delivers == "ensemble" and not self._unseen_by_server

    def rows(self, split: SplitName, trained: tuple[str, ...]) -> list[ScoreRow]:
        """Return all models with their domains; ``trained`` clients have a local model from this round."""
        rows: list[ScoreRow] = []
        for data in self.federated.clients:
            arch, owner = self.archs[data.name], self.placement.ranks[data.name]
            domains = data.tests if split == "test" else ((data.name,) if data.val is not None else ())
            for domain in domains:
                if self.models[arch].serves(self.needs):
                    rows.append(ScoreRow("global", domain, None, arch, owner))
                if data.name in trained:
                    rows.append(ScoreRow("local", domain, data.name, arch, owner))
                rows.append(ScoreRow("personalised", domain, data.name, arch, owner))
        return rows + (self._unseen_rows() if split == "test" else [])

    def _unseen_rows(self) -> list[ScoreRow]:
        rows: list[ScoreRow] = []
        num_ranks = len(self.placement.loads)
        by_server, by_all = self._unseen_by_server, self._unseen_by_all
        for domain in self.federated.unseen:
            if by_server:
                for arch in sorted(self.models):
                    rows.append(ScoreRow("global", domain, None, arch, len(rows) % num_ranks))
            elif not by_all:
                rows += [ScoreRow("personalised", domain, c, self.archs[c], r) for c, r in self.placement.ranks.items()]
            if by_all or self.ensemble:
                rows.append(ScoreRow("ensemble", domain, None, "", 0))
        return rows

    def is_delivered(self, row: ScoreRow) -> bool:
        """Whether the method delivers the row's model for its domain; features and lists are written for these."""
        if row.kind == "ensemble":
            return self._unseen_by_all
        return row.kind == self.primary or (row.kind == "global" and row.domain in self.federated.unseen)

    def jobs(self, rows: list[ScoreRow], find_set: Callable[[str], ScoredSet], share_from: int) -> list[ScoringJob]:
        """Join rows with equal weights and data to jobs; jobs of all ranks come first.

        ``find_set``: domain -> its data set. All ranks score a global model on ``share_from`` images or more together.
        """
        members: dict[tuple[str, str, str], list[int]] = {}
        for number, row in enumerate(rows):
            members.setdefault((*self.weights_of(row), row.domain), []).append(number)
        jobs = []
        for (weights, _, domain), numbers in members.items():
            data, is_ensemble = find_set(domain), weights == "ensemble"
            is_shared = is_ensemble or (weights == "global" and data.num_images >= share_from)
            jobs.append(ScoringJob(rows[numbers[0]], numbers, data, is_shared, is_ensemble))
        return sorted(jobs, key=lambda job: not job.is_shared)

    def file_name(self, job: ScoringJob) -> str:
        """Return the domain, with the model's client or architecture if the method delivers several models for it."""
        name = self._files_of_tests[job.data.domain]
        if job.is_ensemble:
            return name
        row, domain = job.row, job.data.domain
        several = len(self.models) > 1 if row.client is None else domain in self.federated.unseen
        of_model = self._files_of_models[row.client or row.arch] if several else ""
        return f"{name}@{of_model}" if several else name

    @cached_property
    def _files_of_tests(self) -> dict[str, str]:
        return files_of_sets(self.federated.tests)

    @cached_property
    def _files_of_models(self) -> dict[str, str]:
        return file_names([*self.archs, *self.models])

    def weights_of(self, row: ScoreRow) -> tuple[str, str]:
        """Name the weights behind a row: rows with equal weights are computed once.

        Where everything that retrieval needs is shared, a personalised model is the global one; where nothing is, it is
        the local one.
        """
        if row.kind == "ensemble":
            return row.kind, row.arch
        plain = not self.method.has_own_models
        model = self.models[row.arch]
        if row.client is None or (row.kind == "personalised" and plain and model.serves(self.needs)):
            return "global", row.arch
        if plain and model.flat.num_shared == 0:
            return "private", row.client
        return row.kind, row.client
