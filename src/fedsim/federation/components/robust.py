"""Robust aggregation: rules that replace the weighted mean, usable with every method whose mean is plain.

A single client can move a mean arbitrarily far by large numbers. These rules bound the effect of a minority of bad
uploads. They need single uploads; for the cost, see :func:`~fedsim.federation.aggregation.gathered.gather`. All clients
count equally: aggregation weights are not used. Running statistics are treated like parameters.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedsim.core.arguments import KeepsArguments
from fedsim.core.checks import at_least, within
from fedsim.core.errors import ConfigError
from fedsim.core.seeding import numpy_generator
from fedsim.core.transfer import send
from fedsim.federation.aggregation.gathered import check_statistics_of_uploads, squared_distances
from fedsim.federation.aggregation.masked import clients_prune
from fedsim.federation.components.privacy import DifferentialPrivacy, Privacy
from fedsim.functional.robust import (
    bulyan_choice,
    centred_clipping_weights,
    coordinate_median,
    geometric_median_weights,
    krum_scores,
    mean_around_median,
    nearest_groups,
    trimmed_mean,
    trust_scores,
    trust_weights,
)
from fedsim.methods.base import Method
from fedsim.training.messages import Report
from fedsim.training.server import Server
from fedsim.training.statistics import StatisticsPolicy
from fedsim.training.uploads import Uploads

_FIELD = "model.aggregation"


class Aggregation(KeepsArguments, ABC, option="model.aggregation"):
    """Computes one vector of the uploads of an architecture, the same on every rank."""

    trains_on_server = False
    """whether it needs ``server.trained``: the server then trains on the labelled images of ``data.public``"""

    def check(self, method: Method, server: Server, bn_stats: StatisticsPolicy, privacy: Privacy) -> None:
        """Raise ConfigError if method, statistics or privacy need more than a plain mean of uploads."""
        name = type(method).__name__
        if isinstance(privacy, DifferentialPrivacy):
            raise ConfigError(f"{_FIELD}: differential privacy covers only noise on a mean; leave one of them out")
        check_statistics_of_uploads(bn_stats, f"{_FIELD}: {type(self).__name__}")
        if method.measures:
            raise ConfigError(
                f"{_FIELD}: {name}, as it is configured, weighs clients, but robust rules do not; choose another method"
            )
        if clients_prune(method) or "uploads" in method.requires:
            raise ConfigError(f"{_FIELD}: {name} has its own aggregation; leave model.aggregation out")
        rounds = range(max(method.server_every, 1))  # some methods upload further tensors only in some rounds
        payloads = [method.payload(server, arch, round_) for arch in server.models for round_ in rounds]
        if any(payload.up or payload.tables for payload in payloads):
            raise ConfigError(
                f"{_FIELD}: {name} also uploads tensors that robust rules do not protect; leave model.aggregation out"
            )
        if self.trains_on_server:
            _check_training(method, server)
        for arch, number in server.num_clients.items():
            if number:
                self.check_number(number, arch)

    def check_number(self, clients: int, arch: str) -> None:
        """Raise ConfigError if a round with that many ``clients`` of an architecture has too few for the rule.

        It is called with all clients before the run begins, and with those of a round in each round.
        """

    @abstractmethod
    def aggregate(self, server: Server, arch: str, uploads: Uploads, reports: Mapping[str, Report]) -> Tensor:
        """Return the vector [num_shared], float32, that replaces the mean of an architecture.

        ``server`` has the global models from the start of the round; ``reports`` are of its clients. ``uploads`` are of
        the same clients, or means of several of them (:class:`Bucketing`, :class:`NearestNeighbourMixing`).

        Raises:
            ConfigError: if there are too few clients for the rule.
        """


class Median(Aggregation):
    """The median of each coordinate (Yin et al., ICML 2018, Definition 1); of an even number, the middle two's mean."""

    def aggregate(self, server: Server, arch: str, uploads: Uploads, reports: Mapping[str, Report]) -> Tensor:  # noqa: ARG002 - a hook's
        """Return the median."""
        return uploads.combine(coordinate_median)


