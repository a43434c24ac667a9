"""The server: one global vector per architecture, its batch-norm policy, and adaptive server optimizers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from fedsim.core.seeding import derive_seed, torch_generator
from fedsim.data.augmentation import Augmentation, normalise_images
from fedsim.functional.statistics import central_variance, second_moments
from fedsim.method import Report
from fedsim.models.groups import STATISTICS, Group
from fedsim.resident import Resident

__all__ = [
    "BatchNormStatistics",
    "FedAdagrad",
    "FedAdam",
    "FedYogi",
    "Received",
    "Server",
    "StatisticsPolicy",
    "shared_names",
]

StatisticsPolicy = Literal["mean", "first", "pooled", "local", "recalibrate"]


def shared_names(groups: Mapping[str, Group], shared: frozenset[Group], policy: StatisticsPolicy) -> frozenset[str]:
    """Return the names of the tensors that are sent: those of shared groups, without statistics that stay local."""
    kept = shared - STATISTICS if policy == "local" else shared
    return frozenset(name for name, group in groups.items() if group in kept and group is not Group.COUNTER)


@dataclass(frozen=True)
class Received:
    """What came from the clients of one architecture whose updates count in the round."""

    reports: Mapping[str, Report]
    """by client"""
    extras: Mapping[str, Tensor] = field(default_factory=dict)
    """plain means of what they uploaded beside the vector, float32 on the device"""


class Server(nn.Module):
    """The global model: a flat vector per architecture. ``state_dict()`` is exactly that.

    Args:
        residents: architecture -> resident model whose initial weights the server starts from.
        archs: client -> architecture, for all clients.
        augmentation: of training images.
        seed: of the run.
        num_public: how many public images the data have, known before they are decoded.
    """

    def __init__(
        self,
        residents: Mapping[str, Resident],
        archs: Mapping[str, str] | None = None,
        augmentation: Augmentation | None = None,
        seed: int = 0,
        num_public: int = 0,
    ) -> None:
        super().__init__()
        self.residents = dict(residents)
        self.num_clients = Counter((archs or {}).values())
        """architecture -> clients in the federation"""
        self.augmentation = augmentation or Augmentation()
        self.seed = seed
        self.num_public = num_public
        self.round = 0
        """the current round, from 0"""
        self.received: Mapping[str, Received] = {}
        """by architecture: of the last round, without architectures in which nobody returned an update"""
        self.kept: dict[str, dict[str, Tensor]] = {arch: {} for arch in residents}
        """architecture -> what the method remembers between rounds, by name; see :meth:`keep`"""
        self._sent: dict[str, Tensor] = {}
        self.public_images: Tensor | None = None
        """unlabelled images that the server may use, uint8 [n, 3, H, W] in host memory"""
        self.vectors = nn.ParameterDict({a: residents[a].flat.shared.cpu().clone() for a in sorted(residents)})

    def model(self, arch: str) -> Tensor:
        """Return the global vector [num_shared] of an architecture, without gradient; see :meth:`sending`."""
        vector: Tensor = self._sent.get(arch, self.vectors[arch])
        return vector.detach()

    @contextmanager
    def sending(self, arch: str, vector: Tensor) -> Iterator[None]:
        """Let :meth:`model` be ``vector`` while a client visits that received it instead of the global model."""
        self._sent[arch] = vector
        try:
            yield
        finally:
            del self._sent[arch]

    @contextmanager
    def in_round(self, round_: int) -> Iterator[None]:
        """Let a method be asked what it does in another round, from 0."""
        now, self.round = self.round, round_
        try:
            yield
        finally:
            self.round = now

    def keep(self, arch: str, name: str, tensor: Tensor) -> None:
        """Remember a copy of ``tensor`` between rounds and in checkpoints, on the device of the models."""
        self.kept[arch][name] = tensor.detach().to(self.residents[arch].device, copy=True)

    def load_kept(self, kept: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Restore :attr:`kept` from a checkpoint."""
        for arch, tensors in kept.items():
            for name, tensor in tensors.items():
                self.keep(arch, name, tensor)

    def public_batches(self, size: int, augmented: bool) -> Iterator[tuple[Tensor, Tensor]]:
        """Go through the public images once, in the round's random order.

        Whoever asks gets the same batches in the same views: clients and server can talk about them.

        Args:
            size: images per batch, the last one maybe fewer.
            augmented: views as in training, drawn for the round; else the images as they are.

        Yields:
            (index [b] int64 into the public images, normalised images [b, 3, H, W] on the device).
        """
        assert self.public_images is not None
        device = next(iter(self.residents.values())).device
        order = torch.randperm(
            len(self.public_images), generator=torch_generator(self.seed, self.round, "public order")
        )
        stream = torch_generator(self.seed, self.round, "public augment", device=device)
        for index in order.split(size):
            images = self.public_images[index].to(device)
            yield index, self.augmentation(images, stream) if augmented else normalise_images(images)

    def recalibrate(self, batch_size: int) -> None:
        """Replace all running statistics by plain averages over batches of the public images."""
        assert self.public_images is not None
        for arch, resident in self.residents.items():
            resident.flat.shared.copy_(self.model(arch))
            device = resident.flat.buffer.device
            batches = (normalise_images(b.to(device)) for b in self.public_images.split(batch_size) if len(b) > 1)
            torch.optim.swa_utils.update_bn(batches, resident.model)
            self.model(arch).copy_(resident.flat.shared)

    def step(
        self,
        optimizer: Callable[[], Any],
        means: Mapping[str, Tensor],
        exact: Mapping[str, slice],
        sizes: Mapping[str, float] | None = None,
        dead: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Step every vector with the pseudo-gradient ``theta - mean`` (Reddi et al., ICLR 2021).

        Args:
            optimizer: the server optimizer's step.
            means: architecture -> weighted mean of the uploads [num_shared], float32; architectures in which nobody
                returned an update are missing and keep their vector.
            exact: architecture -> the part of the vector that simply becomes the mean: running statistics, which no
                optimizer should touch, or all of it for plain averaging.
            sizes: architecture -> how far the parameters move towards the mean, where it is not 1; statistics always
                become their mean.
            dead: architecture -> the parameters that all clients have pruned, bool [num_shared_parameters], where
                clients prune: they have no mean and stay, whatever the optimizer's momentum says.
        """
        held = {arch: mask.nonzero()[:, 0] for arch, mask in (dead or {}).items()}
        before = {arch: self.model(arch)[index] for arch, index in held.items()}
        means = {arch: self._between(arch, mean, (sizes or {}).get(arch, 1.0)) for arch, mean in means.items()}
        for arch, mean in means.items():
            steps = exact[arch] != slice(None)  # else the optimizer has nothing to do but to count
            gradient = self.model(arch) - mean if steps else None
            if gradient is not None and arch in held:
                gradient[held[arch]] = 0.0
            self.vectors[arch].grad = gradient
        optimizer()
        with torch.no_grad():
            for arch, mean in means.items():
                self.vectors[arch][exact[arch]] = mean[exact[arch]]
            for arch, index in held.items():
                self.model(arch)[index] = before[arch]
        for vector in self.vectors.values():
            vector.grad = None

    def _between(self, arch: str, mean: Tensor, size: float) -> Tensor:
        """Return ``theta + size * (mean - theta)`` of the parameters, in float64, with the mean's statistics."""
        if size == 1.0:
            return mean
        result, parameters = mean.clone(), slice(self.residents[arch].flat.num_shared_parameters)
        theta = self.model(arch)[parameters].double()
        result[parameters] = theta + size * (mean[parameters].double() - theta)
        return result


class BatchNormStatistics:
    """What happens to running means and variances on the server: the setting ``bn_stats``.

    ``mean``: averaged with the aggregation weights, like parameters. ``first``: those of one random participant (what
    FedReIDBench's official code does, silently). ``pooled``: the variance of the pooled data, by the law of total
    variance. ``local``: they never leave the client. ``recalibrate``: re-estimated on public images after averaging.

    Args:
        policy: one of these.
        resident: the architecture's layout.
    """

    def __init__(self, policy: StatisticsPolicy, resident: Resident) -> None:
        self.policy = policy
        flat = resident.flat
        self.span = slice(flat.num_shared_parameters, flat.num_shared)
        """where the shared statistics lie"""
        self.parameters = flat.shared_parameters
        """what lies before them"""
        self.num_shared = flat.num_shared
        """length of the shared vector"""
        entries = {e.name: e for e in flat.shared_entries if e.kind == "buffer"}
        pairs = [
            (e, entries[n.replace("running_mean", "running_var")]) for n, e in entries.items() if "running_mean" in n
        ]
        device = flat.buffer.device
        self.means = _indices((mean.span for mean, _ in pairs), device)
        self.variances = _indices((variance.span for _, variance in pairs), device)

    def encode(self, vector: Tensor) -> Tensor:
        """Return what a client contributes [num_shared]: under ``pooled``, second moments instead of variances."""
        if self.policy == "pooled":
            vector = vector.clone()
            vector[self.variances] = second_moments(vector[self.means], vector[self.variances])
        return vector

    def decode(self, mean: Tensor) -> Tensor:
        """Turn the weighted mean of encoded vectors into statistics, in the precision of ``mean`` (float64)."""
        if self.policy == "pooled":
            mean = mean.clone()
            mean[self.variances] = central_variance(mean[self.means], mean[self.variances])
        return mean

    def weight(self, client: str, weights: Mapping[str, float], seed: int, round_: int) -> float:
        """Return the weight of a client's statistics; under ``first`` 1 for the chosen participant, else 0."""
        if self.policy != "first":
            return weights[client]
        names = list(weights)
        return float(client == names[derive_seed(seed, round_, "first statistics") % len(names)])


def _indices(spans: Iterable[slice], device: torch.device) -> Tensor:
    parts = [torch.arange(span.start, span.stop, device=device) for span in spans]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.long, device=device)


