"""The optimizer of a user's module in a session, by its own ``configure_optimizers``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning import LightningModule
from torch import Tensor
from torch.optim import Optimizer

from fedsim.core.errors import ConfigError
from fedsim.core.flat import FlatParameters
from fedsim.core.work import Work
from fedsim.training.optimizer import LocalOptimizer
from fedsim.training.own_module.rules import has_own, named
from fedsim.training.own_module.schedules import configured
from fedsim.training.own_module.stand_in import StandInTrainer
from fedsim.training.settings import LocalTraining


class ModuleOptimizer(LocalOptimizer):
    """The optimizer and the schedulers of a module's ``configure_optimizers``, made anew at each :meth:`reset`.

    Its schedulers count from the run's start, by the epochs and steps of ``trainer``: in round r, from 0, they have
    already stepped for r rounds. The parameters of ``module`` lie in the buffer ``flat``. Call :meth:`reset` first.
    """

    def __init__(  # its base makes torch optimizers of the settings, for flat steps
        self, settings: LocalTraining, flat: FlatParameters, module: LightningModule, trainer: StandInTrainer
    ) -> None:
        self.settings, self.flat = settings, flat
        self._module, self._trainer = module, trainer
        self._views, self._earlier_state = None, {}
        self.num_resets = 0  # the first one makes the optimizer
        self.work = Work()

    def reset(self, round_: int) -> None:
        """Begin a session, or a second training in it: a new optimizer, and schedulers at the session's first epoch."""
        module, trainer = self._module, self._trainer
        trainer.current_epoch, trainer.global_step = trainer.first_epoch, trainer.first_step
        self._all_parameters = [*module.parameters()]
        self.forget_all_gradients()
        self._optimizer, self._schedules = configured(module)
        trainer.optimizers = [self._optimizer]
        trainer.lr_scheduler_configs = self._schedules
        for schedule in self._schedules:
            schedule.skip(module, trainer.first_epoch, trainer.first_step)
        factor = self.settings.rate_factor(round_)
        if factor != 1 and not self._schedules:
            for group in self._optimizer.param_groups:
                group["lr"] *= factor
        self.groups = [
            [p for p in group["params"] if p.requires_grad and p.numel()] for group in self._optimizer.param_groups
        ]
        self.parameters = [parameter for group in self.groups for parameter in group]
        self.num_steps = 0
        self.num_resets += 1

    def continue_from(self, state: Mapping[str, Tensor]) -> None:  # noqa: ARG002 - the base's signature
        """Refuse to go on: a module's optimizer begins anew in each session."""
        raise ConfigError(f"model.client.optimizer_state: {named(self._module)} begins anew; set it to reset")

    def begin_epoch(self, epoch: int) -> None:
        """Do nothing: schedulers step at the ends of epochs."""

    def end_epoch(self) -> None:
        """Step the schedulers that count local epochs."""
        self._trainer.current_epoch += 1
        for schedule in self._schedules:
            schedule.step(self._module, "epoch", self._trainer.current_epoch)

    def release(self) -> None:
        """Free the memory of moments and gradients."""
        self._optimizer.state.clear()
        self.forget_all_gradients()

    def forget_all_gradients(self) -> None:
        """Drop the gradients of all of the module's parameters, also of those that no optimizer steps."""
        for parameter in self._all_parameters:
            parameter.grad = None

    @property
    def rates(self) -> list[float]:
        """Learning rates of the optimizer's groups."""
        return [float(group["lr"]) for group in self._optimizer.param_groups]

    def set_rates(self, rates: Sequence[float]) -> None:
        """Change :attr:`rates` in the middle of a session."""
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    @property
    def configured(self) -> Optimizer:
        """The torch optimizer."""
        return self._optimizer

    def step(self) -> None:
        """Step all parameters, with the module's hooks around it; clear all gradients."""
        module, trainer, optimizer = self._module, self._trainer, self._optimizer
        module.on_before_optimizer_step(optimizer)
        if has_own(module, "configure_gradient_clipping"):
            module.configure_gradient_clipping(optimizer, self.settings.grad_clip, "norm")
        if has_own(module, "optimizer_step"):
            module.optimizer_step(trainer.current_epoch, trainer.global_step, optimizer, _nothing)
        else:
            optimizer.step()
        module.on_before_zero_grad(optimizer)
        self.forget_all_gradients()
        self.num_steps += 1
        self.work.steps += 1
        trainer.global_step += 1
        for schedule in self._schedules:
            schedule.step(module, "step", trainer.global_step)


def _nothing() -> Any:
    """Stand for the closure of Lightning, which computes gradients: they are there already."""
    return None