class TrimmedMean(Aggregation):
    """The mean of each coordinate without its largest and smallest values (Yin et al., ICML 2018, Definition 2).

    Args:
        trim: beta in [0, 0.5), share of the clients that is left out at each end, rounded up. It should be at least the
            share of bad clients.
    """

    def __init__(self, trim: float = 0.2) -> None:
        within(_FIELD, "[0, 0.5)", trim=trim)
        self.trim = trim

    def aggregate(self, server: Server, arch: str, uploads: Uploads, reports: Mapping[str, Report]) -> Tensor:  # noqa: ARG002 - a hook's
        """Return the trimmed mean."""
        self.check_number(len(uploads.clients), arch)
        cut = self._cut(len(uploads.clients))
        return uploads.combine(lambda chunk: trimmed_mean(chunk, cut))

    def check_number(self, clients: int, arch: str) -> None:
        """Refuse a share that leaves no client."""
        if 2 * self._cut(clients) >= clients:
            raise ConfigError(f"{_FIELD}.trim: {self.trim} of {clients} clients of {arch} leaves no client; lower it")

    def _cut(self, clients: int) -> int:
        return math.ceil(self.trim * clients - 1e-9)  # 0.28 * 25 is 7.000000000000001


class Krum(Aggregation):
    """The uploads with the closest neighbours (Blanchard et al., NeurIPS 2017); several are averaged (Multi-Krum).

    The score of an upload is the sum of squared distances to its K - f - 2 nearest others, over parameters and running
    statistics. Ties go to the client that comes first.

    Args:
        bad: f, bad clients that may be among those of a round; there must be at least 2f + 3, as in their proof.
        keep: m, uploads with the smallest scores that are averaged, at most K - f; 1 is Krum.
    """

    def __init__(self, bad: int = 1, keep: int = 1) -> None:
        at_least(_FIELD, 0, bad=bad)
        at_least(_FIELD, 1, keep=keep)
        self.bad, self.keep = bad, keep

    def check_number(self, clients: int, arch: str) -> None:
        """Refuse fewer than 2f + 3 clients, and more uploads than there are honest clients."""
        if clients < 2 * self.bad + 3:
            raise ConfigError(
                f"{_FIELD}.bad: {self.bad} of {clients} clients of {arch} are too many: Krum needs {2 * self.bad + 3} "
                "clients; lower it, or select more"
            )
        if self.keep > clients - self.bad:
            raise ConfigError(
                f"{_FIELD}.keep: {self.keep} uploads are more than the {clients - self.bad} honest ones of {clients} "
                f"clients of {arch}; lower it"
            )

    def aggregate(self, server: Server, arch: str, uploads: Uploads, reports: Mapping[str, Report]) -> Tensor:  # noqa: ARG002 - a hook's
        """Return the mean of the chosen uploads."""
        self.check_number(len(uploads.clients), arch)
        scores = krum_scores(squared_distances(uploads), self.bad)
        chosen = scores.argsort(stable=True)[: self.keep].sort().values
        return uploads.combine(lambda chunk: _rows(chunk, chosen).double().mean(0).float())


class NormClipping(Aggregation):
    """The mean of updates that are scaled to an L2 norm of at most a bound (Sun et al., arXiv:1911.07963).

    An update is the change of parameters and running statistics since the start of the round.

    Args:
        bound: M, largest norm of an update.
    """

    def __init__(self, bound: float) -> None:
        within(_FIELD, "(0, inf)", bound=bound)
        self.bound = bound

    def aggregate(self, server: Server, arch: str, uploads: Uploads, reports: Mapping[str, Report]) -> Tensor:  # noqa: ARG002 - a hook's
        """Return the global model plus the mean of the clipped updates."""
        start = server.vector(arch).detach().double()
        squares = uploads.total(lambda chunk, x: (chunk.double() - x).square().sum(1), [len(uploads.clients)], start)
        factors = (self.bound / squares.sqrt()).clamp(max=1.0)[:, None]  # of an update of 0 it is 1
        return uploads.combine(lambda chunk, x: (x + ((chunk.double() - x) * factors).mean(0)).float(), start)


class GeometricMedian(Aggregation):
    """The point with the smallest sum of distances to the uploads (RFA, Pillutla et al., IEEE TSP 2022, Algorithm 2).

    All clients count equally. An iteration needs only the distances between uploads, which are computed once, so there
    may be many, where the paper allows three passes over the clients. Distances are float64, so that an upload of
    values up to X can move the result by about 1e-17 X.

    Args:
        smoothing: nu, smallest distance to an upload by which it is weighted.
        iterations: R, steps of Weiszfeld's algorithm from the mean.
    """

    def __init__(self, smoothing: float = 1e-6, iterations: int = 100) -> None:
        within(_FIELD, "(0, inf)", smoothing=smoothing)
        within(_FIELD, "[1, 100000]", iterations=iterations)
        self.smoothing, self.iterations = smoothing, iterations

    def aggregate(self, server: Server, arch: str, uploads: Uploads, reports: Mapping[str, Report]) -> Tensor:  # noqa: ARG002 - a hook's
        """Return the smoothed geometric median."""
        weights = geometric_median_weights(squared_distances(uploads), self.smoothing, self.iterations)
        column = weights[:, None].to(server.vector(arch).device)
        return uploads.combine(lambda chunk: (chunk.double() * column).sum(0).float())


