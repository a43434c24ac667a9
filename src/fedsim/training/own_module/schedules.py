"""The optimizer and the schedulers that ``configure_optimizers`` returns, in the common forms of Lightning."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from lightning import LightningModule
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from fedsim.core.errors import ConfigError
from fedsim.training.own_module.rules import named

_FORMS = "an optimizer, ([optimizer], [scheduler]), or a dict with optimizer and lr_scheduler"


@dataclass(frozen=True)
class Schedule:
    """A scheduler, and when it steps."""

    scheduler: LRScheduler
    interval: Literal["epoch", "step"] = "epoch"
    """whether it counts local epochs or optimizer steps"""
    frequency: int = 1
    """intervals between two of its steps"""

    def step(self, module: LightningModule, interval: str, done: int) -> None:
        """Step it at the end of an interval, if it counts these; ``done`` is their number so far."""
        if interval == self.interval and done % self.frequency == 0:
            module.lr_scheduler_step(self.scheduler, None)

    def skip(self, module: LightningModule, epochs: int, steps: int) -> None:
        """Step it for the intervals of earlier rounds."""
        with _before_any_step():
            for _ in range((epochs if self.interval == "epoch" else steps) // self.frequency):
                module.lr_scheduler_step(self.scheduler, None)


@contextmanager
def _before_any_step() -> Iterator[None]:
    """Ignore torch's warning that a new optimizer has not stepped before its scheduler."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*before `optimizer.step")
        yield


def configured(module: LightningModule) -> tuple[Optimizer, list[Schedule]]:
    """Return a new optimizer and its schedulers.

    Raises:
        ConfigError: if there are several optimizers, or a form that a client cannot use.
    """
    returned: Any = module.configure_optimizers()
    optimizers, schedulers = _parts(module, returned)
    if len(optimizers) != 1:
        raise ConfigError(
            f"{named(module)}: configure_optimizers returned {len(optimizers)} optimizers, and a client steps one; "
            "give it groups of parameters instead"
        )
    of_module = {id(parameter) for parameter in module.parameters()}
    if any(id(p) not in of_module for group in optimizers[0].param_groups for p in group["params"]):
        raise ConfigError(
            f"{named(module)}: configure_optimizers has tensors that are not parameters of the module; register them"
        )
    return optimizers[0], [_schedule(module, optimizers[0], scheduler) for scheduler in schedulers]


def _parts(module: LightningModule, returned: Any) -> tuple[list[Any], list[Any]]:
    """Return the optimizers and the schedulers in what was returned."""
    match returned:
        case Optimizer():
            return [returned], []
        case {"optimizer": optimizer, **others}:
            return [optimizer], [others["lr_scheduler"]] if others.get("lr_scheduler") is not None else []
        case [[*optimizers], [*schedulers]] if all(isinstance(part, Optimizer) for part in optimizers):
            return optimizers, schedulers
        case [[*optimizers], scheduler] if all(isinstance(part, Optimizer) for part in optimizers):
            return optimizers, [scheduler]
        case [{"optimizer": _}]:
            return _parts(module, returned[0])
        case [*optimizers] if optimizers and all(isinstance(part, Optimizer | dict) for part in optimizers):
            return optimizers, []
    kind = type(returned).__name__
    raise ConfigError(f"{named(module)}: configure_optimizers returned {kind}; return {_FORMS}")


def _schedule(module: LightningModule, optimizer: Optimizer, entry: Any) -> Schedule:
    options = dict(entry) if isinstance(entry, dict) else {"scheduler": entry}
    scheduler, interval = options.get("scheduler"), options.get("interval", "epoch")
    problem = None
    if isinstance(scheduler, ReduceLROnPlateau) or options.get("reduce_on_plateau"):
        problem = "ReduceLROnPlateau follows a validation, which a client does not have; take one that counts epochs"
    elif not isinstance(scheduler, LRScheduler):
        problem = f"{type(scheduler).__name__} is no scheduler of torch.optim.lr_scheduler; take one"
    elif scheduler.optimizer is not optimizer:
        problem = f"{type(scheduler).__name__} is for another optimizer; give it the one that is returned"
    elif interval not in ("epoch", "step"):
        problem = f"interval: {interval} is unknown; set it to epoch or step"
    elif not isinstance(frequency := options.get("frequency", 1), int) or frequency < 1:
        problem = f"frequency: {frequency} is no number of {interval}s; set it to 1 or more"
    else:
        return Schedule(scheduler, interval, frequency)
    raise ConfigError(f"{named(module)}: configure_optimizers: {problem}")
