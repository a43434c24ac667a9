"""The rank's model where the network is a user's module: clients are loaded into it one after another."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import torch
from lightning import LightningModule
from torch import Tensor
from torch.optim import Optimizer

from fedsim.core.flat import FlatParameters, aligned
from fedsim.core.work import Work
from fedsim.models.groups import Group
from fedsim.models.reid import Features
from fedsim.training.flat_model import FlatModel, Head, Output
from fedsim.training.optimizer import LocalOptimizer
from fedsim.training.own_module.blueprint import KEPT, Blueprint
from fedsim.training.own_module.module_errors import in_one_line
from fedsim.training.own_module.network import PART, CopiedParameters, ModuleNetwork, kept_of, set_buffers, tensors_of
from fedsim.training.server import arch_name
from fedsim.training.settings import LocalTraining, autocast


class ModuleOutput(Output):
    """The images of which a module is to return the loss; its features are computed when they are asked for."""

    model: ModuleModel
    images: Tensor
    precision: str

    @property
    def features(self) -> Features:
        """The features of the images, by a pass of their own."""
        with autocast(self.model.device, self.precision):
            features: Features = self.model.network(self.images)
        return features


class ModuleVariant(NamedTuple):
    """A module for a number of classes."""

    module: LightningModule
    """after ``setup``, for evaluations"""
    start: Tensor
    """its tensors that depend on the number of classes, as they were built"""
    kept: Mapping[str, Tensor]
    """its buffers that last with the client, as they were built"""


class ModuleModel(FlatModel):
    """A rank's model of a user's module.

    The buffer holds [shared | private | tensors whose size depends on the number of classes], as copies. There is a
    module for each number of classes. What trains is a fresh copy of it: nothing but tensors passes from one client to
    another.
    """

    flat_kind: ClassVar[type[FlatParameters]] = CopiedParameters
    flat: CopiedParameters
    network: ModuleNetwork

    def __init__(
        self, blueprint: Blueprint, network: ModuleNetwork, shared: frozenset[str], groups: dict[str, Group]
    ) -> None:
        self.blueprint = blueprint
        self._variant_of = lru_cache(KEPT)(self._make_variant)
        inside = {f"{PART}.{name}" for name in tensors_of(network.module) if name not in blueprint.sizes}
        outside = frozenset({*dict(network.named_parameters()), *dict(network.named_buffers())} - inside)
        groups, arch = {n: group for n, group in groups.items() if n in inside}, arch_name(blueprint.name)
        super().__init__(arch, network, shared, groups, blueprint.num_classes, outside)
        self.has_own_heads = bool(blueprint.sizes)
        self.head.requires_grad_(False)  # it stands for none
        network.flat = self.flat

    # -- variants ------------------------------------------------------------------------------------------------------

    def set_num_classes(self, num_classes: int) -> None:
        """Let the module be that of a client's number of classes; its values are those in the buffer."""
        self.num_classes = num_classes
        self.show(self._variant(self.num_classes).module)

    def show(self, module: LightningModule) -> None:
        """Let the buffer stand for another module of the same tensors."""
        self.flat.collect()
        self.network.module = module
        self.flat.follow({f"{PART}.{name}": span for name, span in self._spans(self.num_classes).items()})

    def _variant(self, num_classes: int) -> ModuleVariant:
        return self._variant_of(num_classes if self.blueprint.takes_classes else self.blueprint.num_classes)

    def _make_variant(self, num_classes: int) -> ModuleVariant:
        """Return a new variant; refuse a module whose tensors do not have the expected sizes."""
        module = self.blueprint.ready(num_classes)
        tensors, start = tensors_of(module), torch.zeros(self.head_room(num_classes))
        activity = f"building for {num_classes} classes, with which sizes of tensors are to grow evenly"
        with in_one_line(self.blueprint.name, activity):
            for name, span in self._spans(num_classes).items():
                start[span] = tensors[name].detach().flatten()
        return ModuleVariant(module.to(self.device), start, kept_of(module, tensors))

    def _spans(self, num_classes: int) -> dict[str, slice]:
        """Return the places, after the model's, of the tensors that depend on the number of classes."""
        spans, begin, more = {}, 0, num_classes - self.blueprint.num_classes
        for name, shapes in self.blueprint.sizes.items():
            size = math.prod(first + (second - first) * more for first, second in zip(*shapes, strict=True))
            spans[name] = slice(begin, begin + size)
            begin += aligned(size)
        return spans

    def head_room(self, num_classes: int) -> int:
        """Elements that a client's own tensors take."""
        return sum(aligned(span.stop - span.start) for span in self._spans(num_classes).values())

    def initial_state(self, num_classes: int, generator: torch.Generator) -> Tensor:  # noqa: ARG002 - the base's
        """Return :attr:`private` for a client that has not trained yet; clients with as many classes start alike."""
        return torch.cat([self.initial_private.cpu(), self._variant(num_classes).start])

    @property
    def head_layers(self) -> list[Head]:
        """The layers of the classifier, with the values in the buffer: views."""
        groups, parameters = self.groups, self.network.named_parameters()  # no group: of the tail
        of_head = {n: p.shape for n, p in parameters if groups.get(n, Group.HEAD) is Group.HEAD}
        views = {n: self.flat.buffer[self.flat.spans[n]].view(shape) for n, shape in of_head.items()}
        heads = [(view, n.rpartition(".")[0]) for n, view in views.items() if view.dim() > 1]
        return [Head(view, views.get(f"{layer}.bias", view.new_empty(0))) for view, layer in heads]

    # -- a session -----------------------------------------------------------------------------------------------------

    @property
    def running(self) -> list[Tensor]:
        """The float buffers of the module that is run."""
        return [buffer for name, buffer in self.network.named_buffers() if name in self.flat.spans]

    def fresh(self) -> LightningModule:
        """Return a module, as it was built, for a training."""
        return self.blueprint.fresh(self.num_classes)

    def give(self, module: LightningModule, kept: Mapping[str, Tensor]) -> None:
        """Give the tensors that a fresh module has before ``setup`` their values: it may look at them there."""
        buffer = self.flat.buffer
        values = {name: buffer[span] for name, span in self.flat.spans.items()}
        values.update({**self._variant(self.num_classes).kept, **kept})
        present = {**dict(module.named_parameters(PART)), **dict(module.named_buffers(PART))}
        for name, tensor in present.items():
            if name in values and tensor.numel() == values[name].numel():
                tensor.data.copy_(values[name].view(tensor.shape))

    def begin(self, module: LightningModule, kept: Mapping[str, Tensor]) -> None:
        """Give a fresh module the buffer's values, and those that the client has ``kept``."""
        moving = {name for name, p in self._variant(self.num_classes).module.named_parameters() if p.requires_grad}
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(parameter.requires_grad and name in moving)
        self.show(module)
        self.flat.spread()
        self.load_kept(kept)

    def end(self) -> dict[str, Tensor]:
        """Take the values of the module that has trained; return those that last with the client, by name."""
        self.flat.is_stale = True
        kept = kept_of(self.network.module, {name.removeprefix(f"{PART}.") for name in self.flat.spans})
        self.show(self._variant(self.num_classes).module)
        return kept

    def load_kept(self, kept: Mapping[str, Tensor]) -> None:
        """Load buffers that a client has kept into the module; what is missing has its first value."""
        first = self._variant(self.num_classes).kept
        set_buffers(self.network, {name: kept.get(name, value) for name, value in first.items()})

    def optimizer(self, settings: LocalTraining) -> ModuleOptimizer:
        """Return an optimizer for a session."""
        return ModuleOptimizer(settings, self.flat)

    def forward(self, images: Tensor, precision: str) -> ModuleOutput:
        """Return the images [B, 3, H, W], of which ``Client.supervised_loss`` makes the loss."""
        nothing = images.new_empty(0)
        output = ModuleOutput(Features(nothing, nothing), nothing, nothing)
        output.model, output.images, output.precision = self, images, precision
        return output

    def load_global(self, vector: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """Load the global model [num_shared], and private tensors that the server has, by name."""
        self.set_num_classes(self._max_classes)
        self.load_kept({})
        super().load_global(vector, tensors)

    def _twin(self) -> ModuleModel:
        network = ModuleNetwork(self.blueprint.first, self.network.num_features)
        return ModuleModel(self.blueprint, network, self._shared, self.groups)


class ModuleOptimizer(LocalOptimizer):
    """A view of the optimizers that Lightning steps, for methods: rates, parameters, gradients, the number of steps."""

    def __init__(self, settings: LocalTraining, flat: CopiedParameters) -> None:  # no torch optimizer of the settings
        self.settings, self.flat = settings, flat
        self.num_steps, self.work = 0, Work()
        self.trainer: Any = None
        """of the training that runs"""

    @property
    def of_module(self) -> list[Optimizer]:
        """The optimizers of the training that runs: the module may replace them."""
        return self.trainer.optimizers if self.trainer else []

    @property
    def groups(self) -> list[list[Tensor]]:  # type: ignore[override] # the base's is an attribute
        """The parameters of each group of each optimizer; before a training the module's trainable ones, in one."""
        groups = [group["params"] for group in self.param_groups] or [self.flat.module.parameters()]
        return [[p for p in group if p.requires_grad and p.numel()] for group in groups]

    @property
    def parameters(self) -> list[Tensor]:  # type: ignore[override] # as above
        """All parameters that are stepped."""
        return [parameter for group in self.groups for parameter in group]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of all optimizers."""
        return [group for optimizer in self.of_module for group in optimizer.param_groups]

    @property
    def rates(self) -> list[float]:
        """The learning rate of each group."""
        return [float(group["lr"]) for group in self.param_groups]

    @property
    def configured(self) -> Optimizer:
        """The first optimizer."""
        return self.of_module[0]

    def reset(self, round_: int) -> None:
        """Do nothing: each session has a new one."""

    def release(self) -> None:
        """Forget the optimizers."""
        self.trainer = None
