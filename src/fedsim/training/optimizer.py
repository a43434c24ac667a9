"""The optimizer of local training: it is made once, reset for each client, and may step a few long vectors."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from fedsim.core.errors import ConfigError
from fedsim.core.flat import FlatParameters, aligned
from fedsim.core.work import Work
from fedsim.functional.weighting import sgd_normaliser
from fedsim.training.settings import ELEMENTWISE, LocalTraining

_NUMBERS = ("step", "mu_product")
"""Names of the scalars in an optimizer's state; all other entries have the shape of a parameter."""

_WORTHWHILE = 2
"""Smallest mean number of parameters per segment for flat steps: adding gradients into a flat buffer takes time."""

_SMALL = 2**14
"""Largest mean number of elements per parameter for which flat steps are faster. Larger parameters gain less by the
single call than they lose by adding each gradient to a flat buffer and clearing that."""

_BETTER_FUSED = (Adam, AdamW)
"""Optimizers that are faster fused on GPUs: one kernel replaces many operations on lists of tensors."""

NamedParameters = Sequence[tuple[str, nn.Parameter]]


class LocalOptimizer:
    """The optimizer of a client's model: two optimizers in one.

    The plain one steps tensor by tensor. The flat one steps *segments*: consecutive parameters of the flat buffer that
    have one learning rate; a model has two to four. Gradients are then views of one buffer, too. The flat one is used
    if the optimizer works element by element and every parameter got a gradient in the session's first batch, because
    a parameter without a gradient must not be decayed. Both give the same bits if every parameter gets a gradient in
    every batch; a network that leaves layers out at random needs ``flat_step: false``.

    Flat steps are faster for many small parameters: they save calls, and cost an addition of each gradient to the
    buffer. On GPUs plain steps take fewer launches, by kernels on lists of tensors; there Adam and AdamW are fused.

    ``groups`` are two groups of named parameters: the backbone, and neck with head. They lie in the buffer ``flat``,
    own heads in its reserve.
    """

    def __init__(self, settings: LocalTraining, flat: FlatParameters, groups: Sequence[NamedParameters]) -> None:
        self.settings, self.flat = settings, flat
        self.groups = [[p for _, p in group if p.requires_grad and p.numel()] for group in groups]
        self.parameters = [p for group in self.groups for p in group]
        self._plain = _Resettable(settings, self.groups)
        self._segments = _segments(flat, self.groups)
        self._flat_optimizer: _Resettable | None = None
        joins = len(self.parameters) >= _WORTHWHILE * len(self._segments)
        is_small = sum(p.numel() for p in self.parameters) <= _SMALL * len(self.parameters)
        flat_step = flat.buffer.is_cpu and is_small if settings.flat_step == "auto" else settings.flat_step
        if flat_step and joins and type(self._plain.optimizer) in ELEMENTWISE:
            vectors = [[s.vector for s in self._segments if s.group == group] for group in range(len(self.groups))]
            self._flat_optimizer = _Resettable(settings, vectors)
        self._optimizers = [self._plain, *([self._flat_optimizer] if self._flat_optimizer else [])]
        self._views: list[Tensor] | None = None
        self._shapes: list[torch.Size] = []
        self._all_views: list[Tensor] = []
        """of parameters with :attr:`_shapes`; :attr:`_views` are these, or None"""
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
        for optimizer in self._optimizers:
            optimizer.reset(self.settings.rate_factor(round_))
        self.num_steps = 0
        self.num_resets += 1
        self.release()

    def continue_from(self, state: Mapping[str, Tensor]) -> None:
        """Continue from the :meth:`state` of an earlier session: the first step loads it."""
        self._earlier_state = state

    def state(self) -> dict[str, Tensor]:
        """Return the state after the session's steps, by torch's names: each [N] in the order of the flat buffer.

        A scalar of a parameter fills the parameter's elements. Flat and plain steps have the same state.
        """
        if self.num_steps == 0:
            return dict(self._earlier_state)
        length = max(self.flat.place_of(p) + aligned(p.numel()) for p in self.parameters)
        state: dict[str, Tensor] = {}
        for moments, _, span in self._stepped_tensors():
            for name, value in moments.items():
                if isinstance(value, Tensor):
                    vector = state.setdefault(name, self.flat.buffer.new_zeros(length))
                    vector[span] = value.flatten()
        if self._views is not None:  # flat steps have a state of the padding between parameters, too
            gaps = torch.ones(length, dtype=torch.bool, device=self.flat.buffer.device)
            for parameter in self.parameters:
                gaps[self.flat.place_of(parameter) :][: parameter.numel()] = False
            for vector in state.values():
                vector.masked_fill_(gaps, 0)
        return state

    def _stepped_tensors(self) -> Iterator[tuple[dict[str, Any], nn.Parameter, slice]]:
        """Yield for each tensor that is stepped: its moments, the tensor, and its elements of the buffer."""
        if self._views is None:
            for parameter in self.parameters:
                offset = self.flat.place_of(parameter)
                yield self._plain.optimizer.state[parameter], parameter, slice(offset, offset + parameter.numel())
        elif self._flat_optimizer is not None:
            for segment in self._segments:
                yield self._flat_optimizer.optimizer.state[segment.vector], segment.vector, slice(*segment.span())

    def _load_earlier_state(self) -> None:
        """Load the earlier state into the session's optimizer, except for parameters that were never stepped."""
        options = self.configured.param_groups[0]
        on_device = options.get("fused") or options.get("capturable")  # otherwise torch keeps numbers on the CPU
        stepped = [
            (moments, tensor, {name: vector[span] for name, vector in self._earlier_state.items()})
            for moments, tensor, span in self._stepped_tensors()
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
            for optimizer in self._optimizers:
                optimizer.scale(self.settings.rate_factor(self._round, epoch))

    def release(self) -> None:
        """Free the memory of moments and gradients."""
        self._views, self._earlier_state = None, {}
        for optimizer in self._optimizers:
            optimizer.clear()
        self.forget_gradients()

    def forget_gradients(self) -> None:
        """Drop the gradients since the last step: each becomes its view of the flat buffer again, or None."""
        views: Sequence[Tensor | None] = self._views or [None] * len(self.parameters)
        for parameter, view in zip(self.parameters, views, strict=True):
            parameter.grad = view

    @property
    def rates(self) -> list[float]:
        """Learning rates of the backbone, and of neck and head."""
        return [float(group["lr"]) for group in self._plain.groups]

    @property
    def configured(self) -> Optimizer:
        """The torch optimizer of the settings, for its class and options; do not step it."""
        return self._plain.optimizer

    @property
    def is_flat(self) -> bool:
        """Whether this session's steps are flat; the first step decides."""
        return self._views is not None

    def step(self) -> None:
        """Step all parameters, and clear their gradients."""
        if self.num_steps == 0 and self._flat_optimizer is not None:
            gradients = [parameter.grad for parameter in self.parameters]
            if all(gradient is not None and gradient.layout is torch.strided for gradient in gradients):
                self._flatten_gradients()
        if self._earlier_state:
            self._load_earlier_state()
        self.num_steps += 1
        self.work.steps += 1
        if self._views is None:
            self._plain.step()
            self._plain.optimizer.zero_grad()
            return
        assert self._flat_optimizer is not None
        for parameter, view in zip(self.parameters, self._views, strict=True):
            if parameter.grad is None or not parameter.requires_grad:
                raise ConfigError(
                    "model.client.flat_step: a parameter was frozen in the middle of a session; set flat_step to false"
                )
            if parameter.grad is not view:  # a method or a hook has replaced it
                view.copy_(parameter.grad)
                parameter.grad = view
        self._flat_optimizer.step()
        for gradient in self._segment_gradients:
            gradient.zero_()

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

    def _flatten_gradients(self) -> None:
        """Move the first batch's gradients into one buffer; all later gradients are views of it."""
        self.flat.gradients.zero_()
        shapes = [parameter.shape for parameter in self.parameters]
        if shapes != self._shapes:  # the first session, or one of a client with another number of identities
            self._shapes, self._all_views = shapes, self._view_gradients()
        for parameter, view in zip(self.parameters, self._all_views, strict=True):
            assert parameter.grad is not None  # checked by step()
            view.copy_(parameter.grad)
            parameter.grad = view
        self._views = self._all_views

    def _view_gradients(self) -> list[Tensor]:
        """Return each parameter's view of the gradients' buffer; give segments their parts of it and of the weights."""
        gradients, views = self.flat.gradients, []
        for parameter in self.parameters:
            offset = self.flat.place_of(parameter)
            views.append(gradients[offset : offset + parameter.numel()].view(parameter.shape))
        for segment in self._segments:
            span = slice(*segment.span())
            segment.vector.data, segment.vector.grad = self.flat.buffer[span], gradients[span]
        self._segment_gradients = [gradients[slice(*segment.span())] for segment in self._segments]
        return views


def loose_optimizer(settings: LocalTraining, module: nn.Module, lr: float | None) -> LocalOptimizer:
    """Return the configured optimizer for the parameters of a ``module`` that is no part of a model.

    They become views of a flat buffer of their own. ``lr`` is their learning rate before the schedule; None: that of
    the settings.
    """
    flat, parameters = FlatParameters(module, lambda _: False), list(module.named_parameters())
    if lr is None:
        return LocalOptimizer(settings, flat, [parameters, []])
    return LocalOptimizer(replace(settings, head_lr=lr), flat, [[], parameters])  # the group with a rate of its own


class _Segment:
    """Consecutive parameters of the flat buffer that have one learning rate."""

    def __init__(self, group: int, start: int, parameters: list[nn.Parameter]) -> None:
        self.group, self.start, self.parameters = group, start, parameters
        self.vector = nn.Parameter(torch.empty(0, device=parameters[0].device))

    def span(self) -> tuple[int, int]:
        """Return the first element and the end; own heads differ in length from client to client."""
        return self.start, self.start + sum(aligned(p.numel()) for p in self.parameters)


def _segments(flat: FlatParameters, groups: Sequence[Sequence[nn.Parameter]]) -> list[_Segment]:
    places = [(flat.place_of(p), g, p) for g, group in enumerate(groups) for p in group]
    segments: list[_Segment] = []
    for offset, group, parameter in sorted(places, key=lambda place: place[0]):
        last = segments[-1] if segments else None
        if last is not None and last.group == group and last.span()[1] == offset:
            last.parameters.append(parameter)
        else:
            segments.append(_Segment(group, offset, [parameter]))
    return segments


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
