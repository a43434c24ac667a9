"""Stores of the tensors of many clients between their sessions, in device, host or disk memory."""

from __future__ import annotations

import fcntl
import json
import os
import struct
import tempfile
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fedsim.core.errors import ConfigError
from fedsim.core.transfer import locked_like

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

StorePlace = Literal["device", "host", "disk"]


class ClientStore(ABC):
    """Named tensors of each client. A tensor whose shape and dtype stay is overwritten in place."""

    @abstractmethod
    def read(self, client: str) -> dict[str, Tensor]:
        """Return a client's tensors, empty if it has none. They may be the stored ones: do not write to them."""

    @abstractmethod
    def write(self, client: str, tensors: Mapping[str, Tensor]) -> None:
        """Replace a client's tensors by copies of these; without any, it is as if it never had some."""

    @abstractmethod
    def clients(self) -> set[str]:
        """Return the clients that have tensors."""


class MemoryStore(ClientStore):
    """Tensors in the memory of a device; :meth:`read` returns the stored ones.

    ``pinned`` page-locks host memory, which makes copies to and from a GPU asynchronous.
    """

    def __init__(self, device: torch.device, pinned: bool = False) -> None:
        self.device, self.pinned = device, pinned
        self._kept: dict[str, dict[str, Tensor]] = {}

    def read(self, client: str) -> dict[str, Tensor]:
        """Return a client's tensors; see :meth:`ClientStore.read`."""
        return dict(self._kept.get(client, {}))

    def write(self, client: str, tensors: Mapping[str, Tensor]) -> None:
        """Replace a client's tensors; see :meth:`ClientStore.write`."""
        old = self._kept.pop(client, {})
        if tensors:
            self._kept[client] = {name: self._put(tensor, old.get(name)) for name, tensor in tensors.items()}

    def clients(self) -> set[str]:
        """Return the clients that have tensors."""
        return {*self._kept}

    def _put(self, tensor: Tensor, old: Tensor | None) -> Tensor:
        if old is tensor:
            return old
        if old is None or old.shape != tensor.shape or old.dtype != tensor.dtype:
            if self.pinned:
                return locked_like(tensor, "model.client_store").copy_(tensor)
            old = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
        return old.copy_(tensor)


