"""From uploads to their weighted means: the sums of a round."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedsim.core.exact import GRID, MAX_MAGNITUDE, accumulate
from fedsim.methods.base import Method, Weights
from fedsim.strategy.strategy import FederatedStrategy
from fedsim.training.messages import Answers, Report, Signals, Upload
from fedsim.training.statistics import BatchNormStatistics


def aggregation_weights(method: Method, reports: Mapping[str, Report], archs: Mapping[str, str]) -> dict[str, Weights]:
    """Ask the method for weights, separately for the clients of each architecture that has reports.

    ``reports`` are of the clients that returned an update; ``archs``: client -> architecture. The result is by
    architecture.

    Raises:
        AssertionError: if weights do not sum to 1: the model would shrink or grow each round.
    """
    result: dict[str, Weights] = {}
    who = f"{type(method).__name__}.weights"
    for arch, members in by_architecture(reports, archs).items():
        weights = result[arch] = method.weights(members)
        _check_weights(who, members, {client: [weight] for client, weight in weights.clients.items()})
        if weights.parameters is not None:
            _check_weights(f"{who}, of parameters,", members, weights.parameters)
    return result


def by_architecture(reports: Mapping[str, Report], archs: Mapping[str, str]) -> dict[str, dict[str, Report]]:
    """Return architecture, sorted -> client -> report; architectures without a report are missing."""
    found: dict[str, dict[str, Report]] = {arch: {} for arch in sorted({archs[client] for client in reports})}
    for client, report in reports.items():
        found[archs[client]][client] = report
    return found


def _check_weights(what: str, members: Mapping[str, Report], weights: Mapping[str, Sequence[float]]) -> None:
    assert weights.keys() == members.keys(), f"{what} must weigh exactly {list(members)}"
    for column in zip(*weights.values(), strict=True):
        assert min(column) >= 0, f"{what} returned a negative weight: {weights}"
        assert abs(sum(column) - 1) < 1e-9, f"{what} do not sum to 1: {weights}"


Extras = Mapping[str, Mapping[str, tuple[int, ...]]]
"""architecture -> name -> shape of a tensor that every client uploads beside its vector"""


class Aggregator:
    """Sums uploads, into one buffer per architecture that lives as long as the federation.

    Where weights are known when a round begins, each upload is added at once. Otherwise uploads wait in host memory.
    Both give the same bits: the sums run over a rank's clients in the order in which they trained.

    Args:
        strategy: the collectives.
        statistics: by architecture.
        archs: client -> architecture, for all clients.
        reduction: exact, or plain fp32.
        device: where sums are made.
        seed: of the run.
    """

    columns: ClassVar[tuple[str, ...]] = ()
    """names of the numbers that :meth:`facts` returns"""

    def __init__(
        self,
        strategy: FederatedStrategy,
        statistics: Mapping[str, BatchNormStatistics],
        archs: Mapping[str, str],
        reduction: Literal["exact", "fp32"],
        device: torch.device,
        seed: int,
    ) -> None:
        self.strategy, self.statistics, self.archs, self.seed = strategy, statistics, archs, seed
        self.is_exact = reduction == "exact"
        self.limit = MAX_MAGNITUDE if self.is_exact else math.inf
        """largest value that a contribution may hold"""
        self.untouched: dict[str, Tensor] = {}
        """architecture -> shared parameters without a mean in the last round, bool [num_shared_parameters], if there
        are any; ignore the values of :meth:`means` at their places"""
        empty = torch.zeros(0, dtype=torch.float64 if self.is_exact else torch.float32, device=device)
        self._totals = {arch: empty.new_zeros(self.length_of(of_arch)) for arch, of_arch in statistics.items()}
        self._extras: dict[tuple[str, str], Tensor] = {}
        self._shapes: Extras = {}
        self._waiting: dict[str, Upload] = {}
        self._is_summed = False  # over all ranks

    def length_of(self, statistics: BatchNormStatistics) -> int:
        """Return the length of an architecture's sums."""
        return statistics.num_shared

    def begin(self, round_: int, extras: Extras, weights: Mapping[str, Weights] | None = None) -> None:
        """Empty the sums for a round; ``weights``, by architecture, are those of all ranks' clients, if known."""
        self.round, self._weights, self._shapes = round_, weights, extras
        self._waiting, self.untouched = {}, {}
        for total in self._totals.values():
            total.zero_()
        self._extras = {
            (arch, name): self._totals[arch].new_zeros(math.prod(shape))
            for arch, shapes in extras.items()
            for name, shape in shapes.items()
        }

    def ready(self) -> list[Tensor]:
        """Return the sums if they are complete and small: ranks exchange them with the reports, in one collective.

        They are exact float64 sums in host memory, of at most 1 MiB together.
        """
        sums = [*self._totals.values(), *self._extras.values()]
        small = self.is_exact and self._weights is not None and sum(s.nbytes for s in sums) <= 2**20
        self._is_summed = small and all(s.device.type == "cpu" for s in sums)
        return sums if self._is_summed else []

    def _over_ranks(self, total: Tensor) -> Tensor:
        return total if self._is_summed else self.strategy.sum_(total)

    def encode(self, client: str, upload: Upload) -> Upload:
        """Return what a client adds to the sums: its upload, or a changed copy of it."""
        arch = self.archs[client]
        shapes = {name: tuple(tensor.shape) for name, tensor in upload.extras.items()}
        assert shapes == self._shapes.get(arch, {}), f"payload declares {self._shapes.get(arch)}, not {shapes}"
        self.check(upload)
        vector = self.statistics[arch].encode(upload.vector)
        return upload if vector is upload.vector else replace(upload, vector=vector)

    def check(self, upload: Upload) -> None:
        """Raise AssertionError if an upload has parts that these sums would ignore."""
        assert upload.is_plain, "the method declares no masks"

    def facts(self, client: str, upload: Upload) -> Signals:  # noqa: ARG002 - of a plain upload there are none
        """Return the numbers about an upload that all ranks must hear of, by :attr:`columns`."""
        return {}

    def add(self, client: str, contribution: Upload) -> None:
        """Take a client's encoded upload, all of whose values are within :attr:`limit`."""
        if self._weights is None:
            self._waiting[client] = contribution.on_host()
        else:
            self._sum(client, contribution, self._weights[self.archs[client]])

    def means(self, weights: Mapping[str, Weights], reports: Mapping[str, Report]) -> dict[str, Tensor]:  # noqa: ARG002 - sums need none
        """Return the weighted mean of the uploads of each architecture, float32 [num_shared]: one collective for each.

        ``weights``, by architecture, and ``reports`` are those of all ranks' clients.
        """
        for arch, early in (self._weights or {}).items():
            assert early.clients == weights[arch].clients, "weights changed after uploads were summed with them"
        for client, contribution in self._waiting.items():
            self._sum(client, contribution, weights[self.archs[client]])
        self._waiting = {}
        return {arch: self._mean(arch) for arch in sorted(weights)}

    def answers(self, reports: Mapping[str, Report]) -> dict[str, Answers]:
        """Return the means of the extra tensors, and the reports, by architecture: one collective for each tensor."""
        found = {}
        for arch, members in by_architecture(reports, self.archs).items():
            extras = {}
            for name, shape in sorted(self._shapes.get(arch, {}).items()):
                total = self._over_ranks(self._extras[arch, name])
                extras[name] = (total.div_(GRID) if self.is_exact else total).to(torch.float32).view(shape)
            found[arch] = Answers(members, extras)
        self._extras = {}
        return found

    def _sum(self, client: str, upload: Upload, weights: Weights) -> None:
        self.sum_model(client, upload, weights, self._totals[self.archs[client]])
        self.sum_extras(client, upload, weights)

    def sum_extras(self, client: str, upload: Upload, weights: Weights) -> None:
        """Add the tensors that a client has sent beside its vector to their plain means."""
        for name, tensor in upload.extras.items():
            total = self._extras[self.archs[client], name]
            self.add_weighted(total, 1 / len(weights.clients), tensor.to(total.device).flatten())

    def sum_model(self, client: str, upload: Upload, weights: Weights, total: Tensor) -> None:
        """Add a client's model to ``total``, the sums of its architecture."""
        self.sum_vector(client, upload.vector.to(total.device), weights, total)

    def sum_vector(self, client: str, x: Tensor, weights: Weights, total: Tensor) -> None:
        """Add the weighted shared vector ``x`` [num_shared] of a client to ``total``, which is as long."""
        for span, weight in self._stretches(client, weights):
            self.add_weighted(total[span], weight, x[span])

    def _stretches(self, client: str, weights: Weights) -> list[tuple[slice, float]]:
        """Return (span, weight): one stretch if all of the client's upload has the same weight."""
        statistics = self.statistics[self.archs[client]]
        own = statistics.weight(client, weights.clients, self.seed, self.round)
        of_parameters = [weights.clients[client]] if weights.parameters is None else weights.parameters[client]
        if len(of_parameters) > 1:
            spans = [entry.span for entry in statistics.parameters]
        elif own == of_parameters[0]:
            return [(slice(None), own)]
        else:
            spans = [slice(statistics.span.start)]
        return [*zip(spans, of_parameters, strict=True), (statistics.span, own)]

    def add_weighted(self, total: Tensor, weight: float, x: Tensor) -> None:
        """Add ``weight * x`` to ``total``, exactly or in float32."""
        if self.is_exact:
            accumulate(total, weight, x)
        else:
            total.add_(x, alpha=weight)

    def _mean(self, arch: str) -> Tensor:
        total = self._over_ranks(self._totals[arch])
        if self.is_exact:
            total.div_(GRID)
        return self.statistics[arch].decode(self.divide(arch, total)).to(torch.float32)

    def divide(self, arch: str, total: Tensor) -> Tensor:  # noqa: ARG002 - weights sum to 1
        """Turn an architecture's sums into the weighted mean [num_shared]."""
        return total
