"""Server optimizers: FedAvgM (Hsu et al., 2019); FedAdagrad, FedYogi and FedAdam (Reddi et al., ICLR 2021)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import ParamsT


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
        if lr < 0:  # the messages of torch's optimizers, which fedsim's settings parse
            raise ValueError(f"Invalid learning rate: {lr}")
        for index, beta in enumerate(betas):
            if not 0 <= beta < 1:
                raise ValueError(f"Invalid beta parameter at index {index}: {beta}")
        if tau <= 0:
            raise ValueError(f"Invalid tau value: {tau}")
        super().__init__(params, {"lr": lr, "betas": betas, "tau": tau})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override] # torch overloads it
        """Take one server step (the overloads of torch's annotation do not matter here)."""
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            (beta1, beta2), tau = group["betas"], group["tau"]
            for x in (x for x in group["params"] if x.grad is not None):
                state = self.state[x]
                if not state:
                    state["m"], state["v"] = torch.zeros_like(x), torch.full_like(x, tau**2)
                state["m"].mul_(beta1).add_(x.grad, alpha=1 - beta1)  # m_t
                self._second_moment(state["v"], x.grad.square(), beta2)  # v_t
                # x_{t+1} = x_t + eta m_t / (sqrt(v_t) + tau)
                x.addcdiv_(state["m"], state["v"].sqrt().add_(tau), value=-group["lr"])
        return loss

    def _second_moment(self, v: Tensor, squared: Tensor, beta2: float) -> None:
        raise NotImplementedError


class FedAvgM(SGD):
    """``v_t = beta v_{t-1} + Delta_t``, ``x_{t+1} = x_t + eta v_t`` (Hsu et al., arXiv:1909.06335, Section 4.3).

    It is torch's SGD, whose own rate of 0.001 would hardly move a server.

    Args:
        params: the global vectors.
        lr: $eta$, server learning rate.
        momentum: $beta$.
    """

    def __init__(self, params: ParamsT, lr: float = 1.0, momentum: float = 0.9) -> None:
        super().__init__(params, lr=lr, momentum=momentum)


class FedAdagrad(_AdaptiveServer):
    """``v_t = v_{t-1} + Delta_t^2``, without momentum: $beta_1$ is 0 in the paper."""

    def __init__(
        self, params: ParamsT, lr: float = 0.01, betas: tuple[float, float] = (0.0, 0.99), tau: float = 1e-3
    ) -> None:
        super().__init__(params, lr, betas, tau)

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
