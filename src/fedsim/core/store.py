"""Stores of the tensors of many clients between their visits, in device, host or disk memory."""

from __future__ import annotations

import os
import tempfile
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

STORABLE = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""dtypes that clients may keep -> their names in safetensors files"""

Place = Literal["device", "host", "disk"]


class ClientStore(ABC):
    """Named tensors of each client. A tensor whose shape and dtype stay is overwritten in place."""

    def __init__(self) -> None:
        self._kept: dict[str, dict[str, Any]] = {}  # client -> name -> what :meth:`_put` returned

    def read(self, client: str) -> dict[str, Tensor]:
        """Return a client's tensors, empty if it has none. They may be the stored ones: do not write to them."""
        return {name: self._get(kept) for name, kept in self._kept.get(client, {}).items()}

    def write(self, client: str, tensors: Mapping[str, Tensor]) -> None:
        """Replace a client's tensors by copies of these."""
        old = self._kept.get(client, {})
        self._kept[client] = {name: self._put(tensor, old.get(name)) for name, tensor in tensors.items()}

    def clients(self) -> list[str]:
        """Return the clients that have tensors."""
        return list(self._kept)

    @abstractmethod
    def _get(self, kept: Any) -> Tensor: ...

    @abstractmethod
    def _put(self, tensor: Tensor, old: Any) -> Any: ...


class MemoryStore(ClientStore):
    """Tensors in the memory of a device; :meth:`read` returns the stored ones.

    ``pinned`` page-locks host memory, which makes copies to and from a GPU asynchronous.
    """

    def __init__(self, device: torch.device, pinned: bool = False) -> None:
        super().__init__()
        self.device, self.pinned = device, pinned

    def _get(self, kept: Tensor) -> Tensor:
        return kept

    def _put(self, tensor: Tensor, old: Tensor | None) -> Tensor:
        if old is tensor:
            return old
        if old is None or old.shape != tensor.shape or old.dtype != tensor.dtype:
            old = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device, pin_memory=self.pinned)
        return old.copy_(tensor)


class DiskStore(ClientStore):
    """Tensors in one unnamed file in ``folder`` (None: the system's temporary one), which vanishes with the process.

    :meth:`read` returns copies on the CPU.
    """

    def __init__(self, folder: str | None = None) -> None:
        super().__init__()
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - open as long as the store lives
        weakref.finalize(self, self._file.close)
        self._end = 0

    def _get(self, kept: _Place) -> Tensor:
        tensor = torch.empty(kept.shape, dtype=kept.dtype)
        view, offset = bytes_of(tensor), kept.offset
        while view:
            done = os.preadv(self._file.fileno(), [view], offset)
            assert done > 0, "the store's file was truncated"
            view, offset = view[done:], offset + done
        return tensor

    def _put(self, tensor: Tensor, old: _Place | None) -> _Place:
        view = bytes_of(tensor.detach().cpu().contiguous())
        place = old
        if place is None or (place.dtype, place.shape) != (tensor.dtype, tensor.shape):
            place = _Place(self._end, tensor.dtype, tensor.shape)
            self._end += len(view)
        offset = place.offset
        while view:
            done = os.pwrite(self._file.fileno(), view, offset)
            view, offset = view[done:], offset + done
        return place


class _Place(NamedTuple):
    """A tensor in the file."""

    offset: int
    dtype: torch.dtype
    shape: torch.Size


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor."""
    return tensor.flatten().view(torch.uint8).numpy().data


def make_store(place: Place, device: torch.device) -> ClientStore:
    """Return an empty store.

    ``device`` memory, where the models are, is the fastest; ``host`` is main memory; ``disk`` is a temporary file (in
    TMPDIR), for more clients than memory holds.
    """
    if place == "disk":
        return DiskStore()
    on_device = place == "device"
    return MemoryStore(device if on_device else torch.device("cpu"), not on_device and device.type == "cuda")
