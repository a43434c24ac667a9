"""Noise on what clients and server send: a component, usable with every method.

:class:`WhiteNoise` is paper 001's, which guarantees nothing. :class:`DifferentialPrivacy` bounds what one client can
change, adds noise in proportion to that bound, and accounts for the sum over rounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedsim.core.arguments import KeepsArguments
from fedsim.core.checks import within
from fedsim.core.errors import ConfigError
from fedsim.core.extras import load_extra
from fedsim.core.flat import Entry, FlatParameters
from fedsim.core.seeding import numpy_generator
from fedsim.federation.aggregation.masked import clients_prune
from fedsim.federation.components.listener import RoundListener
from fedsim.federation.components.selection import Selection
from fedsim.methods.base import Method, Weights
from fedsim.training.client import Client
from fedsim.training.messages import Download, Report, Upload
from fedsim.training.server import Server


class Privacy(KeepsArguments, RoundListener, option="model.privacy"):
    """Hooks that make a round more private; by default they change nothing."""

    def prepare(self, method: Method, server: Server, selection: Selection) -> None:
        """Check the federation before its first round; raise ConfigError if the guarantee would not hold."""

    def received(self, client: Client, server: Server, download: Download) -> Download:
        """Return the message that ``client`` receives instead of ``download``."""
        return download

    def uploaded(self, client: Client, server: Server, upload: Upload) -> Upload:
        """Return the message that the client sends instead of ``upload``."""
        return upload

    def aggregated(
        self, server: Server, means: Mapping[str, Tensor], weights: Mapping[str, Weights]
    ) -> Mapping[str, Tensor]:
        """Return the vectors towards which the server steps instead of the means, the same on every rank.

        Args:
            server: with the global models from the start of the round.
            means: architecture -> weighted mean of the uploads, float32 [num_shared]; an architecture without any
                update is missing.
            weights: architecture -> weights of its clients in the mean.
        """
        return means


class WhiteNoise(Privacy):
    """Gaussian noise of one size on the model (paper 001, Eqs. 14 and 15). This is NOT differential privacy.

    Nothing is clipped, so a client's influence has no bound; there is no accounting and no guarantee. Parameters and
    running means get noise. Running variances do not: noise could make them negative.

    Args:
        beta: absolute standard deviation; according to the paper, accuracy with 0.0005 is close to local training.
        in_aggregation: Eq. (14): add noise to the mean, once per round. This alone is the paper's "Single".
        in_download: Eq. (15): add noise to the download, new for each client and round. Both are the paper's "Double".
    """

    def __init__(self, beta: float, in_aggregation: bool = True, in_download: bool = False) -> None:
        if not 0 <= beta < math.inf:
            raise ConfigError(f"model.privacy.beta: {beta} is not a finite number from 0")
        if not (in_aggregation or in_download):
            raise ConfigError(
                "model.privacy: in_aggregation and in_download are both false, so no noise is added; "
                "set one of them, or privacy to null"
            )
        self.beta, self.in_aggregation, self.in_download = beta, in_aggregation, in_download

    def received(self, client: Client, server: Server, download: Download) -> Download:
        """Eq. (15): the client receives the global model with noise, also for all steps of its method."""
        if not self.in_download or self.beta == 0:
            return download
        noise = self._noise(client.model.flat, server, client.client_name, "noise in download")
        return replace(download, vector=download.vector + noise)

    def aggregated(
        self, server: Server, means: Mapping[str, Tensor], weights: Mapping[str, Weights]
    ) -> Mapping[str, Tensor]:
        """Eq. (14)."""
        if not self.in_aggregation or self.beta == 0:
            return means
        flat_of = {arch: server.models[arch].flat for arch in means}
        return {a: mean + self._noise(flat_of[a], server, a, "noise in aggregation") for a, mean in means.items()}

    def _noise(self, flat: FlatParameters, server: Server, owner: str, purpose: str) -> Tensor:
        noised = [e for e in flat.shared_entries if e.kind == "parameter" or "running_mean" in e.name]
        return _noise(flat, noised, self.beta, numpy_generator(server.seed, server.round, owner, purpose))


class DifferentialPrivacy(Privacy):
    """Client-level (epsilon, delta)-differential privacy by clipping and Gaussian noise (DP-FedAvg).

    Clients send the change of their shared parameters since the download, scaled to an L2 norm of at most ``clip``.
    All contributions of a client to the run are protected, not single images.

    ``central`` (McMahan et al., ICLR 2018): the server adds noise of standard deviation ``noise_multiplier * clip`` to
    the sum of the changes and divides by the expected number of selected clients, whichever answer. It protects against
    all readers of the global models; the server reads the changes and is trusted. Two federations are neighbours if
    one lacks the contributions of one client.

    ``local``: every client adds this noise to its own change, and the server averages over the answers. It protects
    against the server, too. Neighbours are any two data sets of one client: clipped changes differ by up to
    ``2 * clip``.

    Args:
        clip: $C$, largest L2 norm of a client's change.
        noise_multiplier: $z$, standard deviation of the noise over ``clip``.
        delta: $delta$, probability that the bound fails; choose it well below 1 / number of clients.
        mode: whether the server (``central``) or the clients (``local``) add the noise.
    """

    def __init__(
        self, clip: float, noise_multiplier: float, delta: float = 1e-5, mode: Literal["central", "local"] = "central"
    ) -> None:
        for name, value in (("clip", clip), ("noise_multiplier", noise_multiplier)):
            if not 0 < value < math.inf:
                raise ConfigError(f"model.privacy.{name}: {value} is not a positive number")
        within("model.privacy", "(0, 1)", delta=delta)
        self.clip, self.noise_multiplier, self.delta, self.mode = clip, noise_multiplier, delta, mode
        self._share = 1.0
        self._probability: float | None = None

    def prepare(self, method: Method, server: Server, selection: Selection) -> None:
        """Refuse settings under which clients send more than the noise covers.

        Raises:
            ConfigError: if clients send more than parameters, weights or the selection depend on their data, or the
                accountant is not installed.
        """
        _import_accounting()
        _check_what_is_sent(method, server)
        share = selection.expected_share(sum(server.num_clients.values()))
        if share is None:
            raise ConfigError(
                f"model.selection: {type(selection).__name__} does not declare a number of clients that is "
                "independent of their data (expected_share); differential privacy "
                "needs AllClients, RandomFraction or PoissonSampling"
            )
        self._share = share
        # the server knows the senders: in mode local, sampling adds no privacy
        self._probability = selection.probability if self.mode == "central" else None

    def uploaded(self, client: Client, server: Server, upload: Upload) -> Upload:
        """Return the clipped change of the shared parameters; in mode ``local`` with noise."""
        if beside := (*upload.extras, *upload.rows):
            raise ConfigError(_uncovered(f"round {server.round + 1}: the method", ", ".join(beside)))
        change = clip_norm(upload.vector - server.vector(client.model.arch), self.clip)
        if self.mode == "local":
            change += self._noise(client.model.flat, server, client.client_name)
        return Upload(change)

    def aggregated(
        self, server: Server, means: Mapping[str, Tensor], weights: Mapping[str, Weights]
    ) -> Mapping[str, Tensor]:
        """Return the global models plus the mean changes; in mode ``central`` with noise, even without answers."""
        if self.mode == "local":
            return {arch: server.vector(arch) + change for arch, change in means.items()}
        result = {}
        for arch, model in server.models.items():
            expected = self._share * server.num_clients[arch]
            total = self._noise(model.flat, server, arch)
            if arch in means:
                total += len(weights[arch].clients) * means[arch]
            result[arch] = server.vector(arch) + total / expected
        return result

    def metrics(self, round_: int, clients: Sequence[str] = ()) -> dict[str, float]:
        """Return the epsilon that the rounds up to ``round_``, from 0, have spent."""
        # two clipped changes are up to 2 * clip apart, so the noise of mode local counts half
        multiplier = self.noise_multiplier / (2 if self.mode == "local" else 1)
        return {"privacy/epsilon": gaussian_epsilon(multiplier, round_ + 1, self.delta, self._probability)}

    def _noise(self, flat: FlatParameters, server: Server, owner: str) -> Tensor:
        generator = numpy_generator(server.seed, server.round, owner, f"{self.mode} differential privacy")
        return _noise(flat, flat.shared_parameters, self.noise_multiplier * self.clip, generator)


def clip_norm(change: Tensor, bound: float) -> Tensor:
    """Scale ``change`` to an L2 norm of at most ``bound``, if it is longer.

    A value that is not finite stays visible as NaN.

    >>> clip_norm(torch.tensor([3.0, 4.0]), 1.0)
    tensor([0.6000, 0.8000])
    >>> clip_norm(torch.tensor([3.0, 4.0]), 10.0)
    tensor([3., 4.])
    """
    norm = float(torch.linalg.vector_norm(change, dtype=torch.float64))
    if norm <= bound:
        return change.clone()
    # the float32 result is rounded by up to 2**-24 of each entry, which must not lead beyond the bound
    return (change.double() * (bound / norm * (1 - 2.0**-23))).float()


def gaussian_epsilon(noise_multiplier: float, rounds: int, delta: float, probability: float | None = None) -> float:
    """Return an upper bound on epsilon after ``rounds`` rounds with Gaussian noise: the smaller one of two.

    One is by Renyi divergences (Mironov, CSF 2017; for Poisson samples Mironov, Talwar and Zhang, arXiv:1908.10530).
    The other is by the distribution of the privacy loss on a grid, rounded up (Doroshenko et al., PETS 2022), and
    smaller but for very much or very little noise. Their cost does not grow with the rounds.

    Args:
        noise_multiplier: standard deviation of the noise over the sensitivity.
        rounds: number of rounds with noise.
        delta: of the guarantee.
        probability: of each client to take part in a round, independently of everything else; None: clients always
            take part, or are selected in a way without amplification.

    Raises:
        ConfigError: if dp-accounting is not installed.
    """
    accounting, rdp, pld = _import_accounting()
    event = accounting.GaussianDpEvent(noise_multiplier)
    bound = float(rdp.RdpAccountant().compose(event, rounds).get_epsilon(delta))
    if probability is not None:
        event = accounting.PoissonSampledDpEvent(probability, event)
        # a sample never reveals more than all clients; with little noise, integer orders give a looser bound
        bound = min(bound, float(rdp.RdpAccountant(_INTEGER_ORDERS).compose(event, rounds).get_epsilon(delta)))
    if not 0 < bound <= _NO_PRIVACY:
        return bound
    grid = pld.PLDAccountant(value_discretization_interval=max(bound / 2000, _FINEST))
    return min(bound, float(grid.compose(event, rounds).get_epsilon(delta)))


_INTEGER_ORDERS = [*range(2, 65), 80, 96, 128, 192, 256, 512, 1024]
"""Renyi orders for samples: for others, the library computes slowly converging series, which may fail."""
_FINEST = 1e-4
"""least step of the grid: the library's own, whose memory grows with the largest loss over this step"""
_NO_PRIVACY = 1e5
"""an epsilon above which the grid is not tried: the exponential of its step would overflow"""


