"""Two ways to the same ranks: torch's matrix product with counting, and FAISS's lists with counting beyond them.

``torch`` is exact at any gallery size, in bounded memory, and the quicker of the two for CMC and mAP. ``faiss`` asks an
index for each query's first k images; a query all of whose matches are among them is done, the others are counted by
``torch``. Values of the two libraries differ in their last bits, so a query's ranks come from one of them, never both.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, Literal, Protocol, get_args

import numpy as np
import torch
from torch import Tensor

from fedsim.core.errors import ConfigError
from fedsim.evaluation.counting import count_ranks
from fedsim.evaluation.labels import Ints, RetrievalLabels
from fedsim.functional.neighbours import Neighbours, Search, nearest
from fedsim.functional.similarity import Distance, Similarity

__all__ = ["Backend", "BackendName", "FaissBackend", "TorchBackend", "make_backend", "make_search"]

BackendName = Literal["auto", "torch", "faiss"]

_MOST = 2048
"""Images per list: the limit of FAISS's selection on GPUs."""

_TEMPORARY_BYTES = 256 * 2**20
"""That FAISS may take on a GPU, outside of torch's memory; its own default is 1.5 GiB."""


class Backend(Protocol):
    """What ranks galleries."""

    def ranks(
        self, query: Tensor, gallery: Tensor, labels: RetrievalLabels, distance: Distance, blocks: Iterable[slice]
    ) -> list[Ints]:
        """Return the ascending ranks of the matches of each query in ``blocks``, in that order.

        Args:
            query: [Q, D].
            gallery: [G, D], on the same device.
            labels: of all queries and gallery images.
            distance: what is ranked by.
            blocks: some of :func:`fedsim.functional.similarity.query_blocks`.
        """

    def nearest(self, query: Tensor, gallery: Tensor, k: int, distance: Distance) -> Neighbours:
        """Return the k nearest gallery images of each query."""


class TorchBackend:
    """Blocks of similarities and counting, on the features' own device."""

    def ranks(
        self, query: Tensor, gallery: Tensor, labels: RetrievalLabels, distance: Distance, blocks: Iterable[slice]
    ) -> list[Ints]:
        """See :class:`Backend`."""
        similarity = Similarity(query, gallery, distance)
        return [row for rows in blocks for row in count_ranks(similarity.block(rows), labels.take(rows))]

    def nearest(self, query: Tensor, gallery: Tensor, k: int, distance: Distance) -> Neighbours:
        """See :func:`fedsim.functional.neighbours.nearest`."""
        return nearest(query, gallery, k, distance)


class FaissBackend:
    """Lists from FAISS's exact search, on the features' own device.

    Args:
        k: images per list, at most 2048; more are slower to find, fewer leave more queries to counting.

    Raises:
        ConfigError: if FAISS is not installed.
    """

    def __init__(self, k: int = 1000) -> None:
        _load_faiss()
        self.k = min(k, _MOST)

    def ranks(
        self, query: Tensor, gallery: Tensor, labels: RetrievalLabels, distance: Distance, blocks: Iterable[slice]
    ) -> list[Ints]:
        """See :class:`Backend`."""
        similarity = Similarity(query, gallery, distance)
        prepared = _prepared(gallery, distance)
        found: list[Ints] = []
        for rows in blocks:
            lists = self._search(_prepared(query[rows], distance), prepared, self.k, distance)
            ranks = _ranks_in_lists(lists, labels.take(rows))
            missing = [rows.start + q for q, row in enumerate(ranks) if row is None]
            counted = iter(count_ranks(similarity.block(missing), labels.take(missing)) if missing else ())
            found += [next(counted) if row is None else row for row in ranks]
        return found

    def nearest(self, query: Tensor, gallery: Tensor, k: int, distance: Distance) -> Neighbours:
        """See :class:`Backend`; which of several equally similar images is the last of a list is FAISS's choice.

        Raises:
            ConfigError: if features are on a GPU for which FAISS was not built, or k is too large for one.
            ValueError: see :class:`fedsim.functional.similarity.Similarity`.
        """
        Similarity(query, gallery, distance)  # checks them: FAISS would return nonsense
        return self._search(_prepared(query, distance), _prepared(gallery, distance), k, distance)

    def nearest_units(self, query: Tensor, gallery: Tensor, k: int) -> Neighbours:
        """:meth:`nearest` by cosine for rows of unit length, of which it makes no copies."""
        return self._search(_plain(query), _plain(gallery), k, "cosine")

    @property
    def _faiss(self) -> Any:
        return _load_faiss()  # not kept: modules cannot be pickled

    def _search(self, query: Tensor, gallery: Tensor, k: int, distance: Distance) -> Neighbours:
        k = min(k, len(gallery))
        metric = self._faiss.METRIC_INNER_PRODUCT if distance == "cosine" else self._faiss.METRIC_L2
        if query.is_cuda:
            if k > _MOST:
                raise ConfigError(f"backend: faiss finds at most {_MOST} neighbours on a GPU, not {k}; use torch")
            values, index = self._search_on_gpu(query, gallery, k, metric)
        else:
            values, index = self._faiss.knn(query.numpy(), gallery.numpy(), k, metric=metric)
        if distance == "euclidean":
            values = -values
        order = np.lexsort((index, -values), axis=1)
        return Neighbours(np.take_along_axis(index, order, 1).astype(np.int64), np.take_along_axis(values, order, 1))

    def _search_on_gpu(self, query: Tensor, gallery: Tensor, k: int, metric: int) -> tuple[Any, Any]:
        if not hasattr(self._faiss, "StandardGpuResources") or self._faiss.get_num_gpus() == 0:
            raise ConfigError("backend: this FAISS cannot use the GPU; install faiss-gpu or use torch")
        import faiss.contrib.torch_utils  # noqa: F401 - lets FAISS read torch's GPU tensors where they are

        torch.cuda.current_stream(query.device).synchronize()  # FAISS works on a stream of its own
        found = self._faiss.knn_gpu(_gpu_resources(), query, gallery, k, metric=metric, device=query.device.index)
        values, index = (part.cpu().numpy() for part in found)
        return values, index