class Bulyan(Aggregation):
    """The uploads that Krum chooses again and again, and of these the values around the median of each coordinate.

    El Mhamdi et al., ICML 2018: theta = K - 2f uploads are chosen, and of each coordinate the theta - 2f values closest
    to the median are averaged.

    Args:
        bad: f, bad clients that may be among those of a round; there must be at least 4f + 3.
    """

    def __init__(self, bad: int = 1) -> None:
        at_least(_FIELD, 0, bad=bad)
        self.bad = bad

    def check_number(self, clients: int, arch: str) -> None:
        """Refuse fewer than 4f + 3 clients."""
        if clients < 4 * self.bad + 3:
            raise ConfigError(
                f"{_FIELD}.bad: {self.bad} of {clients} clients of {arch} are too many: Bulyan needs "
                f"{4 * self.bad + 3} clients; lower it, or select more"
            )

    def aggregate(self, server: Server, arch: str, uploads: Uploads, reports: Mapping[str, Report]) -> Tensor:  # noqa: ARG002 - a hook's
        """Return the means around the medians of the chosen uploads."""
        self.check_number(len(uploads.clients), arch)
        chosen = torch.tensor(bulyan_choice(squared_distances(uploads), self.bad))
        count = len(uploads.clients) - 4 * self.bad
        return uploads.combine(lambda chunk: mean_around_median(_rows(chunk, chosen), count))


class CentredClipping(Aggregation):
    """A centre from which updates are clipped again and again (Karimireddy et al., ICML 2021).

    An iteration adds the mean of (x_i - v) min(1, tau / |x_i - v|) to v. The first v is the global model from the start
    of the round; in the paper it is the last round's result, which is the same without ``model.server_optimizer``, and
    x_i are momenta. With one iteration it is :class:`NormClipping`. Distances are float64, and computed once; see
    :class:`GeometricMedian`.

    Args:
        bound: tau, largest norm of a difference from the centre.
        iterations: L, steps of the centre; the default is not from the paper.
    """

    def __init__(self, bound: float, iterations: int = 3) -> None:
        within(_FIELD, "(0, inf)", bound=bound)
        within(_FIELD, "[1, 100000]", iterations=iterations)
        self.bound, self.iterations = bound, iterations

    def aggregate(self, server: Server, arch: str, uploads: Uploads, reports: Mapping[str, Report]) -> Tensor:  # noqa: ARG002 - a hook's
        """Return the centre."""
        start = server.vector(arch)
        weights = centred_clipping_weights(squared_distances(uploads, start), self.bound, self.iterations)
        column, of_start = weights[:-1, None].to(start.device), float(weights[-1])
        return uploads.combine(lambda chunk, x: ((chunk.double() * column).sum(0) + of_start * x).float(), start)


class FLTrust(Aggregation):
    """The mean of updates that point where the server's own does (FLTrust: Cao et al., NDSS 2021, Algorithm 2).

    The server trains from the global model on the labelled training images of ``data.public``, as a client does: g_0 is
    its update. An update g_i has the trust TS_i = max(0, cos(g_i, g_0)) and the length of g_0; the mean is weighted by
    trust. If no update has any, the global model stays. The global learning rate alpha is that of
    ``model.server_optimizer``.

    The paper has no running statistics. Trust is that of parameters alone, as statistics of honest and malicious
    clients move alike. Changes of statistics have the same weights, and are scaled down to the norm of the server's,
    but never up, where a variance could become negative.
    """

    trains_on_server = True

    def aggregate(self, server: Server, arch: str, uploads: Uploads, reports: Mapping[str, Report]) -> Tensor:  # noqa: ARG002 - a hook's
        """Return the global model plus the trusted mean."""
        start, root = server.vector(arch).detach(), server.trained[arch]
        counts = torch.arange(len(start), device=start.device) < server.models[arch].flat.num_shared_parameters

        def products(chunk: Tensor, x: Tensor, trained: Tensor, counts: Tensor) -> Tensor:
            """Return squared norms, and products with g_0, of parameters and of statistics: [2, 2, K + 1]."""
            updates = torch.cat([chunk, trained[None]]).double() - x
            parts = (updates * counts, updates * ~counts)
            return torch.stack([torch.stack([part.square().sum(1), (part * part[-1]).sum(1)]) for part in parts])

        of_parameters, of_statistics = uploads.total(products, [2, 2, len(uploads.clients) + 1], start, root, counts)
        trust = trust_scores(*of_parameters)
        factors = trust_weights(trust, of_parameters[0])[:, None]
        clipped = trust_weights(trust, of_statistics[0], longest=1.0)[:, None]

        def step(chunk: Tensor, x: Tensor, counts: Tensor) -> Tensor:
            updates = chunk.double() - x
            return (x + torch.where(counts, (updates * factors).sum(0), (updates * clipped).sum(0))).float()

        return uploads.combine(step, start, counts)


