"""The rank's model where the network is a user's module: clients are loaded into it one after another."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import NamedTuple

import torch
from lightning import LightningModule
from torch import Tensor, nn
from torchmetrics import Metric

from fedsim.core.errors import ConfigError
from fedsim.core.flat import aligned
from fedsim.models.groups import Group
from fedsim.models.reid import Features
from fedsim.training.flat_model import FlatModel, Head, Output
from fedsim.training.optimizer import LocalOptimizer
from fedsim.training.own_module.blueprint import Blueprint, tensors_of
from fedsim.training.own_module.module_optimizer import ModuleOptimizer
from fedsim.training.own_module.network import PART, ModuleNetwork
from fedsim.training.own_module.rules import named
from fedsim.training.own_module.stand_in import Logged, StandInTrainer
from fedsim.training.settings import LocalTraining

KEPT = 64
"""modules of different numbers of classes that stay in memory"""


class ModuleOutput(Output):
    """The images of which a module is to return the loss: it has no other output that a method could use."""

    model: ModuleModel
    images: Tensor
    precision: str

    def __new__(cls, model: ModuleModel, images: Tensor, precision: str) -> ModuleOutput:
        """Keep the images until ``Client.supervised_loss`` asks for the loss."""
        nothing = images.new_empty(0)
        output = super().__new__(cls, Features(nothing, nothing), nothing, nothing)
        output.model, output.images, output.precision = model, images, precision
        return output


class Seat(NamedTuple):
    """A module for a number of classes, whose tensors are in the flat buffer."""

    module: LightningModule
    start: Tensor
    """its tensors that depend on the number of classes, as they were built; on the CPU"""
    trainable: frozenset[str]
    """names of the parameters that require gradients at first"""


class ModuleModel(FlatModel):
    """A rank's model of a user's module.

    The buffer holds [shared | private | tensors whose size depends on the number of classes]. There is a module for
    each number of classes. In each session the module is a fresh copy of that one, whose tensors are those of the
    buffer: nothing else, such as the state of a metric or a counter, passes from one client to another.
    """

    network: ModuleNetwork

    def __init__(
        self,
        arch: str,
        blueprint: Blueprint,
        network: ModuleNetwork,
        shared: frozenset[str],
        groups: dict[str, Group],
        max_classes: int,
    ) -> None:
        self.blueprint = blueprint
        self._seats: dict[int, Seat] = {}
        self._seated: Seat | None = None
        self._session_optimizer: ModuleOptimizer | None = None
        self._trainer: StandInTrainer | None = None
        self._max_seat = self._fit(network.module, max_classes)
        outside = [f"{PART}.{name}" for name in blueprint.sizes]
        outside += [name for name in dict(network.named_buffers()) if name not in network.state_dict()]
        groups = {name: group for name, group in groups.items() if name not in outside}
        super().__init__(arch, network, shared, groups, max_classes, frozenset(outside))
        self.has_own_heads = bool(blueprint.sizes)

    # -- seats ---------------------------------------------------------------------------------------------------------

    def seat(self, num_classes: int) -> None:
        """Let the module be that of a client's number of classes; its values are those in the buffer."""
        self.num_classes = num_classes
        seat = self._seat_for(num_classes)
        if seat is self._seated:  # perhaps with the copy of a session
            return
        self._seated = seat
        self.network.module = seat.module
        self.flat.bind()
        for name, span in self._spans(num_classes).items():
            _bind(seat.module, name, self.flat.buffer[self.flat.num_model :][span])

    def _seat_for(self, num_classes: int) -> Seat:
        if num_classes == self._max_classes or not self.blueprint.takes_classes:
            return self._max_seat
        if num_classes not in self._seats:
            if len(self._seats) >= KEPT:
                del self._seats[next(iter(self._seats))]
            module = self.blueprint.build(num_classes).to(self._max_seat.module.device)
            self._seats[num_classes] = self._fit(module, num_classes)
        return self._seats[num_classes]

    def _fit(self, module: LightningModule, num_classes: int) -> Seat:
        """Return the seat of a new module; refuse one whose tensors do not have the expected sizes."""
        tensors = tensors_of(module)
        start = torch.zeros(self.head_room(num_classes))
        for name, span in self._spans(num_classes).items():
            if tensors[name].shape != (expected := self.blueprint.shape_of(name, num_classes)):
                raise ConfigError(
                    f"{named(module)}: {name} has the shape {list(tensors[name].shape)} for {num_classes} classes, not "
                    f"{list(expected)}; let sizes grow evenly with num_classes"
                )
            start[span] = tensors[name].detach().flatten().cpu()
        trainable = frozenset(name for name, p in module.named_parameters() if p.requires_grad)
        return Seat(module, start, trainable)

    def _spans(self, num_classes: int) -> dict[str, slice]:
        """Return the places, after the model's, of the tensors that depend on the number of classes."""
        spans, begin = {}, 0
        for name in self.blueprint.sizes:
            size = self.blueprint.shape_of(name, num_classes).numel()
            spans[name] = slice(begin, begin + size)
            begin += aligned(size)
        return spans

    def head_room(self, num_classes: int) -> int:
        """Elements that a client's own tensors take."""
        sizes = (self.blueprint.shape_of(name, num_classes).numel() for name in self.blueprint.sizes)
        return sum(map(aligned, sizes))

    def initial_state(self, num_classes: int, generator: torch.Generator) -> Tensor:  # noqa: ARG002 - the base's
        """Return :attr:`private` for a client that has not trained yet; clients with as many classes start alike."""
        return torch.cat([self.initial_private.cpu(), self._seat_for(num_classes).start])

    def head_of(self, state: Tensor, num_classes: int) -> Head:
        """Refuse: a module's classifier is its own affair."""
        raise NotImplementedError("a user's module has no identity head that fedsim knows")

    # -- a session -----------------------------------------------------------------------------------------------------

    def enter(self, trainer: StandInTrainer, logged: Logged) -> LightningModule:
        """Begin a session: return a fresh copy of the seated module, on the tensors of the buffer."""
        assert self._seated is not None
        pristine = self._seated.module
        in_buffer = tensors_of(pristine)
        for name, parameter in pristine.named_parameters():
            parameter.requires_grad_(name in self._seated.trainable)
        try:
            module = copy.deepcopy(pristine, {id(tensor): tensor for tensor in in_buffer.values()})
        except (TypeError, RuntimeError) as error:
            raise ConfigError(
                f"{named(pristine)} cannot be copied for each session ({error}); leave out what has no copy"
            ) from error
        attach(module, trainer, logged)
        self.network.module, self._trainer, self._session_optimizer = module, trainer, None
        return module

    def settle(self) -> None:
        """Write tensors into the buffer that the module has replaced by new ones, instead of changing them in place."""
        assert self._seated is not None
        old, new = tensors_of(self._seated.module), tensors_of(self.network.module)
        for name, tensor in old.items():
            if name not in new or new[name].shape != tensor.shape:
                raise ConfigError(f"{named(self.network.module)}: {name} was removed, or changed its shape; keep it")
            if new[name].data_ptr() != tensor.data_ptr():
                tensor.data.copy_(new[name].detach())

    def leave(self) -> None:
        """End a session: its copies are gone."""
        for model in (self, *self._replicas.values()):
            assert isinstance(model, ModuleModel)
            if model._seated is not None:
                model.network.module = model._seated.module
            model._session_optimizer, model._trainer = None, None

    def optimizer(self, settings: LocalTraining) -> LocalOptimizer:
        """Return the optimizer of this session."""
        if self._session_optimizer is None:
            assert self._trainer is not None, "models that train have been entered"
            self._session_optimizer = ModuleOptimizer(settings, self.flat, self.network.module, self._trainer)
        return self._session_optimizer

    def forward(self, images: Tensor, precision: str) -> ModuleOutput:
        """Return the images [B, 3, H, W] for ``Client.supervised_loss``: a module's only output is its loss."""
        if self.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        return ModuleOutput(self, images, precision)

    def load_global(self, vector: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """Load the global model [num_shared], and private tensors that the server has, by name."""
        self.seat(self._max_classes)
        super().load_global(vector, tensors)

    def _twin(self) -> ModuleModel:
        module = self.blueprint.build(self._max_classes).to(self.device)
        network = ModuleNetwork(module, self.network.num_features)
        return ModuleModel(self.arch, self.blueprint, network, self._shared, self.groups, self._max_classes)


def attach(module: LightningModule, trainer: StandInTrainer, logged: Logged) -> None:
    """Give a copy of a module what stands for a Trainer's parts: trainer, log, optimizers, clipping of gradients."""
    for part in module.modules():
        if isinstance(part, Metric):  # it would gather from all ranks, which train other clients
            part.distributed_available_fn = _is_alone
    module.trainer = trainer  # type: ignore[assignment] # it has the parts that a client has
    module.log = logged.of(module)  # type: ignore[method-assign] # the instance's own: Lightning's asks a loop
    module.clip_gradients = _clip_gradients  # type: ignore[method-assign] # of this module alone
    module.optimizers = lambda *_, **__: trainer.optimizers[0]  # type: ignore[assignment, method-assign]


def _is_alone() -> bool:
    """Return False: metrics must not gather from all ranks."""
    return False


def _clip_gradients(
    optimizer: torch.optim.Optimizer,
    gradient_clip_val: float | None = None,
    gradient_clip_algorithm: str | None = None,
) -> None:
    """Clip the gradients of an optimizer's parameters, as ``LightningModule.clip_gradients`` does."""
    if gradient_clip_val is None:
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if gradient_clip_algorithm == "value":
        nn.utils.clip_grad_value_(parameters, gradient_clip_val)
    else:
        nn.utils.clip_grad_norm_(parameters, gradient_clip_val)


def _bind(module: nn.Module, name: str, values: Tensor) -> None:
    """Make a tensor of a module a view of ``values``, which it is of the size of."""
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    old: Tensor = getattr(owner, leaf)
    view = values.view(old.shape)
    if isinstance(old, nn.Parameter):
        old.data = view
    else:
        owner.register_buffer(leaf, view)
