"""Encoding of images by their k-reciprocal neighbours, in memory that grows with n * k, not with n * n.

n images, D features. Features are L2-normalised here. Similarity is the cosine; the original distance is the squared
Euclidean one of unit vectors, d = 2 - 2 cos (Eq. 1 with M = I).

The equations are those of Z. Zhong, L. Zheng, D. Cao, S. Li, "Re-ranking Person Re-identification with k-reciprocal
Encoding", CVPR 2017. It leaves these details open, or its authors' code, the source of the published numbers, differs:

- N(p, k) is the image itself and its k nearest others, for k1 and k1 / 2. For k2 it is k2 images with the image itself,
  so k2 = 1 means no expansion. Neighbours are searched among queries and gallery together. All as in the code.
- An image is always its own first neighbour. In the code it can miss itself among many duplicates (then 0 / 0).
- k1 / 2 is rounded to the nearest integer, halves to even, as in the code.
- "At least two thirds" in Eq. 4 is the paper's, ``rules="paper"``; the code asks for more, ``rules="code"``.
- V is divided by its row's sum (the code; otherwise the weights in Eqs. 8-9 depend on the size of the set).
- ``scale="farthest"`` divides d in Eqs. 7 and 12 by the distance to the row's farthest image, as in the code and the
  published "+RR" numbers. ``scale="none"`` is plain d.

Public code for clustering (SpCL, cluster-contrast, CAP) has other rules, ``rules="clustering"``: its search returns
k1 neighbours with the image itself, so N(p, k1) has one image less, but not N(p, k1 / 2); "more than" two thirds;
plain d.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from fedsim.core.errors import ConfigError
from fedsim.core.progress import note_progress
from fedsim.functional.neighbours import Neighbours, Search

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
Csr: TypeAlias = Any  # scipy.sparse.csr_array
Scale = Literal["farthest", "none"]
Rules = Literal["code", "paper", "clustering"]

_PAIRS = 1 << 22  # numbers gathered at once for the distances of pairs: 16 MiB
_TINY = 1e-6  # a smaller largest distance is rounding error of float32


def encode(
    features: Tensor, search: Search, k1: int = 20, k2: int = 6, scale: Scale = "farthest", rules: Rules = "code"
) -> Csr:
    """Encode each image by its k-reciprocal neighbours (Eqs. 2-4, 7, 11).

    Two searches (one with ``scale="none"``), then sparse products: time and memory grow with n * k1.

    Args:
        features: [n, D], any float type.
        search: finds neighbours, exactly or approximately, on a CPU or GPU.
        k1: neighbours for the reciprocal sets; n - 1 if there are fewer.
        k2: images to average over, with the image itself, from 1 (no expansion) to k1.
        scale: see the module.
        rules: see the module.

    Returns:
        V, scipy.sparse.csr_array [n, n] float32: row p holds the weights of p's neighbourhood, of sum 1.

    Raises:
        ConfigError: if k1, k2 or scale is out of range.
        ValueError: if the search does not return [n, k] rows of the gallery.

    >>> def search(query: Tensor, gallery: Tensor, k: int) -> Neighbours:
    ...     result = (query @ gallery.T).sort(descending=True, stable=True)
    ...     return Neighbours(result.indices[:, :k].numpy(), result.values[:, :k].numpy())
    >>> encode(torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]), search, k1=1, k2=1).toarray()
    array([[0.5, 0.5, 0. ],
           [0.5, 0.5, 0. ],
           [0. , 0. , 1. ]], dtype=float32)
    """
    return encode_units(unit(features), search, k1, k2, scale, rules)[0]


def jaccard_blocks(encodings: Csr, rows: Ints, columns: Ints, block: int = 256) -> Iterator[tuple[slice, Floats]]:
    """Yield Jaccard distances (Eqs. 8-10) as dense blocks: (positions in ``rows``, [b, C] float32 in [0, 1]).

    ``encodings`` are [n, n] sparse, not negative, see :func:`encode`; ``rows`` [R] are images such as the queries,
    ``columns`` [C] others such as the gallery. A block takes 4 * ``block`` * C bytes.

    >>> from scipy import sparse
    >>> v = sparse.csr_array(np.array([[0.5, 0.5], [0.0, 1.0]], dtype=np.float32))
    >>> [(part, d.round(4)) for part, d in jaccard_blocks(v, np.arange(2), np.arange(2))]
    [(slice(0, 2, None), array([[0.    , 0.6667],
           [0.6667, 0.    ]], dtype=float32))]
    """
    overlap = _Overlap(encodings, columns)
    for start in range(0, len(rows), block):
        part = slice(start, min(start + block, len(rows)))
        distance = np.ones((part.stop - start, len(columns)), dtype=np.float32)
        note_progress()
        for out, row in zip(distance, rows[part], strict=True):
            images, values = overlap.neighbours(row)
            out[images] = values
        yield part, distance


def sparse_jaccard(encodings: Csr, eps: float) -> Csr:
    """Return the Jaccard distances of all pairs up to eps, for ``DBSCAN(eps, metric="precomputed")``.

    From ``encodings`` [n, n] (:func:`encode`) to a scipy.sparse.csr_array [n, n] float32, symmetric, sorted by column
    within each row. Zeros, such as the diagonal, are stored: for scikit-learn, pairs that are not stored are far.
    Images without common neighbours have distance 1; raise ConfigError unless eps is in (0, 1).

    >>> from scipy import sparse
    >>> v = sparse.csr_array(np.array([[0.5, 0.5, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]], dtype=np.float32))
    >>> graph = sparse_jaccard(v, eps=0.7)
    >>> graph.indices.tolist(), graph.data.round(2)
    ([0, 1, 0, 1, 2], array([0.  , 0.67, 0.67, 0.  , 0.  ], dtype=float32))
    """
    if not 0 < eps < 1:
        raise ConfigError(f"eps: {eps} is not between 0 and 1, both excluded")
    num = encodings.shape[0]
    overlap = _Overlap(encodings, np.arange(num))
    indices, values, ends = [], [], np.zeros(num + 1, dtype=np.int64)
    for row in range(num):
        images, distance = overlap.neighbours(row)
        keep = distance <= eps
        indices.append(images[keep].astype(np.int32))
        values.append(distance[keep])
        ends[row + 1] = ends[row] + len(indices[-1])
    return _csr(np.concatenate(values), np.concatenate(indices), ends, num)


def encode_units(
    features: Tensor, search: Search, k1: int, k2: int, scale: Scale, rules: Rules = "code"
) -> tuple[Csr, Floats]:
    """Return V of features [n, D] of unit length (see :func:`encode`), and the divisors [n] of original distances."""
    if k1 < 1:
        raise ConfigError(f"k1: {k1} is less than 1")
    if not 1 <= k2 <= k1:
        raise ConfigError(f"k2: {k2} is not between 1 and k1 = {k1}")
    if scale not in ("farthest", "none"):
        raise ConfigError(f"scale: {scale!r} is neither 'farthest' nor 'none'")
    num = len(features)
    farthest = np.ones(num, dtype=np.float32)
    if scale == "farthest":  # the farthest image is the nearest one of the opposite point
        opposite = search_checked(search, -features, features, 1).similarity[:, 0]
        farthest = np.maximum(2 + 2 * opposite, _TINY)
    size = k1 if rules == "clustering" else k1 + 1  # of N(p, k1), with the image itself
    half = round(k1 / 2)
    index = _own_first(search_checked(search, features, features, min(size, num)).index)
    sets = _expand_sets(_reciprocal(index[:, :size]), _reciprocal(index[:, : half + 1]), rules != "paper")
    encodings = _weigh(sets, features, farthest)
    if k2 > 1:
        mean = _graph(index[:, :k2])
        mean.data /= min(k2, num)
        encodings = mean @ encodings  # Eq. (11)
        encodings.sort_indices()  # so that sums have a fixed order
    return encodings, farthest


def unit(features: Tensor) -> Tensor:
    """Scale features [n, D] to unit length, float32, without gradient."""
    return F.normalize(features.detach().float())


def search_checked(search: Search, query: Tensor, gallery: Tensor, k: int) -> Neighbours:
    """Search, and refuse positions that make the sparse products read outside their memory (FAISS pads with -1)."""
    result = search(query, gallery, k)
    if result.index.shape != (len(query), k) or result.similarity.shape != (len(query), k):
        raise ValueError(f"the search returned {result.index.shape} neighbours, not {(len(query), k)}")
    if len(query) and not 0 <= result.index.min() <= result.index.max() < len(gallery):
        raise ValueError("the search returned neighbours that are not in the gallery")
    return result


def _own_first(index: Ints) -> Ints:
    """Move each row's number to the front of the row; if it is missing (duplicates), it replaces the last entry.

    >>> _own_first(np.array([[0, 1], [0, 1], [0, 1]])).tolist()
    [[0, 1], [1, 0], [2, 0]]
    """
    num, k = index.shape
    numbers = np.arange(num)[:, None]
    is_own = index == numbers
    column = np.where(is_own.any(axis=1), is_own.argmax(axis=1), k - 1)
    neighbours = index[np.arange(k) != column[:, None]].reshape(num, k - 1)
    return np.concatenate([numbers, neighbours], axis=1)


def _csr(data: Floats, indices: NDArray[Any], indptr: NDArray[Any], num: int) -> Csr:
    """Build [num, num]; scikit-learn takes 32-bit indices only, and they are half the memory."""
    from scipy import sparse  # slow to import

    index_type = np.int32 if len(indices) < 2**31 else np.int64
    return sparse.csr_array((data, indices.astype(index_type), indptr.astype(index_type)), shape=(num, num))


def _graph(index: Ints) -> Csr:
    """Return the graph [n, n] with an edge of 1 from each row to its neighbours [n, k]."""
    num, k = index.shape
    edges = np.sort(index, axis=1).ravel()
    return _csr(np.ones(num * k, dtype=np.float32), edges, np.arange(0, num * k + 1, k), num)


def _reciprocal(index: Ints) -> Csr:
    """Return R(p, k) of Eq. (3) as rows of ones, from N(p, k) [n, k]: edges that go both ways."""
    graph = _graph(index)
    return graph.multiply(graph.T.tocsr())


def _expand_sets(full: Csr, half: Csr, strictly: bool) -> Csr:
    """Return R*(p, k) of Eq. (4) as rows without zeros, from R(p, k) and R(q, k / 2).

    Both are symmetric, so their product counts the common members of R(p, k) and R(q, k / 2) for all p and q. The
    counts are small integers, exact in float32. ``strictly``: more than two thirds.
    """
    size = np.diff(half.indptr)
    common = (full @ half).multiply(full).tocsr()  # q is a member of R(p, k)
    majority = 2 * size[common.indices] + strictly
    common.data = (3 * common.data >= majority).astype(np.float32)
    common.eliminate_zeros()
    sets = full + common @ half
    sets.sort_indices()
    return sets


def _weigh(sets: Csr, features: Tensor, farthest: Floats) -> Csr:
    """Return V of Eq. (7), each row divided by its sum; no row is empty."""
    rows = np.repeat(np.arange(len(features)), np.diff(sets.indptr))
    distance = _pair_distances(features, rows, sets.indices)
    weight = np.exp(-distance / farthest[rows])
    weight /= np.add.reduceat(weight, sets.indptr[:-1])[rows]
    return type(sets)((weight, sets.indices, sets.indptr), shape=sets.shape)


def _pair_distances(features: Tensor, left: NDArray[Any], right: NDArray[Any]) -> Floats:
    """Return the squared distances [m] of the pairs (left[i], right[i]), a part at a time."""
    step = max(1, _PAIRS // max(1, features.shape[1]))
    cosine = np.empty(len(left), dtype=np.float32)
    for start in range(0, len(left), step):
        part = slice(start, start + step)
        x, y = (features[torch.as_tensor(side[part], device=features.device)] for side in (left, right))
        cosine[part] = (x * y).sum(dim=1).cpu().numpy()
    return squared_distance(cosine)


def squared_distance(cosine: Floats) -> Floats:
    """Return d = 2 - 2 cos; rounding must not make it negative."""
    return np.maximum(2 - 2 * cosine, 0)


class _Overlap:
    """Finds images of ``columns`` [C] that share entries with an image, by an inverted index: entry -> images."""

    def __init__(self, encodings: Csr, columns: Ints) -> None:
        self.encodings = encodings
        self.inverted = encodings[columns].tocsc()
        self.sums = np.asarray(encodings.sum(axis=1, dtype=np.float64))
        self.column_sums = self.sums[columns]

    def neighbours(self, row: int) -> tuple[NDArray[np.intp], Floats]:
        """Return the columns [m] that share an entry with one image, and their distances [m]; all others have 1."""
        span = slice(self.encodings.indptr[row], self.encodings.indptr[row + 1])
        entries = self.encodings.indices[span]
        begin = self.inverted.indptr[entries]
        count = self.inverted.indptr[entries + 1] - begin
        # positions of all images under all entries: begin[0], begin[0] + 1, ..., begin[1], ...
        skipped = begin - (np.cumsum(count) - count)
        positions = np.repeat(skipped, count) + np.arange(count.sum())
        common = np.minimum(self.inverted.data[positions], np.repeat(self.encodings.data[span], count))
        minima = np.bincount(self.inverted.indices[positions], common, minlength=len(self.column_sums))  # Eq. (8)
        images = np.flatnonzero(minima)
        maxima = self.sums[row] + self.column_sums[images] - minima[images]  # Eq. (9): max(a, b) = a + b - min(a, b)
        return images, np.maximum(1 - minima[images] / maxima, 0).astype(np.float32)  # Eq. (10)