def _import_accounting() -> tuple[Any, Any, Any]:
    setting = "model.privacy: DifferentialPrivacy"
    main, rdp, pld = (load_extra(f"dp_accounting{part}", setting, "privacy") for part in ("", ".rdp", ".pld"))
    return main, rdp, pld


def _check_what_is_sent(method: Method, server: Server) -> None:
    name = type(method).__name__
    refusals = {
        f"{name}, as it is configured, measures signals on the clients, which differential privacy does not cover; "
        "choose a method or weighting without them": bool(method.measures),
        f"{name} uploads which elements its clients prune, without noise; differential privacy needs a method without "
        "masks of the clients": clients_prune(method),
        f"{name}, as it is configured, needs public images, and differential privacy does not cover the clients' "
        "uploads about them; switch it off": "public_images" in method.requires,
    }
    for refusal, applies in refusals.items():
        if applies:
            raise ConfigError(f"model.method: {refusal}")
    for arch, model in server.models.items():
        payload = method.payload(server, arch, 0)
        if extras := (*payload.up, *payload.tables):
            raise ConfigError(_uncovered(f"model.method: {name}", ", ".join(extras)))
        if any(entry.kind == "buffer" for entry in model.flat.shared_entries):
            raise ConfigError(
                "model.bn_stats: running statistics would be sent without noise, which voids differential privacy; "
                "set bn_stats: local"
            )
    first, second = (method.weights({"a": Report(a, {}), "b": Report(b, {})}) for a, b in ((1, 3), (3, 2)))
    is_uniform = set(first.clients.values()) == set(second.clients.values()) == {0.5}
    if not is_uniform or first.parameters or first.step_size != second.step_size:
        raise ConfigError(
            f"model.method: {name}, as it is configured, weighs clients by their data; differential privacy needs "
            "equal weights: set weighting: uniform, or choose another method"
        )


def _uncovered(sender: str, names: str) -> str:
    return f"{sender} uploads {names} with the model, which differential privacy does not cover; choose another method"


def _noise(flat: FlatParameters, entries: Iterable[Entry], std: float, generator: np.random.Generator) -> Tensor:
    """Sample N(0, std^2) for ``entries``, zeros elsewhere: float32 [num_shared] on the model's device.

    NumPy samples the same numbers on every machine. Those of torch depend on the kind of GPU and the instructions of
    the CPU, so the server's replicas would drift apart.
    """
    noise = torch.zeros(flat.num_shared)
    for entry in entries:
        noise[entry.span] = torch.from_numpy(generator.standard_normal(entry.numel, dtype=np.float32))
    return noise.mul_(std).to(flat.buffer.device)
