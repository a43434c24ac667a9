"""Where the tensors of many clients wait between their visits: device, host or disk memory."""

from __future__ import annotations

import os
import tempfile
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

__all__ = ["STORABLE", "ClientStore", "DiskStore", "MemoryStore", "Place", "bytes_of", "make_store"]

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
    """Named tensors of each client."""

    @abstractmethod
    def read(self, client: str) -> dict[str, Tensor]:
        """Return a client's tensors, empty if it has none. They may be the stored ones: do not write to them."""

    @abstractmethod
    def write(self, client: str, tensors: Mapping[str, Tensor]) -> None:
        """Replace a client's tensors by copies of these."""

    @abstractmethod
    def clients(self) -> list[str]:
        """Return the clients that have tensors."""


class MemoryStore(ClientStore):
    """Tensors in the memory of a device; a tensor whose shape stays is overwritten in place.

    Args:
        device: where.
        pinned: whether host memory is page-locked, which makes copies to and from a GPU asynchronous.
    """

    def __init__(self, device: torch.device, pinned: bool = False) -> None:
        self.device = device
        self.pinned = pinned
        self._tensors: dict[str, dict[str, Tensor]] = {}

    def read(self, client: str) -> dict[str, Tensor]:
        """Return the stored tensors themselves."""
        return dict(self._tensors.get(client, {}))

    def write(self, client: str, tensors: Mapping[str, Tensor]) -> None:
        """Copy into the store."""
        old = self._tensors.get(client, {})
        self._tensors[client] = {name: self._copy(tensor, old.get(name)) for name, tensor in tensors.items()}

    def _copy(self, tensor: Tensor, old: Tensor | None) -> Tensor:
        if old is tensor:
            return old
        if old is None or old.shape != tensor.shape or old.dtype != tensor.dtype:
            old = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device, pin_memory=self.pinned)
        return old.copy_(tensor)

    def clients(self) -> list[str]:
        """Return the clients that were written."""
        return list(self._tensors)


class DiskStore(ClientStore):
    """Tensors in one file without a name, which vanishes with the process.

    What is written again takes its old place as long as its size stays.

    Args:
        folder: where the file is made; None takes the system's folder for temporary files.
    """

    def __init__(self, folder: str | None = None) -> None:
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - open as long as the store lives
        weakref.finalize(self, self._file.close)
        self._places: dict[str, dict[str, tuple[int, torch.dtype, torch.Size]]] = {}
        self._end = 0

    def read(self, client: str) -> dict[str, Tensor]:
        """Read fresh copies, on the CPU."""
        return {name: self._read(*place) for name, place in self._places.get(client, {}).items()}

    def write(self, client: str, tensors: Mapping[str, Tensor]) -> None:
        """Write through the page cache."""
        old = self._places.get(client, {})
        self._places[client] = {name: self._write(tensor, old.get(name)) for name, tensor in tensors.items()}

    def clients(self) -> list[str]:
        """Return the clients that were written."""
        return list(self._places)

    def _read(self, offset: int, dtype: torch.dtype, shape: torch.Size) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype)
        view = bytes_of(tensor)
        while view:
            done = os.preadv(self._file.fileno(), [view], offset)
            assert done > 0, "the store's file was truncated"
            view, offset = view[done:], offset + done
        return tensor

    def _write(
        self, tensor: Tensor, old: tuple[int, torch.dtype, torch.Size] | None
    ) -> tuple[int, torch.dtype, torch.Size]:
        view = bytes_of(tensor.detach().cpu().contiguous())
        offset = self._end
        if old is not None and (old[1], old[2]) == (tensor.dtype, tensor.shape):
            offset = old[0]
        else:
            self._end += len(view)
        place = (offset, tensor.dtype, tensor.shape)
        while view:
            done = os.pwrite(self._file.fileno(), view, offset)
            view, offset = view[done:], offset + done
        return place


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor."""
    return tensor.flatten().view(torch.uint8).numpy().data


def make_store(place: Place, device: torch.device) -> ClientStore:
    """Return an empty store.

    Args:
        place: ``device``: beside the models, the fastest; ``host``: in main memory; ``disk``: in a temporary file (of
            TMPDIR), for more clients than memory holds.
        device: of the models.
    """
    if place == "disk":
        return DiskStore()
    on_device = place == "device"
    return MemoryStore(device if on_device else torch.device("cpu"), not on_device and device.type == "cuda")
