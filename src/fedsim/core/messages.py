"""What clients and server send each other."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

__all__ = ["Received", "Report", "Upload"]


@dataclass(frozen=True)
class Upload:
    """What a client sends to the server."""

    vector: Tensor
    """[num_shared] float32 on the device: the shared part of its model, as a rule a view of the resident's buffer"""
    extras: Mapping[str, Tensor] = field(default_factory=dict)
    """further float32 tensors, as :meth:`Method.extras_up` declares them; the server gets their plain means over the
    clients of an architecture that count"""
    mask: Tensor | None = None
    """[num_shared_parameters] bool on the device, of methods that declare :attr:`Method.has_masks`: False where the
    client has pruned an element, which then does not count in the mean; what lies between tensors is True. Running
    statistics always count. None: nothing is pruned"""
    is_new_mask: bool = True
    """whether the server must be told the mask: it is not that of the client's last upload"""
    zeros_count: bool = False
    """whether pruned elements enter the mean as zeros, instead of being left out"""

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
    """What the server knows about a client that returned an update."""

    num_images: int
    """n_k"""
    signals: Mapping[str, float]
    """numbers that :meth:`Method.signals` measured"""
    tensor_signals: tuple[float, ...] = ()
    """numbers that :meth:`Method.tensor_signals` measured: one for each shared parameter tensor"""
    speed: float | None = None
    """images per second that its device trains on, as ``model.hardware`` says; None: there is no such setting"""
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
    """What came from the clients of one architecture whose updates count in the round."""

    reports: Mapping[str, Report]
    """by client"""
    extras: Mapping[str, Tensor] = field(default_factory=dict)
    """plain means of what they uploaded beside the vector, float32 on the device"""
