"""Messages between clients and server."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

__all__ = ["Received", "Report", "Upload"]


@dataclass(frozen=True)
class Upload:
    """A client's update."""

    vector: Tensor
    """[num_shared] float32 on the device: the shared part of its model, usually a view of the resident's buffer"""
    extras: Mapping[str, Tensor] = field(default_factory=dict)
    """float32 tensors that :meth:`Method.extras_up` declares; the server gets their plain means over the clients of an
    architecture"""
    mask: Tensor | None = None
    """[num_shared_parameters] bool on the device, of methods that declare :attr:`Method.has_masks`: False for pruned
    elements, which the mean leaves out; padding between tensors is True. Running statistics are never pruned. None: no
    element is pruned"""
    is_new_mask: bool = True
    """whether the mask is sent: it differs from the mask of the client's last upload"""
    zeros_count: bool = False
    """whether pruned elements enter the mean as zeros instead"""

    @property
    def is_plain(self) -> bool:
        """Whether nothing is pruned."""
        return self.mask is None

    def on_host(self) -> Upload:
        """Return a copy in host memory."""
        extras = {name: tensor.to("cpu", copy=True) for name, tensor in self.extras.items()}
        mask = None if self.mask is None else self.mask.to("cpu", copy=True)
        return replace(self, vector=self.vector.to("cpu", copy=True), extras=extras, mask=mask)


@dataclass(frozen=True)
class Report:
    """The server's knowledge about a client that returned an update."""

    num_images: int
    """n_k"""
    signals: Mapping[str, float]
    """the client's values of :meth:`Method.signals`"""
    tensor_signals: tuple[float, ...] = ()
    """the client's values of :meth:`Method.tensor_signals`: one number for each shared parameter tensor"""
    speed: float | None = None
    """training speed of its device in images per second, from ``model.hardware``; None: not set"""
    loss: float = math.nan
    """mean training loss over the images; NaN before the client has trained"""
    accuracy: float = math.nan
    """share of the training images that were classified right; NaN before the client has trained"""
    images: float = 0.0
    """images trained on, over all local epochs"""
    seconds: float = math.nan
    """measured duration of the visit: it differs from machine to machine"""
    facts: Mapping[str, float] = field(default_factory=dict)
    """other numbers about the visit, by name, such as the number of clusters"""
    traffic: Mapping[str, float] = field(default_factory=dict)
    """numbers on which the bytes of the upload depend, by name"""

    @property
    def numbers(self) -> dict[str, float]:
        """The numbers that are logged for a client, by name."""
        common = {"loss": self.loss, "accuracy": self.accuracy, "images": self.images, "seconds": self.seconds}
        return {**common, **self.facts, **self.signals}


@dataclass(frozen=True)
class Received:
    """The clients of one architecture whose updates enter the round's mean."""

    reports: Mapping[str, Report]
    """client -> report"""
    extras: Mapping[str, Tensor] = field(default_factory=dict)
    """name -> plain mean of the uploaded extras, float32 on the device"""