class FileStore(ClientStore):
    """Tensors in a file that any number of processes has opened; :meth:`read` returns copies on the CPU.

    The file begins with the offset of its end, followed by the position of each client's table of contents; tables and
    tensors follow. A table or tensor is overwritten in place if the new content fits into its room. A process must not
    write a client's tensors while another process reads them.

    Args:
        path: of the file; it may be removed after all processes have opened it.
        clients: names of all clients, in the same order in all processes.
    """

    _END = struct.Struct("<q")
    _HEAD = struct.Struct("<qqq")  # of a table: offset, length, room

    def __init__(self, path: Path, clients: Sequence[str]) -> None:
        self._path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        weakref.finalize(self, os.close, self._file)
        self._heads = {name: self._END.size + row * self._HEAD.size for row, name in enumerate(clients)}
        self._begin = self._END.size + len(clients) * self._HEAD.size

    def read(self, client: str) -> dict[str, Tensor]:
        """Return a client's tensors; see :meth:`ClientStore.read`."""
        return {name: self._read(saved) for name, saved in self._table(self._head(client)).items()}

    def write(self, client: str, tensors: Mapping[str, Tensor]) -> None:
        """Replace a client's tensors; see :meth:`ClientStore.write`; raise ConfigError if the file system is full."""
        head = self._head(client)
        old = self._table(head)
        try:
            new = {name: self._write(tensor, old.get(name)) for name, tensor in tensors.items()}
            if new != old:
                self._write_table(client, head, new)
        except OSError as error:
            raise ConfigError(
                f"model.client_store: no room for the private tensors of {client} in {self._path.parent} "
                f"({error.strerror}); make room there (of a container: --shm-size), or set it to disk, and TMPDIR to a "
                "folder with room"
            ) from error

    def clients(self) -> set[str]:
        """Return the clients that have tensors."""
        heads = os.pread(self._file, self._begin - self._END.size, self._END.size)
        heads += bytes(-len(heads) % self._HEAD.size)  # the file may end within a head
        return {
            name for name, (_, length, _) in zip(self._heads, self._HEAD.iter_unpack(heads), strict=False) if length
        }

    def _head(self, client: str) -> tuple[int, int, int]:
        content = os.pread(self._file, self._HEAD.size, self._heads[client])
        head: tuple[int, int, int] = self._HEAD.unpack(content) if len(content) == self._HEAD.size else (0, 0, 0)
        return head

    def _table(self, head: tuple[int, int, int]) -> Mapping[str, _Saved]:
        offset, length, _ = head
        return _parsed(os.pread(self._file, length, offset)) if length else {}

    def _write_table(self, client: str, head: tuple[int, int, int], table: Mapping[str, _Saved]) -> None:
        entries = [(name, *saved[:2], str(saved.dtype)[6:], list(saved.shape)) for name, saved in table.items()]
        encoded = json.dumps(entries).encode() if entries else b""
        offset, _, room = head
        if len(encoded) > room:
            room = 2 * len(encoded)
            offset = self._allocate(room)
        os.pwrite(self._file, encoded, offset)
        os.pwrite(self._file, self._HEAD.pack(offset, len(encoded), room), self._heads[client])

    def _read(self, saved: _Saved) -> Tensor:
        tensor = torch.empty(saved.shape, dtype=saved.dtype)
        view, offset = bytes_of(tensor), saved.offset
        while view:
            done = os.preadv(self._file, [view], offset)
            assert done > 0, "the store's file was truncated"
            view, offset = view[done:], offset + done
        return tensor

    def _write(self, tensor: Tensor, old: _Saved | None) -> _Saved:
        view = bytes_of(tensor.detach().cpu().contiguous())
        if old is None or old.room < len(view):  # sizes may change from round to round: leave room to grow
            room = len(view) if old is None else len(view) * 5 // 4
            old = _Saved(self._allocate(room), room, tensor.dtype, tensor.shape)
        offset = old.offset
        while view:
            done = os.pwrite(self._file, view, offset)
            view, offset = view[done:], offset + done
        return old._replace(dtype=tensor.dtype, shape=tensor.shape)

    def _allocate(self, num_bytes: int) -> int:
        """Return the offset of new room at the end."""
        with locked(self._file):
            content = os.pread(self._file, self._END.size, 0)
            end = max(self._END.unpack(content)[0] if content else 0, self._begin)
            os.pwrite(self._file, self._END.pack(end + num_bytes), 0)
        return end


class _Saved(NamedTuple):
    offset: int
    room: int
    """bytes reserved for it"""
    dtype: torch.dtype
    shape: torch.Size


@lru_cache(maxsize=4096)
def _parsed(table: bytes) -> Mapping[str, _Saved]:
    return {
        name: _Saved(offset, room, getattr(torch, dtype), torch.Size(shape))
        for name, offset, room, dtype, shape in json.loads(table)
    }


@contextmanager
def locked(file: int) -> Iterator[None]:
    """Hold the lock of a file during the block; the kernel releases the lock of a process that ends."""
    fcntl.lockf(file, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.lockf(file, fcntl.LOCK_UN)


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor."""
    return tensor.flatten().view(torch.uint8).numpy().data


def make_store(store_place: StorePlace, device: torch.device, clients: Sequence[str]) -> ClientStore:
    """Return an empty store of this process, for ``clients``.

    ``device`` memory, where the models are, is the fastest; ``host`` is main memory; ``disk`` is a file in TMPDIR that
    vanishes with the process, for more clients than memory holds.
    """
    if store_place == "disk":
        with tempfile.TemporaryDirectory(prefix="fedsim-") as folder:
            return FileStore(Path(folder) / "states", clients)
    on_device = store_place == "device"
    return MemoryStore(device if on_device else torch.device("cpu"), not on_device and device.type == "cuda")
