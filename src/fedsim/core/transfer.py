"""Copies from the host's memory to a device."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from mmap import PAGESIZE

import torch
from torch import Tensor

from fedsim.core.errors import ConfigError

_ON_ALL_GPUS = 1
"""cudaHostRegisterPortable"""


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on ``device``; the copy to a GPU is asynchronous.

    Only copies from page-locked memory are asynchronous; torch keeps its blocks for the next copy.

    >>> send(torch.ones(2), torch.device("cpu"))
    tensor([1., 1.])
    """
    if device.type == "cuda" and tensor.is_cpu:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def locked_like(tensor: Tensor, setting: str) -> Tensor:
    """Return a new CPU tensor of the shape and dtype of another; copies between it and a GPU are asynchronous.

    It has page-locked pages of its own. torch's own page-locked memory has a power of two of bytes for each tensor: up
    to twice as much, which is for tensors that come and go.

    Raises:
        ConfigError: if CUDA locks no more memory; ``setting`` asked for it.
    """
    size = -(-tensor.nbytes // PAGESIZE) * PAGESIZE
    memory, cuda = torch.empty(size + PAGESIZE, dtype=torch.uint8), torch.cuda.cudart()
    start = -memory.data_ptr() % PAGESIZE
    if size:
        address = memory.data_ptr() + start
        if code := int(cuda.cudaHostRegister(address, size, _ON_ALL_GPUS)):
            raise ConfigError(f"{setting}: CUDA locks no more of the host's memory (its error {code}); set it to disk")
        unlock = weakref.finalize(memory.untyped_storage(), cuda.cudaHostUnregister, address)
        unlock.atexit = False  # CUDA ends with the process
    return memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def ahead(tensors: Iterator[Tensor], copies: torch.cuda.Stream) -> Iterator[Tensor]:
    """Yield tensors on a GPU; each is copied there on the stream ``copies`` while its predecessor is used.

    On the usual stream, a copy would wait for work that was queued before it, and later work would wait for the copy.
    """

    def fetch() -> tuple[Tensor | None, torch.cuda.Event]:
        with torch.cuda.stream(copies):
            return next(tensors, None), copies.record_event()

    tensor, arrived = fetch()
    while tensor is not None:
        prefetched = fetch()
        work = torch.cuda.current_stream(copies.device)
        work.wait_event(arrived)
        tensor.record_stream(work)  # else the next copy could get its memory once the host drops it
        yield tensor
        tensor, arrived = prefetched
