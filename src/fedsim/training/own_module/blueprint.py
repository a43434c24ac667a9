"""How a user's module is built for a number of classes, and which of its tensors depend on that number."""

from __future__ import annotations

import copy
import gc
import inspect
import weakref
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, Protocol

import torch
from lightning import LightningModule
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from fedsim.core.errors import ConfigError
from fedsim.core.names import one_line
from fedsim.core.seeding import seeded_host
from fedsim.training.own_module.inner_trainer import Horizon, has_own, package_of, set_up
from fedsim.training.own_module.module_errors import in_one_line, named
from fedsim.training.own_module.network import saved_buffers, tensors_of

CLASSES = "num_classes"
"""the argument that is filled for each client"""
KEPT = 64
"""modules of different numbers of classes that stay in memory"""
_NO_COPY = (TypeError, RuntimeError, ValueError)
"""errors of ``copy.deepcopy``"""


class MakesModule(Protocol):
    """A class of modules, or another function that makes one; ``num_classes`` may be left out of its arguments."""

    def __call__(self, *, num_classes: int) -> nn.Module:
        """Return a LightningModule for so many classes, of ``lightning`` or of ``pytorch_lightning``."""


class NetworkKind:
    """A network, or what makes one: an object or a class; it annotates arguments of settings."""

    def check(self, value: Any, name: str) -> Any:
        """Return the value; raise ConfigError, beginning with ``name``, if it is no network."""
        if not callable(value):
            raise ConfigError(f"{name}: expected a network, or a class of LightningModule, got {value}")
        return value


class Blueprint:
    """Builds a user's module for any number of classes.

    Args:
        source: a module, or a function that makes one, such as its class. Neither it nor its arguments ever change:
            each build has copies.
        seed: of the run.
        num_classes: of the first build, which decides the weights that all clients start from.
        horizon: of the clients' training, for modules that make layers in ``setup``; None: a single epoch.

    Raises:
        ConfigError: if the source makes no module, or cannot make it for another number of classes.
    """

    def __init__(
        self, source: MakesModule | LightningModule, seed: int, num_classes: int, horizon: Horizon | None = None
    ) -> None:
        self._seed, self._horizon = seed, horizon or Horizon()
        self._given = source if isinstance(source, nn.Module) else None
        self._kind: Callable[..., Any] = _class_of(source) if self._given is None else type(source)
        self.name = getattr(self._kind, "__name__", type(source).__name__)
        """of the module's class"""
        with in_one_line(self.name, "naming its arguments"):
            self.takes_classes = CLASSES in inspect.signature(self._kind).parameters
            """whether the module has an argument num_classes"""
        self._make: Any = source if self._given is None else self._again(source)
        self.num_classes = num_classes
        """of :attr:`first`"""
        self._templates: dict[int, LightningModule | None] = {}
        self.first = self.ready(num_classes)
        """the module with the first build's number of classes; do not train it"""
        self.larger = self.ready(num_classes + 1) if self.takes_classes else None
        """the module with one class more, for checks; None: it has no argument num_classes, or the checks are over"""
        self.sizes = {} if self.larger is None else self._sizes(self.larger)
        """name -> shapes for ``num_classes`` and one more, of the tensors that depend on it"""

    def build(self, num_classes: int) -> LightningModule:
        """Return a new module for so many classes, before ``setup``; random weights depend on seed and number alone."""
        with seeded_host(self._seed), in_one_line(self.name, "building"):
            made = _copied(self._make, {})
            classes = {CLASSES: num_classes} if self.takes_classes else {}
            module: Any = made if isinstance(made, nn.Module) else made(**classes)
            if package_of(module) is None:
                raise ConfigError(f"model.module: {self.name} makes no LightningModule; give the class of one")
            _check_hooks(module)
            _give_each_element_a_place(module)
            if self._given is not None and self.takes_classes:
                _take_values(module, self._given)
        return module  # type: ignore[no-any-return] # or one of pytorch_lightning

    def fresh(self, num_classes: int) -> LightningModule:
        """Return a module as :meth:`build` does: a copy of the first one, or, where that is more, a new one."""
        num_classes = num_classes if self.takes_classes else self.num_classes
        template = self._templates.get(num_classes)
        if template is None:
            template = self.build(num_classes)
            if num_classes in self._templates or num_classes > self.num_classes:  # it has no copy, or is of no client
                return template
            is_whole = has_whole_copy(template)
            self._templates[num_classes] = template if is_whole else None
            if len(self._templates) > KEPT:
                del self._templates[next(iter(self._templates))]
            if not is_whole:
                return template
        with in_one_line(self.name, "copying for a session; leave out what has no copy"):
            module: LightningModule = copy_of(template)
        return module

    def ready(self, num_classes: int) -> LightningModule:
        """Return a new module for so many classes, after ``setup`` and ``configure_model``."""
        module = self.fresh(num_classes)
        with in_one_line(self.name, "setup"):
            if has_own(module, "setup") or has_own(module, "configure_model"):
                set_up(module, self._horizon, self._seed)
        _check_weights(module)
        return module

    def _sizes(self, larger: LightningModule) -> dict[str, tuple[torch.Size, torch.Size]]:
        first, second = tensors_of(self.first), tensors_of(larger)
        if first.keys() != second.keys() or any(first[n].dim() != second[n].dim() for n in first):
            raise ConfigError(
                f"{named(self.first)} has other layers for another {CLASSES}; let only sizes of tensors depend on it"
            )
        return {name: (t.shape, second[name].shape) for name, t in first.items() if t.shape != second[name].shape}

    def _again(self, module: Any) -> Any:
        """Return a given module, of which copies are made, or a function that makes it for any number of classes."""
        if not self.takes_classes:
            if not has_whole_copy(module):
                raise ConfigError(
                    f"{named(module)} has hooks, functions that refer to it, or what has no copy; give its class, and "
                    "no instance"
                )
            return module
        parameters = inspect.signature(self._kind).parameters.values()
        names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        if missing := [name for name in names if name not in module.hparams]:
            raise ConfigError(
                f"{named(module)} takes {CLASSES}, which each client fills, but its hparams lack {missing[0]}; call "
                "self.save_hyperparameters() without arguments in __init__, or give model.module as "
                f"functools.partial({self.name}, ...)"
            )
        return partial(self._kind, **{name: module.hparams[name] for name in names if name != CLASSES})