class _Mixing(Aggregation):
    """A step before another rule, which gets means of uploads."""

    def __init__(self, rule: Aggregation) -> None:
        self.rule, self.trains_on_server = rule, rule.trains_on_server

    def aggregate(self, server: Server, arch: str, uploads: Uploads, reports: Mapping[str, Report]) -> Tensor:
        self.check_number(len(uploads.clients), arch)
        return self.rule.aggregate(server, arch, uploads.averaged(self._groups(server, arch, uploads)), reports)

    @abstractmethod
    def _groups(self, server: Server, arch: str, uploads: Uploads) -> Sequence[Sequence[int]]:
        """Return the numbers of the uploads in each mean."""


class Bucketing(_Mixing):
    """Another rule for the means of buckets of uploads, which are drawn in each round (Karimireddy et al., ICLR 2022).

    A bad client spoils its bucket: of K clients of which f are bad, the rule meets K / size buckets of which f may be.

    Args:
        rule: the rule for the means of the buckets.
        size: s, uploads in a bucket; the last may have fewer.
    """

    def __init__(self, rule: Aggregation, size: int = 2) -> None:
        super().__init__(rule)
        at_least(_FIELD, 1, size=size)
        self.size = size

    def check_number(self, clients: int, arch: str) -> None:
        """Refuse fewer buckets than the rule needs."""
        self.rule.check_number(-(-clients // self.size), f"{arch} in buckets of {self.size}")

    def _groups(self, server: Server, arch: str, uploads: Uploads) -> Sequence[Sequence[int]]:
        count, generator = len(uploads.clients), numpy_generator(server.seed, server.round, arch, "buckets")
        order = generator.permutation(count).tolist()
        return [order[i : i + self.size] for i in range(0, count, self.size)]


class NearestNeighbourMixing(_Mixing):
    """Another rule for uploads that are averaged with their nearest (NNM: Allouah et al., AISTATS 2023).

    Each upload becomes the mean of the K - f nearest ones, itself included.

    Args:
        rule: the rule for these means.
        bad: f, bad clients that may be among those of a round, fewer than half.
    """

    def __init__(self, rule: Aggregation, bad: int = 1) -> None:
        super().__init__(rule)
        at_least(_FIELD, 0, bad=bad)
        self.bad = bad

    def check_number(self, clients: int, arch: str) -> None:
        """Refuse half of the clients and more, and fewer clients than the rule needs."""
        if 2 * self.bad >= clients:
            raise ConfigError(
                f"{_FIELD}.bad: {self.bad} of {clients} clients of {arch} are too many: NearestNeighbourMixing is for "
                "fewer than half; lower it, or select more"
            )
        self.rule.check_number(clients, arch)

    def _groups(self, server: Server, arch: str, uploads: Uploads) -> Sequence[Sequence[int]]:  # noqa: ARG002 - a hook's
        return nearest_groups(squared_distances(uploads), self.bad)


def _check_training(method: Method, server: Server) -> None:
    """Refuse clients with whose updates one update of the server cannot be compared."""
    if len(server.models) > 1:
        names = ", ".join(server.models)
        raise ConfigError(f"{_FIELD}: the server trains one model, and clients have {names}; give all one backbone")
    if not all(model.flat.num_shared_parameters for model in server.models.values()):
        raise ConfigError(f"{_FIELD}: clients of {type(method).__name__} send no parameters; leave it out")


def _rows(chunk: Tensor, chosen: Tensor) -> Tensor:
    """Return the rows [m, c] of a chunk [K, c] with the numbers [m], which are on the CPU."""
    return chunk.index_select(0, send(chosen, chunk.device))
