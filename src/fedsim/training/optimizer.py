"""The optimizer of local training: it is made once, reset for each client, and may step a few long vectors."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from fedsim.core.flat import FlatParameters, aligned
from fedsim.core.work import Work
from fedsim.functional.weighting import sgd_normaliser
from fedsim.training.settings import ELEMENTWISE, LocalTraining

_NUMBERS = ("step", "mu_product")
"""Names of the scalars in an optimizer's state; all other entries have the shape of a parameter."""

_BETTER_FUSED = (Adam, AdamW)
"""Optimizers that are faster fused on GPUs: one kernel replaces many operations on lists of tensors."""

NamedParameters = Sequence[tuple[str, nn.Parameter]]


class LocalOptimizer:
    """The optimizer of a client's model.

    ``groups`` are two groups of named parameters: the backbone, and neck with head. They lie in the buffer ``flat``,
    own heads in its reserve. On GPUs Adam and AdamW are fused.
    """

    def __init__(self, settings: LocalTraining, flat: FlatParameters, groups: Sequence[NamedParameters]) -> None:
        self.settings, self.flat = settings, flat
        self.groups = [[p for _, p in group if p.requires_grad and p.numel()] for group in groups]
        self.parameters = [p for group in self.groups for p in group]
        self._steps = _Resettable(settings, self.groups)
        self._round = 0
        self._earlier_state: Mapping[str, Tensor] = {}
        self.work = Work()
        """counts its steps; that of its model"""
        self.num_steps = 0
        """steps since the last reset"""
        self.num_resets = 0
        """resets since the optimizer was made"""

    def reset(self, round_: int) -> None:
        """Begin a session: without state and gradients, with the learning rates of round ``round_``."""
        self._round = round_
        self._steps.reset(self.settings.rate_factor(round_))
        self.num_steps = 0
        self.num_resets += 1
        self.release()

    def continue_from(self, state: Mapping[str, Tensor]) -> None:
        """Continue from the :meth:`state` of an earlier session: the first step loads it."""
        self._earlier_state = state

    def state(self) -> dict[str, Tensor]:
        """Return the state after the session's steps, by torch's names: each [N] in the order of the flat buffer.

        A scalar of a parameter fills the parameter's elements.
        """
        if self.num_steps == 0:
            return dict(self._earlier_state)
        length = max(self.flat.place_of(p) + aligned(p.numel()) for p in self.parameters)
        state: dict[str, Tensor] = {}
        for parameter, span in self._places():
            for name, value in self.configured.state[parameter].items():
                if isinstance(value, Tensor):
                    vector = state.setdefault(name, self.flat.buffer.new_zeros(length))
                    vector[span] = value.flatten()
        return state

    def _places(self) -> Iterator[tuple[nn.Parameter, slice]]:
        """Yield each parameter, and its elements of the buffer."""
        for parameter in self.parameters:
            offset = self.flat.place_of(parameter)
            yield parameter, slice(offset, offset + parameter.numel())

    def _load_earlier_state(self) -> None:
        """Load the earlier state into the session's optimizer, except for parameters that were never stepped."""
        options = self.configured.param_groups[0]
        on_device = options.get("fused") or options.get("capturable")  # otherwise torch keeps numbers on the CPU
        stepped = [
            (self.configured.state[p], p, {name: vector[span] for name, vector in self._earlier_state.items()})
            for p, span in self._places()
        ]
        nonzero = [torch.stack([values.any() for values in earlier.values()]).any() for *_, earlier in stepped]
        has_state = torch.stack(nonzero).tolist() if nonzero else []  # the host waits for the device once
        for (moments, tensor, earlier), was_stepped in zip(stepped, has_state, strict=True):
            if not was_stepped:
                continue
            for name, values in earlier.items():
                if name in _NUMBERS:
                    moments[name] = values[0].to(tensor.device if on_device else "cpu", copy=True)
                else:
                    moments[name] = values.view(tensor.shape).clone()
        self._earlier_state = {}

    def begin_epoch(self, epoch: int) -> None:
        """Set the learning rates of a local epoch, if they change within the round."""
        if self.settings.long_round is not None:
            self._steps.scale(self.settings.rate_factor(self._round, epoch))

    def release(self) -> None:
        """Free the memory of moments and gradients."""
        self._earlier_state = {}
        self._steps.clear()
        self.forget_gradients()

    def forget_gradients(self) -> None:
        """Drop the gradients since the last step."""
        for parameter in self.parameters:
            parameter.grad = None

    @property
    def rates(self) -> list[float]:
        """Learning rates of the backbone, and of neck and head."""
        return [float(group["lr"]) for group in self._steps.groups]

    @property
    def configured(self) -> Optimizer:
        """The torch optimizer of the settings, for its class and options; do not step it."""
        return self._steps.optimizer

    def step(self) -> None:
        """Step all parameters, and clear their gradients."""
        if self._earlier_state:
            self._load_earlier_state()
        self.num_steps += 1
        self.work.steps += 1
        self._steps.step()
        self.configured.zero_grad()

    def add_to_gradients(self, vector: Tensor) -> None:
        """Add to the gradients of the parameters that lie in the first ``len(vector)`` elements of the flat buffer.

        ``vector`` [n] has the order of the buffer, for example its shared parameters; values between parameters do not
        matter. Parameters without a gradient, and frozen ones, stay as they are.
        """
        gradients, addends = [], []
        for parameter in self.parameters:
            offset = self.flat.place_of(parameter)
            if parameter.grad is not None and offset < len(vector):
                gradients.append(parameter.grad)
                addends.append(vector[offset : offset + parameter.numel()].view_as(parameter))
        if gradients:
            torch._foreach_add_(gradients, addends)  # of all parameters in few launches, as torch's optimizers do it

    def pull(self, centre: Tensor, strength: float) -> None:
        """Add ``strength * (w - centre)`` to the gradients of the shared parameters w, whose layout ``centre`` has."""
        length = self.flat.num_shared_parameters
        self.add_to_gradients((self.flat.shared[:length] - centre[:length]).mul_(strength))

    def mean_gradient(self, start: Tensor) -> Tensor:
        """Return ``(start - now) / (norm of a * rate)`` [n]: the session's mean gradient, if SGD took the steps.

        Without momentum all steps count equally, and the norm of a is their number. With momentum, earlier gradients
        count more (:attr:`normaliser`), and the mean is a weighted one. ``start`` [n] are the first elements of the
        flat buffer before the first step. Without training, the mean is 0.
        """
        mean = torch.zeros_like(start)
        for group, rate in zip(self.groups, self.rates, strict=True):
            for parameter in group:
                offset = self.flat.place_of(parameter)
                span = slice(offset, offset + parameter.numel())
                if offset < len(start) and rate > 0 and self.num_steps:
                    mean[span] = (start[span] - self.flat.buffer[span]) / (self.normaliser * rate)
        return mean

    @property
    def normaliser(self) -> float:
        """FedNova's norm of a: the summed factors of all gradients in the session's steps (SGD without dampening)."""
        options = self.configured.param_groups[0]
        return sgd_normaliser(self.num_steps, options["momentum"], options["nesterov"])


