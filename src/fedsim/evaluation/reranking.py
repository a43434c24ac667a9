"""Re-ranking by k-reciprocal encoding, and query expansion. Q queries, G gallery images, D features."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedsim.core.errors import ConfigError
from fedsim.functional import reciprocal
from fedsim.functional.neighbours import Search


def rerank_blocks(
    query: Tensor,
    gallery: Tensor,
    search: Search,
    *,
    k1: int = 20,
    k2: int = 6,
    lambda_: float = 0.3,
    scale: reciprocal.Scale = "farthest",
    rules: reciprocal.Rules = "code",
    block: int = 256,
) -> Iterator[tuple[slice, reciprocal.Floats]]:
    """Return the distances ``(1 - lambda) d_J + lambda d`` (Eq. 12) as blocks: (queries, [b, G] float32).

    ``query`` [Q, D] and ``gallery`` [G, D] have any float type. Neighbours are searched among them together; see
    :func:`fedsim.functional.reciprocal.encode`, also for ``k1``, ``k2``, ``scale``, ``rules`` and errors, which are
    raised before the first block. ``lambda_`` is the weight of the original distance d: 1 keeps the original order, 0
    takes the Jaccard distance d_J only; ConfigError for any outside [0, 1]. A block takes about 12 * ``block`` * G
    bytes.
    """
    if not 0 <= lambda_ <= 1:
        raise ConfigError(f"lambda_: {lambda_} is not between 0 and 1")
    features = torch.cat([reciprocal.unit(query), reciprocal.unit(gallery)])
    encodings, farthest = reciprocal.encode_units(features, search, k1, k2, scale, rules)
    num = len(query)
    jaccard = reciprocal.jaccard_blocks(encodings, np.arange(num), np.arange(num, len(features)), block)

    def mixed(part: slice, distance: reciprocal.Floats) -> tuple[slice, reciprocal.Floats]:
        with torch.autocast(features.device.type, enabled=False):
            cosine = (features[part] @ features[num:].T).cpu().numpy()
        distance *= 1 - lambda_
        distance += lambda_ * (reciprocal.squared_distance(cosine) / farthest[part, None])  # Eq. (12)
        return part, distance

    return (mixed(*of_block) for of_block in jaccard)


def expand_queries(query: Tensor, gallery: Tensor, search: Search, k: int, alpha: float = 0.0) -> Tensor:
    """Replace each query by a mean of itself and its k nearest gallery images: [Q, D] float32, of unit length.

    alpha = 0: average query expansion of O. Chum et al., "Total Recall: Automatic Query Expansion with a Generative
    Feature Model for Object Retrieval", ICCV 2007, without its spatial verification. alpha > 0: F. Radenovic et al.,
    "Fine-tuning CNN Image Retrieval with No Human Annotation", TPAMI 2018 (theirs is 3).

    From query [Q, D] and gallery [G, D], any float type, without the queries: they would count twice. There are G
    neighbours if k is more. Neighbours weigh max(similarity, 0) ** alpha, or 1 if alpha is 0; the query weighs 1. See
    :func:`fedsim.functional.reciprocal.encode` for errors; ConfigError also if k < 1 or alpha < 0.

    >>> from fedsim.functional.neighbours import Neighbours
    >>> nearest = Neighbours(np.array([[0]]), np.array([[0.28]], dtype=np.float32))
    >>> gallery = torch.tensor([[0.28, 0.96], [-1.0, 0.0]])
    >>> expand_queries(torch.tensor([[1.0, 0.0]]), gallery, lambda query, gallery, k: nearest, k=1)
    tensor([[0.8000, 0.6000]])
    """
    if k < 1:
        raise ConfigError(f"k: {k} is less than 1")
    if not alpha >= 0:  # so that NaN is refused, too
        raise ConfigError(f"alpha: {alpha} is not 0 or more")
    query, gallery = reciprocal.unit(query), reciprocal.unit(gallery)
    neighbours = reciprocal.search_checked(search, query, gallery, min(k, len(gallery)))
    index = torch.as_tensor(neighbours.index, device=query.device)
    similarity = torch.as_tensor(neighbours.similarity, device=query.device)
    weight = similarity.clamp(min=0) ** alpha if alpha > 0 else torch.ones_like(similarity)
    total = query.clone()
    for rank in range(index.shape[1]):  # one neighbour at a time: [Q, k, D] would be large
        total += weight[:, rank, None] * gallery[index[:, rank]]
    return F.normalize(total)
