"""Messages between clients and server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

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


@dataclass(frozen=True)
class Received:
    """The clients of one architecture whose updates enter the round's mean."""

    reports: Mapping[str, Report]
    """client -> report"""
    extras: Mapping[str, Tensor] = field(default_factory=dict)
    """name -> plain mean of the uploaded extras, float32 on the device"""
