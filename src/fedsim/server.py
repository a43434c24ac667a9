"""The server: one global vector per architecture, its batch-norm policy, and adaptive server optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from fedsim.core.seeding import derive_seed
from fedsim.data.augmentation import normalise_images
from fedsim.functional.statistics import central_variance, second_moments
from fedsim.models.groups import STATISTICS, Group
from fedsim.resident import Resident

__all__ = ["BatchNormStatistics", "FedAdagrad", "FedAdam", "FedYogi", "Server", "StatisticsPolicy", "shared_names"]

StatisticsPolicy = Literal["mean", "first", "pooled", "local", "recalibrate"]


def shared_names(groups: Mapping[str, Group], shared: frozenset[Group], policy: StatisticsPolicy) -> frozenset[str]:
    """Return the names of the tensors that are sent: those of shared groups, without statistics that stay local."""
    kept = shared - STATISTICS if policy == "local" else shared
    return frozenset(name for name, group in groups.items() if group in kept and group is not Group.COUNTER)


class Server(nn.Module):
    """The global model: a flat vector per architecture. ``state_dict()`` is exactly that.

    Args:
        residents: architecture -> resident model whose initial weights the server starts from.
    """

    def __init__(self, residents: Mapping[str, Resident]) -> None:
        super().__init__()
        self.residents = dict(residents)
        self.public_images: Tensor | None = None
        """unlabelled images that the server may use, uint8 [n, 3, H, W] in host memory"""
        self.vectors = nn.ParameterDict({a: residents[a].flat.shared.cpu().clone() for a in sorted(residents)})

    def model(self, arch: str) -> Tensor:
        """Return the global vector [num_shared] of an architecture, without gradient."""
        vector: Tensor = self.vectors[arch]
        return vector.detach()

    def recalibrate(self, batch_size: int) -> None:
        """Replace all running statistics by plain averages over batches of the public images."""
        assert self.public_images is not None
        for arch, resident in self.residents.items():
            resident.flat.shared.copy_(self.model(arch))
            device = resident.flat.buffer.device
            batches = (normalise_images(b.to(device)) for b in self.public_images.split(batch_size) if len(b) > 1)
            torch.optim.swa_utils.update_bn(batches, resident.model)
            self.model(arch).copy_(resident.flat.shared)

    def step(self, optimizer: Callable[[], Any], means: Mapping[str, Tensor], exact: Mapping[str, slice]) -> None:
        """Step every vector with the pseudo-gradient ``theta - mean`` (Reddi et al., ICLR 2021).

        Args:
            optimizer: the server optimizer's step.
            means: architecture -> weighted mean of the uploads [num_shared], float32; architectures in which nobody
                returned an update are missing and keep their vector.
            exact: architecture -> the part of the vector that simply becomes the mean: running statistics, which no
                optimizer should touch, or all of it for plain averaging.
        """
        for arch, mean in means.items():
            steps = exact[arch] != slice(None)  # else the optimizer has nothing to do but to count
            self.vectors[arch].grad = self.model(arch) - mean if steps else None
        optimizer()
        with torch.no_grad():
            for arch, mean in means.items():
                self.vectors[arch][exact[arch]] = mean[exact[arch]]
        for vector in self.vectors.values():
            vector.grad = None


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