def copy_of(thing: Any, memo: dict[int, Any] | None = None) -> Any:
    """Return a copy of an object; in modules also of tensors that are computed from others, as old weight norm's.

    ``memo`` has the copies so far, as that of ``copy.deepcopy``.
    """
    parts = thing.modules() if isinstance(thing, nn.Module) else ()
    values = [value for part in parts for value in vars(part).values() if isinstance(value, Tensor)]
    memo = {} if memo is None else memo
    memo |= {id(value): value.detach().clone() for value in values if not value.is_leaf}
    return copy.deepcopy(thing, memo)


def has_whole_copy(module: nn.Module) -> bool:
    """Return whether a copy of a module has all that it has, and refers to nothing of it: neither hooks nor functions.

    Hooks of parameters are not copied, and functions are shared by all copies, with the variables that they close over.
    """
    if any(p._backward_hooks or p._post_accumulate_grad_hooks for p in module.parameters()):
        return False
    try:
        waiting = [copy_of(module)]
    except _NO_COPY:
        return False
    originals = {id(part) for part in (*module.modules(), *module.parameters(), *module.buffers())}
    seen: dict[int, Any] = {}
    while waiting:
        value = waiting.pop()
        if id(value) in originals:
            return False
        if id(value) not in seen and not isinstance(value, type | ModuleType):
            seen[id(value)] = value
            if inspect.isfunction(value):  # without its global variables
                waiting += value.__closure__, value.__defaults__, value.__kwdefaults__
            elif isinstance(value, weakref.ref):  # which a copy keeps
                waiting.append(value())
            else:
                waiting += gc.get_referents(value)
    return True


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """Return a copy, as far as there is one, in a partial of its arguments: a config's parser leaves its own.

    What two arguments share, such as a network and its optimizer, their copies share: ``memo`` is that of ``copy_of``.
    """
    if isinstance(value, partial):
        args = [_copied(v, memo) for v in value.args]
        return partial(value.func, *args, **{n: _copied(v, memo) for n, v in value.keywords.items()})
    try:
        return copy_of(value, memo)
    except _NO_COPY as error:
        if isinstance(value, nn.Module):
            raise ConfigError(
                f"model.module: {type(value).__name__} has no copy ({one_line(str(error), 200)}), which each client "
                "needs; let the module build it in __init__"
            ) from error
        return value


def _class_of(source: Callable[..., Any]) -> Callable[..., Any]:
    """Return the class in partials, also in those by which a config's parser makes its objects."""
    while isinstance(source, partial):
        classes = [value for value in source.args if isinstance(value, type)]
        source = classes[0] if classes else source.func
    return source


def _take_values(module: LightningModule, source: nn.Module) -> None:
    """Give a module the tensors of the user's own one, where they have the same shape."""
    shapes = {name: tensor.shape for name, tensor in module.state_dict().items() if isinstance(tensor, Tensor)}
    values = {n: tensor for n, tensor in source.state_dict().items() if n in shapes and shapes[n] == tensor.shape}
    nn.Module.load_state_dict(module, values, strict=False)


def _give_each_element_a_place(module: LightningModule) -> None:
    """Let no two elements of a buffer share memory, as in an expanded one: values are written into it."""
    for part in module.modules():
        for name, buffer in [*part.named_buffers(recurse=False)]:
            if buffer.layout is torch.strided and 0 in buffer.stride():
                setattr(part, name, buffer.contiguous())


def _check_hooks(module: LightningModule) -> None:
    """Raise ConfigError unless a module has what a client needs."""
    problems = [f" has no {h}; define it" for h in ("training_step", "configure_optimizers") if not has_own(module, h)]
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        problems.append(": training_step takes dataloader_iter, an experiment of Lightning; take batch")
    if not callable(getattr(module, "embed", None)) and not has_own(module, "forward"):
        problems.append(" gives no features; define embed(images), or forward(images)")
    if problems:
        raise ConfigError(named(module) + problems[0])


def _check_weights(module: LightningModule) -> None:
    """Refuse parameters that a flat buffer cannot hold."""
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ConfigError(f"{named(module)} has no parameter to train; let one require gradients")
    for name, buffer in saved_buffers(module).items():
        if buffer.layout is not torch.strided:
            raise ConfigError(f"{named(module)}: the buffer {name} is sparse; register it with persistent=False")
    for name, parameter in module.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise ConfigError(f"{named(module)}: {name} has no shape yet; use no lazy layers")
        if parameter.dtype is not torch.float32:
            raise ConfigError(f"{named(module)}: {name} is {parameter.dtype}; keep float32 weights (see bf16-mixed)")
