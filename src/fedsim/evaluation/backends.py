"""Two ways to the ranks of matches: ``torch`` counts; ``faiss`` finds lists first and counts the missing matches.

``torch`` is exact at any gallery size, in bounded memory, and the faster one for CMC and mAP. ``faiss`` asks an index
for each query's first k images; queries with a match beyond these are counted by ``torch``. The similarities of the two
libraries differ in their last bits, so all ranks of a query come from one of them.

Counting needs no sort and no full matrix. The rank of a match at gallery position p with similarity s is 1 + the number
of images before it: those at positions below p with similarity >= s, those above p with similarity > s.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, Literal, Protocol, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.core.errors import ConfigError
from fedsim.core.extras import load_extra
from fedsim.core.transfer import send
from fedsim.evaluation.ranking import Ints, RetrievalLabels
from fedsim.functional.neighbours import Neighbours, Search, nearest
from fedsim.functional.similarity import Distance, Similarity

BackendName = Literal["auto", "torch", "faiss"]

_MOST = 2048  # images per list: the limit of FAISS's selection on GPUs
_TEMPORARY_BYTES = 256 * 2**20  # FAISS's memory on a GPU, outside of torch's; the default is 1.5 GiB
_FEW = 512  # up to so many candidates, sorting is faster than counting


class Backend(Protocol):
    """Ranks galleries."""

    def ranks(
        self, query: Tensor, gallery: Tensor, labels: RetrievalLabels, distance: Distance, blocks: Iterable[slice]
    ) -> list[Ints]:
        """Return the ascending ranks of the matches of each query in ``blocks``, in that order.

        Query [Q, D] and gallery [G, D] are on one device, ``labels`` are of all of them, ``blocks`` are some of
        :func:`fedsim.functional.similarity.query_blocks`.
        """


def make_backend(name: BackendName) -> Backend:
    """Return the backend of that name; ``auto`` is ``torch``: faster on CPUs, and no second allocator on GPUs.

    Raises ConfigError if ``faiss`` is not installed.
    """
    if name not in get_args(BackendName):
        raise ConfigError(f"backend: there is no {name}; choose from {', '.join(get_args(BackendName))}")
    return FaissBackend() if name == "faiss" else TorchBackend()


def make_search(name: BackendName, device: torch.device) -> Search:
    """Return a search for neighbours by cosine; ``auto`` is FAISS if it can use ``device``, else torch.

    Raises ConfigError if ``faiss`` is not installed.
    """
    if name == "faiss" or (name == "auto" and _faiss_can_use(device)):
        return FaissBackend().nearest_units
    return nearest


class TorchBackend:
    """Blocks of similarities and counting, on the device of the features."""

    def ranks(
        self, query: Tensor, gallery: Tensor, labels: RetrievalLabels, distance: Distance, blocks: Iterable[slice]
    ) -> list[Ints]:
        """See :class:`Backend`."""
        similarity = Similarity(query, gallery, distance)
        return [row for rows in blocks for row in count_ranks(similarity.block(rows), labels.take(rows))]


def count_ranks(similarity: Tensor, labels: RetrievalLabels) -> list[Ints]:
    """Return the ranks of all matches: the fast version of :func:`fedsim.evaluation.ranking.positive_ranks`.

    ``similarity`` is [b, G] float32, finite, larger is closer, on a CPU or GPU; junk is overwritten with -inf. The
    ``labels`` are those of its b queries and G gallery images.

    >>> labels = RetrievalLabels(np.array([1]), np.array([0]), np.array([2, 1, 3, 1]), np.array([1, 1, 1, 2]))
    >>> count_ranks(torch.tensor([[0.9, 0.8, 0.7, 0.8]]), labels)
    [array([2, 3])]
    """
    positives = mask_junk(similarity, labels)
    if not similarity.is_cpu:
        return count_on_device(similarity, positives)
    return [_count_in_row(row, good) for row, good in zip(similarity.numpy(), positives, strict=True)]


def mask_junk(similarity: Tensor, labels: RetrievalLabels) -> list[Ints]:
    """Overwrite junk in ``similarity`` [b, G] with -inf; return the ascending positions of each query's matches."""
    device = similarity.device
    sorted_out = [labels.positives_and_junk(q) for q in range(len(labels.query_pids))]
    similarity.index_fill_(1, send(torch.from_numpy(labels.junk_columns), device), -torch.inf)
    rows = np.repeat(np.arange(len(sorted_out)), [len(junk) for _, junk in sorted_out])
    columns = np.concatenate([junk for _, junk in sorted_out]) if sorted_out else rows
    places = send(torch.from_numpy(np.stack([rows, columns])), device)
    similarity.index_put_(tuple(places), similarity.new_full((), -torch.inf))
    return [good for good, _ in sorted_out]


