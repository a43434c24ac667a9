"""Similarities of Q queries and G gallery images with D features, in float32, one block of queries after another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

import torch
from torch import Tensor

from fedsim.core.progress import note_progress

Distance = Literal["cosine", "euclidean"]

_ROWS = 256  # queries per block, at most
_BLOCK_BYTES = 96 * 2**20  # largest block of similarities in memory: large galleries get fewer queries per block


class NotFiniteError(ValueError):
    """A feature vector is NaN or infinite, or its length is in float32."""


def query_blocks(num_queries: int, num_gallery: int) -> list[slice]:
    """Cut queries into blocks. All callers use these: another number of rows can change the bits of a product.

    >>> query_blocks(600, 1000)
    [slice(0, 256, None), slice(256, 512, None), slice(512, 600, None)]
    """
    rows = max(1, min(_ROWS, _BLOCK_BYTES // (4 * max(num_gallery, 1))))
    return [slice(start, min(start + rows, num_queries)) for start in range(0, num_queries, rows)]


@contextmanager
def exact_products() -> Iterator[None]:
    """Compute matrix products in full float32: no autocast, no TF32."""
    places = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined] # not in torch's stubs
    before = [backend.fp32_precision for backend in places]
    for backend in places:
        backend.fp32_precision = "ieee"
    try:
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            yield
    finally:
        for backend, precision in zip(places, before, strict=True):
            backend.fp32_precision = precision


class Similarity:
    """The matrix of similarities, one block at a time.

    ``cosine``: q.g / (|q||g|). ``euclidean``: q.g - |g|^2 / 2, which orders a query's gallery like the distance.
    Query [Q, D] and gallery [G, D], on one device, are never copied as a whole: norms are applied to the products.
    Raises ValueError if shapes do not fit or features are not finite.
    """

    def __init__(self, query: Tensor, gallery: Tensor, distance: Distance = "cosine") -> None:
        if distance not in get_args(Distance):
            raise ValueError(f"distance: there is no {distance}; choose from {', '.join(get_args(Distance))}")
        if query.dim() != 2 or gallery.dim() != 2 or query.shape[1] != gallery.shape[1]:
            raise ValueError(f"query: {list(query.shape)} and gallery: {list(gallery.shape)} are not [Q, D] and [G, D]")
        self.query, self.gallery, self.distance = query.detach().float(), gallery.detach().float(), distance
        self._query_norms, self._gallery_norms = (_norms(part) for part in (self.query, self.gallery))
        _check_finite({"query": (query, self._query_norms), "gallery": (gallery, self._gallery_norms)})
        if distance == "euclidean":  # not from the norms: rounded roots would separate equal images
            self._half_squares = torch.cat([part.square().sum(1) / 2 for part in self.gallery.split(_ROWS)])
        self._queries = torch.empty_like(self.query[:_ROWS], requires_grad=False)
        self._buffer = self.gallery.new_empty(0)

    @property
    def blocks(self) -> list[slice]:
        """The blocks of queries."""
        return query_blocks(len(self.query), len(self.gallery))

    def __iter__(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield (queries, their similarities [b, G]) for all blocks; the next block overwrites the similarities."""
        for rows in self.blocks:
            yield rows, self.block(rows)

    def block(self, rows: slice | list[int]) -> Tensor:
        """Return the similarities of some queries, [b, G] float32; the next call overwrites them."""
        note_progress()  # a large gallery takes long
        query = self.query[rows]
        if self.distance == "cosine":  # into a buffer: a new tensor for every block would leave holes in the heap
            query = torch.div(query, self._query_norms[rows, None], out=self._queries[: len(query)])
        size = len(query) * len(self.gallery)
        if self._buffer.numel() < size:
            self._buffer = self.gallery.new_empty(size)
        out = self._buffer[:size].view(len(query), len(self.gallery))
        with exact_products():
            torch.mm(query, self.gallery.T, out=out)
            if self.distance == "cosine":
                return out.div_(self._gallery_norms)
            return out.sub_(self._half_squares)


def _norms(features: Tensor) -> Tensor:
    """Return the lengths of the rows [n], at least 1e-12; NaN and infinity stay."""
    norms: Tensor = torch.linalg.vector_norm(features, dim=1).clamp_min_(1e-12)
    return norms


def _check_finite(parts: dict[str, tuple[Tensor, Tensor]]) -> None:
    """Raise NotFiniteError if a length is not finite; ``parts``: name -> features and lengths.

    The host waits for the device once.
    """
    all_good = torch.stack([lengths.isfinite().all() for _, lengths in parts.values()]).tolist()
    for (name, (features, lengths)), good in zip(parts.items(), all_good, strict=True):
        if not good:
            image = int((~lengths.isfinite()).nonzero()[0])
            if features[image].isfinite().all():
                largest = float(features[image].abs().max())
                raise NotFiniteError(
                    f"{name}: the features of image {image} reach {largest:.3g}, and float32 cannot hold their length"
                )
            raise NotFiniteError(f"{name}: the features of image {image} are not finite")
