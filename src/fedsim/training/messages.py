"""The messages that clients and server send each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torch import Tensor

from fedsim.training.public import PublicImages


@dataclass(frozen=True)
class Download:
    """The server's message to a client."""

    vector: Tensor
    """[num_shared] float32 on the device: the global model of the client's architecture"""
    extras: Mapping[str, Tensor] = field(default_factory=dict)
    """further tensors, by name: those that :meth:`Method.payload` declares, tables included, and no others"""
    public: PublicImages | None = None
    """unlabelled images that server and clients have in common, of methods that require them"""


class Measured(NamedTuple):
    """A signal on the device: the host reads it with the results of the session, and does not wait for it alone."""

    values: Tensor
    """of any shape and type; of whole numbers below 2**53"""
    finish: Callable[[list[float]], float | list[float]] = lambda values: values[0]
    """makes the signal from the list of values: by default it is the only value"""

    def read(self, values: list[float]) -> float | list[float]:
        """Return the signal; takes the numbers of :attr:`values` from the front of the list ``values``."""
        numbers = values[: self.values.numel()]
        del values[: len(numbers)]
        return self.finish(numbers)


Signals = Mapping[str, float | Sequence[float] | Measured]
"""name -> number of the client, or numbers of its parameter tensors; either may be :class:`Measured` on the device"""


@dataclass(frozen=True)
class Upload:
    """A client's message to the server."""

    vector: Tensor
    """[num_shared] float32 on the device: the shared part of its model, usually a view of the model's buffer"""
    extras: Mapping[str, Tensor] = field(default_factory=dict)
    """float32 tensors that :meth:`Method.payload` declares; the server gets their plain means over the clients of an
    architecture"""
    signals: Signals = field(default_factory=dict)
    """numbers that :attr:`Method.measures` declares: one for the client, or one for each shared parameter tensor. Those
    that are computed on the device are :class:`Measured`, so that the host need not wait for them"""
    rows: Mapping[str, Tensor] = field(default_factory=dict)
    """table -> float32 rows [any number, columns] on the device, which join one of ``Payload.tables``; a missing table
    gets none"""
    mask: Tensor | None = None
    """[num_shared_parameters] bool on the device, of methods that require ``masks``: False for pruned elements, which
    the mean leaves out; padding between tensors is True. Running statistics are never pruned. None: no element is
    pruned"""
    is_new_mask: bool | Tensor = True
    """whether the mask is sent, because it differs from that of the client's last upload; may be bool on the device"""
    zeros_count: bool = False
    """whether pruned elements enter the mean as zeros, instead of being left out"""

    def on_host(self) -> Upload:
        """Return a copy in host memory; the host waits for the device once, for the vector, which comes last."""
        extras = {name: tensor.to("cpu", non_blocking=True, copy=True) for name, tensor in self.extras.items()}
        mask = None if self.mask is None else self.mask.to("cpu", non_blocking=True, copy=True)
        return replace(self, vector=self.vector.to("cpu", copy=True), extras=extras, mask=mask)


@dataclass(frozen=True)
class Report:
    """The server's numbers about a client that returned an update."""

    num_images: int
    """n_k"""
    signals: Mapping[str, float] = field(default_factory=dict)
    """the client's numbers, by name; see :attr:`Upload.signals`"""
    tensor_signals: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """the client's numbers for each shared parameter tensor, by name"""
    speed: float | None = None
    """training speed of its device in images per second, from ``model.hardware``; None: not set"""
    loss: float = math.nan
    """mean training loss over the images; NaN before the client has trained"""
    accuracy: float = math.nan
    """share of the training images that were classified correctly; NaN before the client has trained"""
    images: float = 0.0
    """images whose loss is in :attr:`loss`, over all local epochs; passes beside these, as those of a second model, are
    only in the log's ``train/images``"""
    seconds: float = math.nan
    """measured duration of the session: it differs from machine to machine"""
    facts: Mapping[str, float] = field(default_factory=dict)
    """other numbers about the session, by name, such as the number of clusters"""
    traffic: Mapping[str, float] = field(default_factory=dict)
    """numbers that decide the bytes of the upload, by name"""

    @property
    def numbers(self) -> dict[str, float]:
        """The numbers that are logged for a client, by name."""
        common = {"loss": self.loss, "accuracy": self.accuracy, "images": self.images, "seconds": self.seconds}
        return {**common, **self.facts, **self.signals}


@dataclass(frozen=True)
class Answers:
    """The combined messages of the clients of one architecture whose updates count in the round."""

    reports: Mapping[str, Report]
    """by client"""
    extras: Mapping[str, Tensor] = field(default_factory=dict)
    """plain means of the tensors that they uploaded with the vector, float32 on the device"""