def loose_optimizer(settings: LocalTraining, module: nn.Module, lr: float | None) -> LocalOptimizer:
    """Return the configured optimizer for the parameters of a ``module`` that is no part of a model.

    They become views of a flat buffer of their own. ``lr`` is their learning rate before the schedule; None: that of
    the settings.
    """
    flat, parameters = FlatParameters(module, lambda _: False), list(module.named_parameters())
    if lr is None:
        return LocalOptimizer(settings, flat, [parameters, []])
    return LocalOptimizer(replace(settings, head_lr=lr), flat, [[], parameters])  # the group with a rate of its own


class _Resettable:
    """A torch optimizer that can return to its initial state."""

    def __init__(self, settings: LocalTraining, groups: Sequence[Sequence[nn.Parameter]]) -> None:
        self._settings, self._parameters = settings, groups
        self._make()
        set_rates = (None, settings.head_lr)
        self._rates = [
            group["lr"] if rate is None else rate for group, rate in zip(self.groups, set_rates, strict=True)
        ]
        self._options = [copy.deepcopy({k: v for k, v in g.items() if k != "params"}) for g in self.groups]
        # other optimizers may keep state elsewhere, and Adagrad begins with a state
        self._can_be_cleared = type(self.optimizer) in ELEMENTWISE and not self.optimizer.state
        self._bare_step = inspect.unwrap(type(self.optimizer).step)

    def _make(self) -> None:
        """Make the optimizer; it steps the groups that have parameters, in the fastest way on their device."""
        self.optimizer: Optimizer = self._settings.optimizer([{"params": list(group)} for group in self._parameters])
        self.groups = self.optimizer.param_groups
        """one for each in the constructor's ``groups``"""
        self.optimizer.param_groups = [group for group in self.groups if group["params"]]
        for group in self.optimizer.param_groups:
            if self._settings.graph and "capturable" in group and all(p.is_cuda for p in group["params"]):
                group["capturable"] = True  # the number of steps is on the device, where graphs can count
            is_open = group.get("foreach", 0) is None and not group.get("fused")  # not set by the user
            if is_open and all(p.is_cpu for p in group["params"]):
                group["foreach"] = False  # torch's choice at each step
            elif is_open and type(self.optimizer) in _BETTER_FUSED and group["fused"] is None:
                group["fused"] = not group["differentiable"] and all(p.is_cuda for p in group["params"])

    def reset(self, factor: float) -> None:
        """Return to the initial state, with ``factor`` on all learning rates."""
        if self._can_be_cleared:
            self.optimizer.state.clear()
        else:
            self._make()
        for group, options in zip(self.groups, self._options, strict=True):
            group.update(options)
        self.scale(factor)

    def scale(self, factor: float) -> None:
        for group, rate in zip(self.groups, self._rates, strict=True):
            group["lr"] = factor * rate

    def step(self) -> None:
        """Take a step; skip the profiling wrapper of torch's own optimizers, which takes as long as a small step."""
        if self._can_be_cleared:
            with torch.no_grad():
                self._bare_step(self.optimizer)
        else:
            self.optimizer.step()

    def clear(self) -> None:
        if self._can_be_cleared:
            self.optimizer.state.clear()
