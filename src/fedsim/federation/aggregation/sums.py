"""The sums of a round: from uploads to their weighted means."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedsim.core.errors import TrainingError
from fedsim.core.exact import GRID, MAX_MAGNITUDE, accumulate
from fedsim.federation.aggregation.forms import check_form
from fedsim.federation.aggregation.gathered import Forgery, UploadRule, gather
from fedsim.federation.aggregation.tables import RowsOfRound
from fedsim.methods.base import Method, Weights
from fedsim.strategy.strategy import FederatedStrategy
from fedsim.training.client import Client
from fedsim.training.messages import Answers, Report, Signals, Upload
from fedsim.training.statistics import BatchNormStatistics
from fedsim.training.uploads import Uploads

Extras = Mapping[str, Mapping[str, tuple[int, ...]]]
"""architecture -> name -> shape of a tensor that every client uploads in addition to its vector"""
Stretches = Sequence[tuple[slice, float]]
"""consecutive parts of the shared vector, each with a client's weight: parameters first, statistics last"""
Accumulate = Callable[[Tensor, float, Tensor], object]
"""total, weight, x: add ``weight * x`` to ``total`` in place, exactly or in float32"""


def aggregation_weights(method: Method, reports: Mapping[str, Report], archs: Mapping[str, str]) -> dict[str, Weights]:
    """Return the method's weights, separately for the clients of each architecture that has reports.

    ``reports`` are those of the clients that returned an update; ``archs``: client -> architecture. The result has
    architectures as keys.

    Raises:
        AssertionError: if weights do not sum to 1: the model would shrink or grow each round.
    """
    result: dict[str, Weights] = {}
    hook = f"{type(method).__name__}.weights"
    for arch, members in by_architecture(reports, archs).items():
        weights = result[arch] = method.weights(members)
        _check_weights(hook, members, {client: [weight] for client, weight in weights.clients.items()})
        if weights.parameters is not None:
            _check_weights(f"{hook}, of parameters,", members, weights.parameters)
    return result


def by_architecture(reports: Mapping[str, Report], archs: Mapping[str, str]) -> dict[str, dict[str, Report]]:
    """Return architecture -> client -> report, sorted by architecture; architectures without a report are missing."""
    members: dict[str, dict[str, Report]] = {arch: {} for arch in sorted({archs[client] for client in reports})}
    for client, report in reports.items():
        members[archs[client]][client] = report
    return members


def _check_weights(hook: str, members: Mapping[str, Report], weights: Mapping[str, Sequence[float]]) -> None:
    assert weights.keys() == members.keys(), f"{hook} must weigh exactly {list(members)}"
    for column in zip(*weights.values(), strict=True):
        assert min(column) >= 0, f"{hook} returned a negative weight: {weights}"
        assert abs(sum(column) - 1) < 1e-9, f"{hook} do not sum to 1: {weights}"


class ModelSum:
    """The sum of models: that of w x, which is their mean, as weights sum to 1. A subclass has another form."""

    columns: ClassVar[tuple[str, ...]] = ()
    """names of the numbers that :meth:`facts` returns"""

    def length(self, statistics: BatchNormStatistics) -> int:
        """Return the length of an architecture's sum."""
        return statistics.num_shared

    def facts(self, upload: Upload, num_parameters: int) -> Signals:  # noqa: ARG002 - for subclasses
        """Return the numbers about an upload that all ranks need, by :attr:`columns`; refuse content without a use.

        ``num_parameters`` are the shared ones of the model, without padding.
        """
        assert upload.mask is None, "the method declares no masks"
        return {}

    def add(self, upload: Upload, weights: Stretches, total: Tensor, accumulate: Accumulate) -> None:
        """Add a client's weighted model to ``total``."""
        add_stretches(upload.vector.to(total.device), weights, total, accumulate)

    def mean(self, total: Tensor, statistics: BatchNormStatistics) -> tuple[Tensor, Tensor | None]:  # noqa: ARG002 - for subclasses
        """Turn the sum into the mean [num_shared].

        Returns also the parameters without a mean, bool [num_shared_parameters], or None if all have one.
        """
        return total, None


def add_stretches(x: Tensor, weights: Stretches, total: Tensor, accumulate: Accumulate) -> None:
    """Add the weighted vector ``x`` [num_shared] to ``total``, which is as long."""
    for stretch, weight in weights:
        accumulate(total[stretch], weight, x[stretch])