def _count_in_row(row: NDArray[np.float32], positives: Ints) -> Ints:
    """Return the ranks of the gallery positions ``positives`` (ascending) by similarity ``row`` [G]."""
    if len(positives) == 0:
        return positives
    candidates = np.flatnonzero(row >= row[positives].min())  # images after the last match change no rank
    if len(candidates) <= _FEW:
        order = np.argsort(-row[candidates], kind="stable")
        is_match = np.isin(candidates[order], positives, assume_unique=True)
        return np.flatnonzero(is_match) + 1
    ranks = [
        1 + np.count_nonzero(row[:p] >= row[p]) + np.count_nonzero(row[p + 1 :] > row[p]) for p in positives.tolist()
    ]
    return np.sort(np.array(ranks, dtype=np.int64))


def count_on_device(similarity: Tensor, positives: list[Ints]) -> list[Ints]:
    """Count in whole blocks of ``similarity`` [b, G], for devices where many small steps are slow.

    It waits for the device once per block, and launches the same few kernels for any number of matches and of equal
    similarities: an image's key, its similarity before its position, is larger than those of all images after it. Junk
    is at -inf; ``positives`` are b arrays of ascending gallery positions.
    """
    counts = [len(good) for good in positives]
    most = max(counts, default=0)
    if most == 0:
        return [good.copy() for good in positives]
    padded = np.full((len(positives), most), -1, dtype=np.int64)
    for row, good in zip(padded, positives, strict=True):
        row[: len(good)] = good
    keys, at = _sortable(similarity), send(torch.from_numpy(padded), similarity.device)
    matches = torch.where(at < 0, torch.iinfo(torch.int64).min, keys.gather(1, at.clamp_min(0))).sort(dim=1).values
    # each image stands before so many matches of the row; the sums of the images that stand before a match are its rank
    before = torch.searchsorted(matches, keys)
    images = torch.zeros(len(keys), most + 1, dtype=torch.int64, device=keys.device)
    images.scatter_add_(1, before, torch.ones_like(before))
    ranks = 1 + images[:, 1:].flip(1).cumsum(1)  # of the last match of a sorted row first, which is the most similar
    return [row[:count] for row, count in zip(ranks.cpu().numpy(), counts, strict=True)]


def _sortable(similarity: Tensor) -> Tensor:
    """Return int64 [b, G] that have the order of a gallery: by similarity, and of equal images the first is larger."""
    bits = (similarity + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)  # floats below 0 have falling bits
    return (ordered << 32) + torch.arange(similarity.shape[1] - 1, -1, -1, device=similarity.device)