class _AdaptiveServer(Optimizer):
    """Adaptive federated optimization (Reddi et al., ICLR 2021, Algorithm 2). No bias correction, as in the paper.

    The pseudo-gradient is ``-Delta_t``, so the step descends.

    Args:
        params: the global vectors.
        lr: $eta$, server learning rate.
        betas: $beta_1, beta_2$.
        tau: $tau$, degree of adaptivity; also the start of v (v_{-1} = tau^2).
    """

    def __init__(
        self, params: ParamsT, lr: float = 0.01, betas: tuple[float, float] = (0.9, 0.99), tau: float = 1e-3
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "tau": tau})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override] # torch overloads it
        """Take one server step (the overloads of torch's annotation do not matter here)."""
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(parameter, group["lr"], group["betas"], group["tau"])
        return loss

    def _step_one(self, x: Tensor, lr: float, betas: tuple[float, float], tau: float) -> None:
        beta1, beta2 = betas
        state = self.state[x]
        if not state:
            state["m"], state["v"] = torch.zeros_like(x), torch.full_like(x, tau**2)
        assert x.grad is not None
        state["m"].mul_(beta1).add_(x.grad, alpha=1 - beta1)  # m_t
        self._second_moment(state["v"], x.grad.square(), beta2)  # v_t
        x.addcdiv_(state["m"], state["v"].sqrt().add_(tau), value=-lr)  # x_{t+1} = x_t + eta m_t / (sqrt(v_t) + tau)

    def _second_moment(self, v: Tensor, squared: Tensor, beta2: float) -> None:
        raise NotImplementedError


class FedAdagrad(_AdaptiveServer):
    """``v_t = v_{t-1} + Delta_t^2``."""

    def _second_moment(self, v: Tensor, squared: Tensor, beta2: float) -> None:  # noqa: ARG002 - Adagrad has no beta2
        v.add_(squared)


class FedYogi(_AdaptiveServer):
    """``v_t = v_{t-1} - (1 - beta_2) Delta_t^2 sign(v_{t-1} - Delta_t^2)``."""

    def _second_moment(self, v: Tensor, squared: Tensor, beta2: float) -> None:
        v.sub_((1 - beta2) * squared * torch.sign(v - squared))


class FedAdam(_AdaptiveServer):
    """``v_t = beta_2 v_{t-1} + (1 - beta_2) Delta_t^2``."""

    def _second_moment(self, v: Tensor, squared: Tensor, beta2: float) -> None:
        v.mul_(beta2).add_(squared, alpha=1 - beta2)
