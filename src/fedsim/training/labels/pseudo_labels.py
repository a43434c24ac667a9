"""From features to pseudo-labels: clusters of a neighbour graph. n images, D features.

M. Ester, H.-P. Kriegel, J. Sander, X. Xu, "A Density-Based Algorithm for Discovering Clusters in Large Spatial
Databases with Noise", KDD 1996 (DBSCAN), on the Jaccard distance of k-reciprocal encodings.
"""

from __future__ import annotations

from typing import cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedsim.functional.neighbours import Search, nearest
from fedsim.functional.reciprocal import Csr, encode, sparse_jaccard

Ints = NDArray[np.int64]


def find_clusters(
    features: Tensor, *, k1: int = 20, k2: int = 6, eps: float = 0.5, min_samples: int = 4, search: Search = nearest
) -> Ints:
    """Cluster images by the neighbours that they share, in memory that grows with n * k1.

    The encoding follows public code for clustering, see :mod:`fedsim.functional.reciprocal`.

    Args:
        features: [n, D], any float type; at least one.
        k1: neighbours of the encoding, the image itself counted; n where there are fewer.
        k2: images to average an encoding over, the image itself counted.
        eps: largest Jaccard distance of neighbours.
        min_samples: neighbours, the image itself counted, that make an image the core of a cluster.
        search: finds neighbours; the default is exact.

    Returns:
        [n] cluster 0, 1, ... in the order of their first core images; -1: none.

    Raises:
        ConfigError: if k1, k2 or eps is out of range.

    >>> import torch
    >>> features = torch.eye(3).repeat_interleave(torch.tensor([4, 4, 1]), dim=0)
    >>> find_clusters(features, k1=4, k2=2, min_samples=3).tolist()
    [0, 0, 0, 0, 1, 1, 1, 1, -1]
    """
    encodings = encode(features, search, k1, k2, scale="none", rules="clustering")
    return cluster_graph(sparse_jaccard(encodings, eps), eps, min_samples)


def cluster_graph(distances: Csr, eps: float, min_samples: int) -> Ints:
    """Run DBSCAN on a sparse graph; arguments and result are those of :func:`find_clusters`.

    ``distances`` [n, n] are symmetric with a diagonal; pairs without an entry are far. An image on the border of
    several clusters belongs to the first of them.
    """
    from sklearn.cluster import DBSCAN  # here: only methods without labels wait for its import
    from sklearn.neighbors import sort_graph_by_row_values

    graph = sort_graph_by_row_values(distances, copy=True, warn_when_not_sorted=False)
    labels = DBSCAN(eps=eps, min_samples=min_samples, metric="precomputed").fit_predict(graph)
    return cast(Ints, labels.astype(np.int64))
