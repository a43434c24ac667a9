"""The device on which each storage is said to be, and host memory that copies still need.

All storages are really in the host's memory. A place belongs to a storage, so that views share it, and is forgotten
with the storage.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import fedsim

CPU = torch.device("cpu")
_SOURCE = os.path.dirname(fedsim.__file__) + os.sep
_TIDY = 20_000
"""Places that are remembered before those of freed storages are dropped."""


def site(depth: int = 2) -> str:
    """Return the innermost lines of fedsim on the stack,
    such as ``training/client.py:120 < federation/round.py:90``."""
    found: list[str] = []
    frame = sys._getframe(1)
    while frame is not None and len(found) < depth:
        name = frame.f_code.co_filename
        if name.startswith(_SOURCE):
            found.append(f"{name.removeprefix(_SOURCE)}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(found) or "elsewhere"


@dataclass
class _OfStorages:
    """Something about storages, by their address, as long as they live."""

    found: dict[int, tuple[StorageWeakRef, object]] = field(default_factory=dict)

    def get(self, tensor: Tensor) -> object | None:
        kept = self.found.get(_address(tensor))
        return None if kept is None or kept[0].expired() else kept[1]

    def set(self, storage: torch.UntypedStorage, value: object) -> None:
        self.found[storage._cdata] = (StorageWeakRef(storage), value)
        if len(self.found) > _TIDY:
            self.drop_expired()

    def drop_expired(self) -> None:
        """Forget storages that have been freed."""
        self.found = {key: kept for key, kept in self.found.items() if not kept[0].expired()}


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class Places:
    """Devices of storages, page-locked ones, and copies that are under way.

    ``current`` is the number of the current GPU, of ``num_gpus``; ``buses`` are their places in the machine, ``memory``
    the bytes of each. ``peak`` is the largest :meth:`live_bytes` of those that were looked at.
    """

    def __init__(self) -> None:
        self.num_gpus = self.current = self.memory = self.peak = 0
        self.buses: tuple[int, ...] = ()
        self._devices, self._pinned = _OfStorages(), _OfStorages()
        self.locked: dict[int, int] = {}
        """addresses of page-locked memory that is not torch's -> bytes"""
        self._sizes: dict[int, int] = {}
        self._read, self._written = _OfStorages(), _OfStorages()

    def named(self, device: object) -> torch.device:
        """Return a device with its number; raise RuntimeError, as CUDA does, if there is no such GPU."""
        found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)  # type: ignore[arg-type]
        if found.type != "cuda":
            return found
        number = self.current if found.index is None else found.index
        if number >= self.num_gpus:
            raise RuntimeError(f"CUDA error: invalid device ordinal {number}")
        return torch.device("cuda", number)

    def of(self, tensor: Tensor) -> torch.device:
        """Return the device on which a tensor is said to be."""
        try:
            found = self._devices.get(tensor)
        except (NotImplementedError, RuntimeError):  # a sparse tensor: it has no storage, and fedsim has none of them
            return CPU
        return CPU if found is None else found  # type: ignore[return-value]

    def put(self, tensor: Tensor, device: torch.device) -> None:
        """Say that a tensor's storage is on a device."""
        if device.type == "cpu":
            self._devices.found.pop(_address(tensor), None)
        else:
            self._set(tensor.untyped_storage(), self.named(device))

    def inherit(self, old: torch.UntypedStorage, new: torch.UntypedStorage) -> None:
        """Say that a copied storage is where the old one is."""
        kept = self._devices.found.get(old._cdata)
        if kept is not None and not kept[0].expired():
            self._set(new, kept[1])

    def _set(self, storage: torch.UntypedStorage, device: object) -> None:
        self._devices.set(storage, device)
        self._sizes[storage._cdata] = storage.nbytes()

    def live_bytes(self) -> int:
        """Return the bytes of all tensors on GPUs that are alive; a backward pass looks at them as it begins."""
        self._devices.drop_expired()
        self._sizes = {key: self._sizes[key] for key in self._devices.found}
        live = sum(self._sizes.values())
        self.peak = max(self.peak, live)
        return live

    def of_storage(self, storage: torch.UntypedStorage) -> torch.device:
        """Return the device on which a storage is said to be."""
        kept = self._devices.found.get(storage._cdata)
        return CPU if kept is None or kept[0].expired() else kept[1]  # type: ignore[return-value]

    # -- host memory ---------------------------------------------------------------------------------------------------

    def pin(self, tensor: Tensor) -> None:
        """Page-lock a tensor's memory."""
        self._pinned.set(tensor.untyped_storage(), True)

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether a tensor's memory is page-locked."""
        address = tensor.untyped_storage().data_ptr() + tensor.storage_offset() * tensor.element_size()
        is_locked = any(begin <= address < begin + size for begin, size in self.locked.items())
        return is_locked or self._pinned.get(tensor) is not None

    def begin_copy(self, host: Tensor, to_gpu: bool) -> None:
        """Remember that a copy reads host memory, or writes it, until the host waits."""
        (self._read if to_gpu else self._written).set(host.untyped_storage(), site())

    def end_copies(self) -> None:
        """The host has waited for the device: all copies are done."""
        self._read.found.clear()
        self._written.found.clear()

    @property
    def copies_are_under_way(self) -> bool:
        """Whether any copy may still need host memory."""
        return bool(self._read.found or self._written.found)

    def reader(self, tensor: Tensor) -> object | None:
        """Return the line whose copy may still read this host memory, or None."""
        return self._read.get(tensor) if self._read.found else None

    def writer(self, tensor: Tensor) -> object | None:
        """Return the line whose copy may still write this host memory, or None."""
        return self._written.get(tensor) if self._written.found else None