def make_backend(name: BackendName) -> Backend:
    """Return the backend of that name; ``auto`` is ``torch``: quicker on CPUs, and no second allocator on GPUs.

    Raises:
        ConfigError: if ``faiss`` is wanted and not installed.
    """
    if name not in get_args(BackendName):
        raise ConfigError(f"backend: there is no {name}; choose from {', '.join(get_args(BackendName))}")
    return FaissBackend() if name == "faiss" else TorchBackend()


def make_search(name: BackendName, device: torch.device) -> Search:
    """Return a search for neighbours by cosine; ``auto`` is FAISS where it can use ``device``, else torch.

    Raises:
        ConfigError: if ``faiss`` is wanted and not installed.
    """
    if name == "faiss" or (name == "auto" and _faiss_can_use(device)):
        return FaissBackend().nearest_units
    return nearest


def _ranks_in_lists(lists: Neighbours, labels: RetrievalLabels) -> list[Ints | None]:
    """Ranks of each query's matches, or None where one of them is not safely inside the list."""
    ranks: list[Ints | None] = []
    whole = lists.index.shape[1] == len(labels.gallery_pids)
    columns = np.zeros(len(labels.gallery_pids), dtype=bool)
    columns[labels.junk_columns] = True
    for q, (index, values) in enumerate(zip(lists.index, lists.similarity, strict=True)):
        good, junk = labels.positives_and_junk(q)
        is_match = np.isin(index, good)
        # images as similar as the last one may be missing from the list
        inside = int((is_match & (whole | (values > values[-1]))).sum()) if len(values) else 0
        if inside < len(good):
            ranks.append(None)
            continue
        counts = ~(columns[index] | np.isin(index, junk))
        ranks.append(np.cumsum(counts)[is_match])
    return ranks


def _plain(features: Tensor) -> Tensor:
    return features.detach().float().contiguous()


def _prepared(features: Tensor, distance: Distance) -> Tensor:
    features = _plain(features)
    return torch.nn.functional.normalize(features) if distance == "cosine" else features


def _load_faiss() -> Any:
    try:
        import faiss
    except ImportError as error:
        raise ConfigError(
            f"backend: FAISS cannot be loaded ({error}); install faiss-gpu or faiss-cpu, or use torch"
        ) from error
    return faiss


def _faiss_can_use(device: torch.device) -> bool:
    try:
        faiss = _load_faiss()
    except ConfigError:
        return False
    return device.type == "cpu" or bool(hasattr(faiss, "StandardGpuResources") and faiss.get_num_gpus())


@functools.cache
def _gpu_resources() -> Any:
    """One per process: each would reserve memory of its own."""
    resources = _load_faiss().StandardGpuResources()
    resources.setTempMemory(_TEMPORARY_BYTES)
    return resources