class FaissBackend:
    """Lists from FAISS's exact search, on the device of the features; raises ConfigError if FAISS is not installed.

    ``k`` is their length, at most 2048. Longer lists take more time to find, shorter ones leave more to counting.
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
        ranks_of_all: list[Ints] = []
        for rows in blocks:
            lists = _search(_prepared(query[rows], distance), prepared, self.k, distance)
            ranks = _ranks_in_lists(lists, labels.take(rows))
            missing = [rows.start + q for q, row in enumerate(ranks) if row is None]
            counted = iter(count_ranks(similarity.block(missing), labels.take(missing)) if missing else ())
            ranks_of_all += [next(counted) if row is None else row for row in ranks]
        return ranks_of_all

    def nearest_units(self, query: Tensor, gallery: Tensor, k: int) -> Neighbours:
        """Search by cosine among rows of unit length: see :data:`fedsim.functional.neighbours.Search`.

        Raises ConfigError if features are on a GPU for which FAISS was not built, or k is too large for one.
        """
        return _search(_plain(query), _plain(gallery), k, "cosine")


def _search(query: Tensor, gallery: Tensor, k: int, distance: Distance) -> Neighbours:
    """Return the k nearest; FAISS chooses among images that are as similar as the last one."""
    faiss, k = _load_faiss(), min(k, len(gallery))
    metric = faiss.METRIC_INNER_PRODUCT if distance == "cosine" else faiss.METRIC_L2
    if query.is_cuda:
        if k > _MOST:
            raise ConfigError(f"backend: faiss finds at most {_MOST} neighbours on a GPU, not {k}; use torch")
        values, index = _search_on_gpu(query, gallery, k, metric)
    else:
        values, index = faiss.knn(query.numpy(), gallery.numpy(), k, metric=metric)
    if distance == "euclidean":
        values = -values
    order = np.lexsort((index, -values), axis=1)
    return Neighbours(np.take_along_axis(index, order, 1).astype(np.int64), np.take_along_axis(values, order, 1))


def _search_on_gpu(query: Tensor, gallery: Tensor, k: int, metric: int) -> tuple[Any, Any]:
    if not _has_gpus():
        raise ConfigError("backend: this FAISS cannot use the GPU; install faiss-gpu or use torch")
    import faiss.contrib.torch_utils

    with torch.cuda.device(query.device):  # FAISS takes its stream: on another device's it would run too early
        torch.cuda.current_stream().synchronize()  # FAISS works on a stream of its own
        lists = faiss.knn_gpu(_gpu_resources(), query, gallery, k, metric=metric, device=query.device.index)
    values, index = (part.cpu().numpy() for part in lists)
    return values, index


def _ranks_in_lists(lists: Neighbours, labels: RetrievalLabels) -> list[Ints | None]:
    """Return the ranks of each query's matches, or None if one of them may not be in the list."""
    ranks: list[Ints | None] = []
    whole = lists.index.shape[1] == len(labels.gallery_pids)
    for q, (index, values) in enumerate(zip(lists.index, lists.similarity, strict=True)):
        good, junk = labels.positives_and_junk(q)
        is_match = np.isin(index, good)
        # images as similar as the last one may be missing from the list
        inside = int((is_match & (whole | (values > values[-1]))).sum()) if len(values) else 0
        if inside < len(good):
            ranks.append(None)
            continue
        counts = ~(labels.is_junk[index] | np.isin(index, junk))
        ranks.append(np.cumsum(counts)[is_match])
    return ranks


def _plain(features: Tensor) -> Tensor:
    return features.detach().float().contiguous()


def _prepared(features: Tensor, distance: Distance) -> Tensor:
    features = _plain(features)
    return torch.nn.functional.normalize(features) if distance == "cosine" else features


def _load_faiss() -> Any:
    return load_extra("faiss", "backend", "faiss", instead="use torch")


def _faiss_can_use(device: torch.device) -> bool:
    try:
        _load_faiss()
    except ConfigError:
        return False
    return device.type == "cpu" or _has_gpus()


def _has_gpus() -> bool:
    faiss = _load_faiss()
    return hasattr(faiss, "StandardGpuResources") and faiss.get_num_gpus() > 0


@functools.cache
def _gpu_resources() -> Any:
    """Return the memory of FAISS on GPUs, one per process: each would reserve its own."""
    resources = _load_faiss().StandardGpuResources()
    resources.setTempMemory(_TEMPORARY_BYTES)
    return resources
