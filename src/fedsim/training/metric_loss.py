"""Metric losses of the library pytorch-metric-learning."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from importlib import import_module
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedsim.core.arguments import Section
from fedsim.core.checks import positive
from fedsim.core.errors import ConfigError
from fedsim.core.extras import load_extra
from fedsim.models.reid import Features

_FIELD = "model.objective.metric"
_REMEDY = "give MetricLoss(name='CircleLoss', options={...}), or a module of features and labels"
_CLASS_WEIGHTS = "W"
"""the library's name of the vectors of all classes, [D, Z], which some losses learn"""
_WITHOUT_WAITS = frozenset({"NormalizedSoftmaxLoss"})
"""the losses of pytorch-metric-learning in which the host does not wait for the device"""


class _LossKind:
    """A class by its name, or in Python a module that is made already."""

    def check(self, value: Any, name: str) -> Any:
        """Return the value; raise ConfigError, beginning with ``name``, if it is none."""
        if not isinstance(value, str | nn.Module):
            raise ConfigError(f"{name}: {type(value).__name__} is no name and no module; {_REMEDY}")
        return value


@dataclass(frozen=True, kw_only=True)
class MetricLoss(Section, option="model.objective.metric"):
    """A loss on features and identities, named by its class.

    A loss that learns a vector for each identity (ArcFaceLoss, CosFaceLoss and others with a weight ``W``) takes the
    rows of the identity head for it. So the loss has no weights of its own, and heads stay private or shared, as they
    are without it. Such losses replace the cross-entropy: set ``cross_entropy`` to 0.
    """

    name: Annotated[str, _LossKind()]
    """a class of ``pytorch_metric_learning.losses``, such as CircleLoss, ArcFaceLoss, CosFaceLoss or SupConLoss; or the
    class_path of your own module, which maps features [B, D] and labels [B] to a scalar. In Python also the module"""
    weight: float = 1.0
    """of the loss in the sum"""
    features: Literal["neck", "pool"] = "neck"
    """the features it acts on; losses with a vector for each identity take those of the neck"""
    options: dict[str, Any] = field(default_factory=dict)
    """arguments of the class, such as {m: 0.25, gamma: 64} of CircleLoss"""

    def __post_init__(self) -> None:
        positive(_FIELD, weight=self.weight)
        loss: Any = self.name
        if isinstance(loss, nn.Module):
            self._take(loss)
            return
        loss_class = _find(self.name)
        made: nn.Module | None = None
        if not _has_class_weights(loss_class):  # wrong options are refused now, not in the first batch
            made = self._make(loss_class, {})
            _check_weights(self.name, made, {})
        elif self.features != "neck":
            raise ConfigError(
                f"{_FIELD}.features: {self.name} compares with the head, whose input is the neck; set neck"
            )
        object.__setattr__(self, "_kind", loss_class)
        object.__setattr__(self, "_made", made)

    def _take(self, module: nn.Module) -> None:
        """Compute with a module that is made already."""
        name = type(module).__name__
        if self.options:
            raise ConfigError(f"{_FIELD}.options: {name} is made already; leave them out")
        _check_weights(name, module, {})
        for attribute, value in (("name", name), ("_kind", type(module)), ("_made", module)):
            object.__setattr__(self, attribute, value)

    @property
    def compares_with_head(self) -> bool:
        """Whether it learns a vector for each identity: the rows of the head."""
        return self.__dict__["_made"] is None

    @property
    def waits(self) -> bool:
        """Whether it is known that the host waits for the device in it: of your own modules it is not."""
        loss_class: type[nn.Module] = self.__dict__["_kind"]
        return (
            loss_class.__module__.startswith("pytorch_metric_learning.") and loss_class.__name__ not in _WITHOUT_WAITS
        )

    def __call__(self, features: Features, labels: Tensor, head: Tensor) -> Tensor:
        """Return the loss (scalar, without its weight) of features with labels [B]; ``head`` [Z, D] are its weights."""
        made: nn.Module | None = self.__dict__["_made"]
        x = features.layer(self.features)
        loss: Tensor
        if made is not None:
            loss = made(x, labels)
        else:
            loss = functional_call(self._sized(head), {_CLASS_WEIGHTS: head.T}, (x, labels))
        return loss

    @cached_property
    def _by_size(self) -> dict[tuple[int, int], nn.Module]:
        """(Z, D) -> the loss of heads of this size, once it is made."""
        return {}

    def _sized(self, head: Tensor) -> nn.Module:
        """Return the loss for as many identities and features as the head has."""
        made = self._by_size
        classes, width = head.shape
        if (classes, width) not in made:
            with torch.random.fork_rng(devices=[]):  # its random weights are never used
                sized = self._make(self.__dict__["_kind"], {"num_classes": classes, "embedding_size": width})
            _check_weights(self.name, sized, {_CLASS_WEIGHTS: (width, classes)})
            made[classes, width] = sized
        return made[classes, width]

    def _make(self, loss_class: type[nn.Module], sizes: Mapping[str, int]) -> nn.Module:
        try:
            return loss_class(**sizes, **self.options)
        except (TypeError, ValueError, AssertionError) as error:
            reason = str(error).partition("\n")[0]
            raise ConfigError(f"{_FIELD}.options: {self.name} does not take these ({reason})") from error


def as_metric_loss(loss: Any) -> MetricLoss:
    """Return a loss that was given as one, or as a module of features [B, D] and labels [B]; refuse anything else."""
    if isinstance(loss, MetricLoss):
        return loss
    if isinstance(loss, nn.Module):
        module: Any = loss
        return MetricLoss(name=module)
    raise ConfigError(f"{_FIELD}: a {type(loss).__name__} is no loss; {_REMEDY}")


def _find(name: str) -> type[nn.Module]:
    """Return the class of this name; raise ConfigError if there is none."""
    names: list[str] = []
    if "." in name:
        path, _, last = name.rpartition(".")
        try:
            loss_class = getattr(import_module(path), last, None)
        except ImportError as error:
            raise ConfigError(f"{_FIELD}.name: there is no module {path} ({error}); is it on PYTHONPATH?") from error
    else:
        library = load_extra("pytorch_metric_learning.losses", _FIELD, "models")
        loss_class, names = getattr(library, name, None), [loss for loss in dir(library) if loss.endswith("Loss")]
    if not (isinstance(loss_class, type) and issubclass(loss_class, nn.Module)):
        close = get_close_matches(name, names, n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else "give a class of pytorch_metric_learning.losses"
        raise ConfigError(f"{_FIELD}.name: there is no loss {name}; {hint}")
    return loss_class


def _has_class_weights(loss_class: type[nn.Module]) -> bool:
    constructors = [vars(base)["__init__"] for base in loss_class.__mro__ if "__init__" in vars(base)]
    return any("num_classes" in inspect.signature(constructor).parameters for constructor in constructors)


def _check_weights(name: str, made: nn.Module, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ConfigError if a loss learns other weights than ``expected``, name -> shape."""
    shapes = {weight: tuple(tensor.shape) for weight, tensor in made.named_parameters()}
    if shapes != expected:
        raise ConfigError(
            f"{_FIELD}.name: {name} learns {', '.join(shapes) or 'nothing'}, which no client would keep; choose a loss "
            "without weights, or with one vector W for each identity"
        )
