"""How a user's module is built for a number of classes, and which of its tensors depend on that number."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from lightning import LightningModule
from torch import Tensor, nn

from fedsim.core.errors import ConfigError
from fedsim.core.seeding import seeded_host
from fedsim.training.own_module.rules import check_module, has_own, named

CLASSES = "num_classes"
"""the argument that is filled for each client"""


class MakesModule(Protocol):
    """A class of modules, or another function that makes one; ``num_classes`` may be left out of its arguments."""

    def __call__(self, *, num_classes: int) -> LightningModule:
        """Return a module for so many classes."""


class Blueprint:
    """Builds a user's module for any number of classes.

    Args:
        source: a module, or a function that makes one, such as its class.
        seed: of the run.
        num_classes: of the first build, which decides the weights that all clients start from.

    Raises:
        ConfigError: if the source makes no module, or cannot make it for another number of classes.
    """

    def __init__(self, source: MakesModule | LightningModule, seed: int, num_classes: int) -> None:
        self._seed = seed
        if isinstance(source, LightningModule):
            self._kind: Callable[..., Any] = type(source)
            takes, self._make = _again(source)
        else:
            self._kind = _class_of(source)
            takes, self._make = _takes_classes(self._kind), source
        self.takes_classes = takes
        """whether the module has an argument num_classes"""
        self.name = getattr(self._kind, "__name__", type(source).__name__)
        """of the module's class"""
        self.first = self.build(num_classes)
        """the module with the first build's number of classes; do not change it"""
        if isinstance(source, LightningModule) and takes:
            _take_weights(self.first, source)
        self.num_classes = num_classes
        """of :attr:`first`"""
        self.sizes = self._sizes() if takes else {}
        """name -> shapes for ``num_classes`` and one more, of the tensors that depend on it"""

    def build(self, num_classes: int) -> LightningModule:
        """Return a new module for so many classes; its random weights depend on the seed and that number alone."""
        with seeded_host(self._seed):
            module = self._make(**({CLASSES: num_classes} if self.takes_classes else {}))
            if not isinstance(module, LightningModule):
                raise ConfigError(f"model.module: {self.name} makes no LightningModule; give the class of one")
            check_module(module)
            module.configure_model()
            if has_own(module, "setup"):
                module.setup("fit")
        if not any(parameter.requires_grad for parameter in module.parameters()):
            raise ConfigError(f"{named(module)} has no parameter to train; let one require gradients")
        return module

    def shape_of(self, name: str, num_classes: int) -> torch.Size:
        """Return the shape that a tensor of :attr:`sizes` has for so many classes."""
        first, second = self.sizes[name]
        more = num_classes - self.num_classes
        return torch.Size(a + (b - a) * more for a, b in zip(first, second, strict=True))

    def _sizes(self) -> dict[str, tuple[torch.Size, torch.Size]]:
        """Return the shapes that differ between two builds."""
        first, second = (tensors_of(module) for module in (self.first, self.build(self.num_classes + 1)))
        if first.keys() != second.keys() or any(first[n].dim() != second[n].dim() for n in first):
            raise ConfigError(
                f"{named(self.first)} has other layers for another {CLASSES}; let only sizes of tensors depend on it"
            )
        pairs = {name: (tensor.shape, second[name].shape) for name, tensor in first.items()}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and the float buffers that a module would save, by name: those that a client owns."""
    saved = module.state_dict(keep_vars=True).keys()
    buffers = {n: t for n, t in module.named_buffers() if n in saved and t.is_floating_point()}
    return {**dict(module.named_parameters()), **buffers}


def _again(source: LightningModule) -> tuple[bool, Callable[..., LightningModule]]:
    """Return whether a module takes num_classes, and a function that makes it again."""
    kind = type(source)
    if not _takes_classes(kind):
        return False, partial(copy.deepcopy, source)
    parameters = inspect.signature(kind).parameters.values()
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if missing := [name for name in names if name not in source.hparams]:
        raise ConfigError(
            f"{named(source)} takes {CLASSES}, which each client fills, but its hparams lack {missing[0]}; call "
            f"self.save_hyperparameters() in __init__, or give model.module as functools.partial({kind.__name__}, ...)"
        )
    return True, partial(kind, **{name: source.hparams[name] for name in names if name != CLASSES})


def _takes_classes(kind: Callable[..., Any]) -> bool:
    """Return whether a class, or a function, has the argument num_classes."""
    try:
        return CLASSES in inspect.signature(kind).parameters
    except (TypeError, ValueError):
        return False


def _class_of(source: Callable[..., Any]) -> Callable[..., Any]:
    """Return the class in partials, also in those by which a config's parser makes its objects."""
    while isinstance(source, partial):
        classes = [value for value in source.args if isinstance(value, type)]
        source = classes[0] if classes else source.func
    return source


def _take_weights(module: LightningModule, source: LightningModule) -> None:
    """Give a module the tensors of the user's own one, where they have the same shape."""
    weights: Mapping[str, Tensor] = tensors_of(source)
    with torch.no_grad():
        for name, tensor in tensors_of(module).items():
            if name in weights and weights[name].shape == tensor.shape:
                tensor.copy_(weights[name])
