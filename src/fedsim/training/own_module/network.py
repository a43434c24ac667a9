"""A user's module as the network of a rank's model, and its values in the model's flat buffer: copies, and no views.

A module's tensors stay its own, as under Lightning alone. The buffer, which methods read and write, is brought up to
date when it is read; what they have written is copied into the module before it runs.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from typing import Self

import torch
from lightning import LightningModule
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from fedsim.core.errors import ConfigError
from fedsim.core.flat import FlatParameters
from fedsim.core.work import Work
from fedsim.models.reid import Features, IdentityHead, ReIDModel
from fedsim.training.flat_model import is_idle
from fedsim.training.own_module.module_errors import named

PART = "module"
"""name of the network's only part; all names of tensors start with it"""


def features_of(module: LightningModule, images: Tensor) -> Tensor:
    """Return the features [B, D] of images [B, 3, H, W], by ``embed``, or by ``forward`` where there is none."""
    hook = "embed" if callable(getattr(module, "embed", None)) else "forward"
    features = getattr(module, hook)(images)
    # by shapes: len() is a plain number, and an export that meets one serves that number of images alone
    if not isinstance(features, Tensor) or features.dim() != 2 or features.shape[0] != images.shape[0]:
        problem = f"shape {list(features.shape)}" if isinstance(features, Tensor) else type(features).__name__
        raise ConfigError(
            f"{named(module)}: {hook} returned {problem} for {len(images)} images; return features [B, D]"
            + ("" if hook == "embed" else ", or define embed(images) that does")
        )
    return features


class CopiedParameters(FlatParameters):
    """Parameters and float32 buffers of a module, copied to and from one buffer.

    Read the buffer through its properties: a view that was taken before the module ran has old values.
    """

    is_stale = False
    """whether the module may have moved since its values were read"""
    _written: int | None = None

    @property
    def buffer(self) -> Tensor:
        """The whole model and the reserve."""
        self.collect()
        return self._values

    @buffer.setter
    def buffer(self, values: Tensor) -> None:
        self._values = values

    def bind(self) -> None:
        """Leave the module's tensors as they are: none is a view."""
        self._addresses, self._places = [], WeakIdKeyDictionary()

    def follow(self, tail: Mapping[str, slice]) -> None:
        """Stand for the tensors that :attr:`module` now has: they get the buffer's values when it is used.

        ``tail``: places, in the reserve, of tensors that no entry has, by name.
        """
        first = self.num_model
        self.spans = {entry.name: entry.span for entry in self.entries}
        self.spans |= {name: slice(first + span.start, first + span.stop) for name, span in tail.items()}
        self._written = None

    def place_of(self, tensor: Tensor) -> int:
        """Return where the values of a parameter start in the buffer, in elements."""
        if tensor not in self._places:  # it keeps those of a module that has trained, as long as methods look at it
            named = self.module.named_parameters()
            self._places.update({p: self.spans[n].start for n, p in named if n in self.spans})
        offset: int = self._places[tensor]
        return offset

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Let the module run, with the buffer's values, which it may change."""
        self.spread()
        yield
        self.is_stale = True

    def collect(self) -> None:
        """Copy the module's values into the buffer, if they may have changed."""
        if self.is_stale:
            assert self._written == self._values._version, "a view of the buffer was written after the module ran"
            self.is_stale = False
            self._copy(into=1)

    def spread(self) -> None:
        """Copy the buffer's values into the module, if they have changed."""
        if self._written != self._values._version:
            assert not self.is_stale, "the buffer was written through a view that was taken before the module ran"
            module = self.module.get_submodule(PART)
            mode = module.training
            if not mode:  # values are those of training: layers may change weights in evaluation, as loralib's
                module.train()
            self._copy(into=0)
            if not mode:
                module.eval()

    def _copy(self, into: int) -> None:
        """Copy all values to a side: 0, the module; 1, the buffer."""
        tensors: dict[str, Tensor] = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        pairs = []
        for name, span in self.spans.items():
            tensor, values = tensors.get(name), self._values[span]
            if tensor is None or tensor.numel() != values.numel():
                raise ConfigError(f"model.module: {name} was removed, or changed its shape; keep it")
            pairs.append((tensor.data, values.view(tensor.shape)))
        torch._foreach_copy_([pair[into] for pair in pairs], [pair[1 - into] for pair in pairs])
        self._written = self._values._version


class ModuleNetwork(ReIDModel):
    """A network whose only part is a user's module: ``width`` are its features.

    Both layers of features, ``pool`` and ``neck``, are those of the module.
    """

    module: LightningModule
    """that of a client's number of classes, and while it trains a copy of it"""

    def __init__(self, module: LightningModule, width: int) -> None:
        nn.Module.__init__(self)
        self.module = module
        self.num_features = self.num_pooled = width
        self.head, self.head_kind, self.work = None, IdentityHead(), Work()
        self._of_session, self._dropouts = [], []  # those of users draw from the stream of a session
        self._still = [name for name, part in module.named_modules() if not part.training]
        self.flat: CopiedParameters | None = None
        """the values that methods see; None: those of the module alone"""

    def forward(self, images: Tensor) -> Features:
        """Map normalised images [B, 3, H, W] to features [B, D] float32."""
        self.count(images)
        if self.flat is not None:
            self.flat.spread()
        features = features_of(self.module, images).float()
        if self.flat is not None and self.training:
            self.flat.is_stale = True
        return Features(features, features)

    def train(self, mode: bool = True) -> Self:
        """Set the mode; parts that the user has built in evaluation mode stay in it, as under Lightning's Trainer."""
        super().train(mode)
        for name in self._still if mode else ():
            self.module.get_submodule(name).training = False
        return self


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and the saved float32 buffers of a module, by name: shared ones and private ones."""
    return {**dict(module.named_parameters()), **{n: t for n, t in saved_buffers(module).items() if _is_averaged(t)}}


def kept_of(module: nn.Module, averaged: Container[str]) -> dict[str, Tensor]:
    """Return copies of the other saved buffers, by their names in a network: they last with the client, never averaged.

    Complex ones are pairs of numbers. Counters of batches that no batch normalisation reads are not among them.
    """
    idle = {id(part.num_batches_tracked) for part in module.modules() if is_idle(part)}
    kept = {n: t.detach() for n, t in saved_buffers(module).items() if n not in averaged and id(t) not in idle}
    return {f"{PART}.{n}": (torch.view_as_real(t) if t.is_complex() else t).clone() for n, t in kept.items()}


def _is_averaged(buffer: Tensor) -> bool:
    """Whether a buffer, as it was built, has a place among what servers average: an empty one is to grow.

    One that holds an infinity, such as a mask or the best score so far, has no mean.
    """
    return buffer.dtype is torch.float32 and buffer.numel() > 0 and not bool(buffer.isinf().any())


def saved_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the persistent buffers of a module, by name."""
    # not by state_dict, in which a module may leave out what another file has, or may have other names
    skipped = {
        f"{at}.{n}".removeprefix(".") for at, part in module.named_modules() for n in part._non_persistent_buffers_set
    }
    return {name: buffer for name, buffer in module.named_buffers() if name not in skipped}


def set_buffers(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Give buffers of a module new values, by name; they may have another shape."""
    for name, value in values.items():
        old = module.get_buffer(name)
        value = torch.view_as_complex(value) if old.is_complex() and not value.is_complex() else value
        old.resize_(value.shape).copy_(value)
