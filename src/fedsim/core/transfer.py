"""Copies from the host's memory to a device."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on ``device``; the copy to a GPU is asynchronous.

    Only copies from page-locked memory are asynchronous; torch keeps its blocks for the next copy.

    >>> send(torch.ones(2), torch.device("cpu"))
    tensor([1., 1.])
    """
    if device.type == "cuda" and tensor.is_cpu:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


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