class Aggregator:
    """Computes one vector of the uploads of each architecture, by a sum, or by a rule for single uploads.

    If the weights are known when a round begins, each upload is added at once to a buffer that exists as long as the
    federation. Otherwise uploads wait in host memory. Both give the same bits: the sums run over a rank's clients in
    the order in which they trained.

    Args:
        strategy: the collectives.
        statistics: architecture -> treatment of running statistics.
        archs: client -> architecture, for all clients.
        reduction: exact, or plain fp32.
        device: device of the sums.
        seed: of the run.
        form: form of the sum of models.
        rule: replaces the sum of models; all uploads wait for it.
        forgery: replaces the uploads of attackers, which are made of others; all uploads wait for it.
    """

    def __init__(
        self,
        strategy: FederatedStrategy,
        statistics: Mapping[str, BatchNormStatistics],
        archs: Mapping[str, str],
        reduction: Literal["exact", "fp32"],
        device: torch.device,
        seed: int,
        form: ModelSum | None = None,
        rule: UploadRule | None = None,
        forgery: Forgery | None = None,
    ) -> None:
        self.strategy, self.statistics, self.archs, self.seed = strategy, statistics, archs, seed
        self._form, self._rule, self._forgery = form or ModelSum(), rule, forgery
        self.is_exact = reduction == "exact"
        self._accumulate: Accumulate = accumulate if self.is_exact else _accumulate_in_float32
        self.untouched: dict[str, Tensor] = {}
        """architecture -> shared parameters without a mean in the last round, bool [num_shared_parameters], if there
        are any; the values of :meth:`means` at these elements have no meaning"""
        empty = torch.zeros(0, dtype=torch.float64 if self.is_exact else torch.float32, device=device)
        self._totals = {arch: empty.new_zeros(self._form.length(policy)) for arch, policy in statistics.items()}
        self._extras: dict[tuple[str, str], Tensor] = {}
        self._shapes: Extras = {}
        self._waiting: dict[str, Upload] = {}
        self._tables = RowsOfRound({})
        self._is_summed = False  # over all ranks

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the numbers that :meth:`facts` returns."""
        return self._form.columns + self._tables.counts

    def begin(
        self, round_: int, extras: Extras, weights: Mapping[str, Weights] | None = None, *,
        tables: Mapping[str, int] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        """Empty the sums for a round.

        ``weights``, by architecture, are those of all ranks' clients, if known; ``tables``: name -> columns of the
        tables to which clients add rows.
        """
        self._tables = RowsOfRound(tables)
        adds_at_once = self._rule is None and self._forgery is None
        self.round, self._weights, self._shapes = round_, weights if adds_at_once else None, extras
        self._waiting, self.untouched = {}, {}
        for total in self._totals.values():
            total.zero_()
        self._extras = {
            (arch, name): self._totals[arch].new_zeros(math.prod(shape))
            for arch, shapes in extras.items()
            for name, shape in shapes.items()
        }

    def encode(self, client: str, upload: Upload) -> Upload:
        """Return a client's contribution to the sums: its upload, or a changed copy of it."""
        statistics = self.statistics[self.archs[client]]
        return upload if statistics.is_plain else replace(upload, vector=statistics.encode(upload.vector))

    def checked(self, sender: object, client: Client, upload: object) -> Upload:
        """Check and return an upload of ``sender`` for a client; see :func:`check_form`."""
        return check_form(sender, client, upload, self._shapes.get(client.model.arch, {}), tables=self._tables.columns)

    def limited(self, contribution: Upload) -> list[tuple[Tensor, float]]:
        """Return the tensors of a contribution, each with its largest magnitude: only exact sums have one."""
        limit = MAX_MAGNITUDE if self.is_exact else math.inf
        extras = ((tensor, limit) for tensor in contribution.extras.values())
        return [(contribution.vector, self._limit), *extras, *((rows, math.inf) for rows in contribution.rows.values())]

    @property
    def _limit(self) -> float:
        """The largest magnitude of a model's values: only exact sums of models have one."""
        return MAX_MAGNITUDE if self.is_exact and self._rule is None else math.inf

    def facts(self, client: str, upload: Upload) -> Signals:
        """Return the numbers about an upload that all ranks need, by :attr:`columns`."""
        facts = self._form.facts(upload, self.statistics[self.archs[client]].num_parameters)
        return {**facts, **self._tables.facts(upload)} if self._tables.columns else facts

    def add(self, client: str, contribution: Upload) -> None:
        """Add a client's encoded upload, now or in :meth:`means`; its values are within their limits."""
        self._tables.add(client, contribution)
        if self._weights is None:
            self._waiting[client] = contribution.on_host()
        else:
            self._sum(client, contribution, self._weights[self.archs[client]])

    def ready(self) -> list[Tensor]:
        """Return the sums if they are complete and small; ranks then exchange them with the reports, in one collective.

        They are exact float64 sums in host memory, of at most 1 MiB together.
        """
        sums = [*self._totals.values(), *self._extras.values()]
        small = self.is_exact and self._weights is not None and sum(s.nbytes for s in sums) <= 2**20
        self._is_summed = small and all(s.device.type == "cpu" for s in sums)
        return sums if self._is_summed else []

    def means(self, weights: Mapping[str, Weights], reports: Mapping[str, Report]) -> dict[str, Tensor]:
        """Return the weighted mean of the uploads of each architecture, float32 [num_shared], or the rule's vector.

        ``weights``, by architecture, and ``reports`` are those of all ranks' clients. Each sum is one collective.
        """
        for arch, early in (self._weights or {}).items():
            assert early.clients == weights[arch].clients, "weights changed after uploads were summed with them"
        if self._forgery is not None:
            self._forge(self._forgery, reports)
        vectors = None if self._rule is None else self._by_rule(self._rule, reports)
        for client, contribution in self._waiting.items():
            self._sum(client, contribution, weights[self.archs[client]])
        self._waiting = {}
        return {arch: self._mean(arch) for arch in sorted(weights)} if vectors is None else vectors

    def answers(self, reports: Mapping[str, Report]) -> dict[str, Answers]:
        """Return the means of the extra tensors, and the reports, by architecture: one collective for each tensor."""
        answers = {}
        for arch, members in by_architecture(reports, self.archs).items():
            extras = {}
            for name, shape in sorted(self._shapes.get(arch, {}).items()):
                total = self._over_ranks(self._extras[arch, name])
                extras[name] = (total.div_(GRID) if self.is_exact else total).to(torch.float32).view(shape)
            answers[arch] = Answers(members, extras)
        self._extras = {}
        return answers

    def joined(self, reports: Mapping[str, Report]) -> dict[str, Tensor]:
        """Return the rows of all clients with ``reports``, by table, in their order: one collective for each table."""
        return self._tables.joined(reports, self.strategy)

    def _sum(self, client: str, upload: Upload, weights: Weights) -> None:
        """Add a client's model, unless there is a rule, and its extra tensors, whose plain mean is computed."""
        arch = self.archs[client]
        if self._rule is None:
            self._form.add(upload, self._stretches(client, weights), self._totals[arch], self._accumulate)
        for name, tensor in upload.extras.items():
            total = self._extras[arch, name]
            self._accumulate(total, 1 / len(weights.clients), tensor.to(total.device).flatten())

    def _stretches(self, client: str, weights: Weights) -> Stretches:
        """Return the client's weights: one stretch if all of its upload has the same weight."""
        statistics, weight = self.statistics[self.archs[client]], weights.clients[client]
        of_statistics = (
            weight if statistics.is_plain else statistics.weight(client, weights.clients, self.seed, self.round)
        )
        of_parameters = [weight] if weights.parameters is None else weights.parameters[client]
        if len(of_parameters) > 1:
            slices = [entry.span for entry in statistics.parameters]
        elif of_statistics == of_parameters[0]:
            return [(slice(None), of_statistics)]
        else:
            slices = [slice(statistics.span.start)]
        return [*zip(slices, of_parameters, strict=True), (statistics.span, of_statistics)]

    def _mean(self, arch: str) -> Tensor:
        total, statistics = self._over_ranks(self._totals[arch]), self.statistics[arch]
        mean, untouched = self._form.mean(total.div_(GRID) if self.is_exact else total, statistics)
        if untouched is not None:
            self.untouched[arch] = untouched
        return statistics.decode(mean).to(torch.float32)

    def _over_ranks(self, total: Tensor) -> Tensor:
        return total if self._is_summed else self.strategy.sum_(total)

    def _gather(self, arch: str, length: int, clients: Sequence[str]) -> Uploads:
        """Return the first ``length`` numbers of the uploads of some clients of an architecture."""
        return gather(self._waiting, [*clients], length, self._totals[arch].device, self.strategy)

    def _forge(self, forgery: Forgery, reports: Mapping[str, Report]) -> None:
        """Replace the parameters in the uploads of attackers; all ranks know those of all, and so refuse the same.

        Raises:
            TrainingError: if they are not finite, or too large for exact sums.
        """
        for arch, members in by_architecture(reports, self.archs).items():
            gather_some = partial(self._gather, arch, self.statistics[arch].span.start)
            for client, parameters in forgery(arch, [*members], gather_some).items():
                largest = float(parameters.abs().max())
                if not (largest <= self._limit and math.isfinite(largest)):
                    raise TrainingError(
                        f"client {client}, round {self.round + 1}: its malicious upload has values up to {largest:g}, "
                        f"and {MAX_MAGNITUDE:.0f} is the limit of exact sums; lower the factor of model.attack, set "
                        "model.reduction to fp32, or choose a rule in model.aggregation"
                    )
                if client in self._waiting:
                    self._waiting[client].vector[: len(parameters)] = parameters

    def _by_rule(self, rule: UploadRule, reports: Mapping[str, Report]) -> dict[str, Tensor]:
        """Return the rule's vector for each architecture, float32 [num_shared]."""
        vectors = {}
        for arch, members in by_architecture(reports, self.archs).items():
            device, statistics = self._totals[arch].device, self.statistics[arch]
            uploads = self._gather(arch, statistics.num_shared, [*members])
            vectors[arch] = statistics.decode(rule(arch, uploads, members).double()).float().to(device)
        return vectors


def _accumulate_in_float32(total: Tensor, weight: float, x: Tensor) -> None:
    total.add_(x, alpha=weight)
