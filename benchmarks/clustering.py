"""What pseudo-labels cost: fedsim's sparse clustering against the dense form of the public algorithm.

Features are random: an identity is a point in a space of 64 dimensions, its 17 images that point plus noise, turned
into 2,048 dimensions. k1 = 20, k2 = 6, eps = 0.5, min_samples = 4. Both get the neighbours of the same exact search,
whose time stands apart; "dense" is the algorithm of public code, rewritten here in NumPy: matrices [n, n] of weights,
expanded weights and distances, filled row by row, then DBSCAN on the last one. Each measurement is a process of its own
with one thread, times are its CPU-seconds; memory is how far its peak lies above that of features and search.

    OMP_NUM_THREADS=1 python benchmarks/clustering.py                      # n = 500 to 8,000
    OMP_NUM_THREADS=1 python benchmarks/clustering.py --sizes 17000
"""

from __future__ import annotations

import argparse
import hashlib
import json
import resource
import subprocess
import sys
import time

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.cluster import DBSCAN
from tabulate import tabulate
from torch import Tensor

from fedsim.functional.neighbours import Neighbours, nearest
from fedsim.functional.reciprocal import encode, sparse_jaccard
from fedsim.training.labels.pseudo_labels import cluster_graph

K1, K2, EPS, MIN_SAMPLES = 20, 6, 0.5, 4
Floats = NDArray[np.float32]


def draw_features(num: int) -> Tensor:
    """Return features [n, 2048] of unit length."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(-(-num // 17), 64, generator=generator).repeat_interleave(17, dim=0)[:num]
    low = centres + 0.8 * torch.randn(num, 64, generator=generator)
    return torch.nn.functional.normalize(low @ torch.randn(64, 2048, generator=generator))


def cluster_sparsely(features: Tensor, neighbours: Neighbours) -> NDArray[np.int64]:
    """As fedsim does it."""

    def search(query: Tensor, gallery: Tensor, k: int) -> Neighbours:  # noqa: ARG001 - a search's signature
        return neighbours

    encodings = encode(features, search, K1, K2, scale="none", rules="clustering")
    return cluster_graph(sparse_jaccard(encodings, EPS), EPS, MIN_SAMPLES)


def cluster_densely(features: Tensor, neighbours: Neighbours) -> NDArray[np.int64]:
    """As public code does it."""
    x, rank, num = features.numpy(), neighbours.index, len(features)
    full = [_mutual(rank, i, K1) for i in range(num)]
    half = [_mutual(rank, i, round(K1 / 2)) for i in range(num)]
    weights = np.zeros((num, num), dtype=np.float32)
    for i in range(num):
        grown = full[i]
        for j in full[i]:
            if len(np.intersect1d(half[j], full[i])) > 2 / 3 * len(half[j]):
                grown = np.append(grown, half[j])
        grown = np.unique(grown)
        similarity = np.exp(2 * (x[i] @ x[grown].T) - 2)
        weights[i, grown] = similarity / similarity.sum()
    expanded = np.zeros_like(weights)
    for i in range(num):
        expanded[i] = weights[rank[i, :K2]].mean(axis=0)
    del weights
    having = [np.flatnonzero(expanded[:, i]) for i in range(num)]
    distance = np.zeros_like(expanded)
    for i in range(num):
        common = np.zeros(num, dtype=np.float32)
        for j in np.flatnonzero(expanded[i]):
            common[having[j]] += np.minimum(expanded[i, j], expanded[having[j], j])
        distance[i] = 1 - common / (2 - common)
    np.maximum(distance, 0, out=distance)
    del expanded
    return DBSCAN(eps=EPS, min_samples=MIN_SAMPLES, metric="precomputed").fit_predict(distance)  # type: ignore[no-any-return]


def _mutual(rank: NDArray[np.int64], i: int, k: int) -> NDArray[np.int64]:
    forward = rank[i, : k + 1]
    return forward[(rank[forward, : k + 1] == i).any(axis=1)]


def measure(kind: str, num: int) -> None:
    """Print one measurement as JSON."""
    torch.set_num_threads(1)
    features = draw_features(num)
    started = time.perf_counter()
    neighbours = nearest(features, features, min(K1, num))
    searched, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    cpu = time.process_time()
    labels = (cluster_sparsely if kind == "sparse" else cluster_densely)(features, neighbours)
    row = {
        "search": searched - started,
        "cpu": time.process_time() - cpu,
        "mib": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024,
        "clusters": int(labels.max()) + 1,
        "labels": hashlib.sha256(labels.astype(np.int64).tobytes()).hexdigest(),
    }
    print(json.dumps(row))


def main() -> None:
    """Measure all sizes and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[500, 1000, 2000, 4000, 8000])
    parser.add_argument("--one", choices=["sparse", "dense"], help="one measurement of the first size, as JSON")
    args = parser.parse_args()
    if args.one:
        measure(args.one, args.sizes[0])
        return
    rows = []
    for num in args.sizes:
        measured = {}
        for kind in ("sparse", "dense"):
            command = [sys.executable, __file__, "--one", kind, "--sizes", str(num)]
            measured[kind] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        sparse, dense = measured["sparse"], measured["dense"]
        times = [sparse["search"], sparse["cpu"], dense["cpu"], sparse["cpu"] / dense["cpu"]]
        equal = "yes" if sparse["labels"] == dense["labels"] else "no"
        rows.append([num, sparse["clusters"], *times, sparse["mib"], dense["mib"], equal])
    headers = ["n", "clusters", "search s", "sparse s", "dense s", "ratio", "sparse MiB", "dense MiB", "same labels"]
    print(tabulate(rows, headers, floatfmt=".2f", intfmt=","))


if __name__ == "__main__":
    main()
