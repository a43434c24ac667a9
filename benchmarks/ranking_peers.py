"""One evaluator of others on a slice of queries that ``ranking.py`` wrote: seconds, memory and scores as JSON.

Runs in an environment of its own, without fedsim. Nothing of the others is copied here: their packages are called.

    python benchmarks/ranking_peers.py EVALUATOR FOLDER
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import subprocess
import sys
import sysconfig
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROWS = 256
"""queries at a time of the evaluator that is written here"""
CMC = 50

Scores = tuple[float | None, float]
"""rank-1, mAP"""


class PeakMemory:
    """Context that finds by how many MB the process grows at most. Linux only."""

    megabytes = 0.0

    def __enter__(self) -> PeakMemory:
        """Forget earlier peaks."""
        Path("/proc/self/clear_refs").write_text("5")
        self.before = self._read("VmRSS")
        return self

    def __exit__(self, *error: object) -> None:
        """Note the peak."""
        self.megabytes = self._read("VmHWM") - self.before

    @staticmethod
    def _read(field: str) -> float:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 2**10


class Slice:
    """Some queries and the whole gallery.

    Args:
        folder: written by ``ranking.py``.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.query_pids, self.query_camids = self.load("query_pids"), self.load("query_camids")
        self.gallery_pids, self.gallery_camids = self.load("gallery_pids"), self.load("gallery_camids")

    def load(self, name: str) -> NDArray[Any]:
        """Read an array: ``query``, ``gallery`` (features), ``similarity`` or labels."""
        array: NDArray[Any] = np.load(self.folder / f"{name}.npy")
        return array

    def distances(self) -> NDArray[np.float32]:
        """Return [Q, G] distances: similarities with the sign turned, so that nothing is rounded."""
        return np.negative(self.load("similarity"))

    def labels(self) -> tuple[NDArray[np.int64], ...]:
        """Return identities and cameras in the order in which re-identification code takes them."""
        return self.query_pids, self.gallery_pids, self.query_camids, self.gallery_camids


# -- re-identification: distances in, camera rule included -------------------------------------------------------------


def torchreid_python(work: Slice) -> Callable[[], Scores]:
    """Torchreid's evaluator in Python: one module of the package, which as a whole wants to import much else."""
    rank = load_file("torchreid_rank", "torchreid/reid/metrics/rank.py")
    distances = work.distances()

    def score() -> Scores:
        cmc, mean_ap = rank.eval_market1501(distances, *work.labels(), CMC)
        return cmc[0], mean_ap

    return score


def torchreid_cython(work: Slice) -> Callable[[], Scores]:
    """Torchreid's compiled evaluator, as a fork's wheel has it: torchreid's own packages leave it out."""
    rank = load_file("rank_cy", "pyppbox_torchreid/metrics/rank_cylib/rank_cy*.so")
    distances = work.distances()

    def score() -> Scores:
        cmc, mean_ap = rank.evaluate_cy(distances, *work.labels(), CMC)
        return cmc[0], mean_ap

    return score


def fastreid_cython(work: Slice) -> Callable[[], Scores]:
    """fast-reid's compiled evaluator, built by the package's own script."""
    pattern = "fastreid/evaluation/rank_cylib/rank_cy*.so"
    try:
        rank = load_file("rank_cy", pattern)
    except ImportError:
        folder = find_file("fastreid/evaluation/rank_cylib/setup.py").parent
        command = [sys.executable, "setup.py", "build_ext", "--inplace"]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
        rank = load_file("rank_cy", pattern)
    distances = work.distances()

    def score() -> Scores:
        cmc, precision, _ = rank.evaluate_cy(distances, *work.labels(), CMC)
        return cmc[0], float(np.mean(precision))

    return score


def numpy_argsort(work: Slice) -> Callable[[], Scores]:
    """Not a peer: the definition with one whole sort per query, in as few numpy calls as possible."""
    distances = work.distances()

    def score() -> Scores:
        parts = [argsort_block(work, distances, slice(start, start + ROWS)) for start in range(0, len(distances), ROWS)]
        first, precision = (np.concatenate(part) for part in zip(*parts, strict=True))
        return float((first == 1).mean()), float(precision.mean())

    return score


def argsort_block(work: Slice, distances: NDArray[np.float32], rows: slice) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return rank of the first match and average precision of the queries in ``rows`` that have a match."""
    order = np.argsort(distances[rows], axis=1)
    match = work.gallery_pids[order] == work.query_pids[rows, None]
    junk = match & (work.gallery_camids[order] == work.query_camids[rows, None])
    match &= ~junk
    ranks = (np.cumsum(~junk, axis=1, dtype=np.int32))[match]
    counts = match.sum(axis=1)
    counts = counts[counts > 0]
    starts = np.cumsum(counts) - counts
    matches_so_far = np.arange(1, len(ranks) + 1) - np.repeat(starts, counts)
    return ranks[starts], np.add.reduceat(matches_so_far / ranks, starts) / counts


# -- metric learning and information retrieval -------------------------------------------------------------------------


def open_metric_learning(work: Slice) -> Callable[[], Scores]:
    """OML: features in; the camera rule as "sequences" of one identity and camera; lists as long as the gallery."""
    torch = one_thread()
    from oml.functional.knn import batched_knn_qg
    from oml.functional.metrics import calc_retrieval_metrics

    query, gallery = (torch.from_numpy(work.load(name)) for name in ("query", "gallery"))
    query_pids, gallery_pids, query_camids, gallery_camids = map(torch.from_numpy, work.labels())
    cameras, size = int(gallery_camids.max()) + 1, len(gallery)

    def score() -> Scores:
        _, retrieved, wanted = batched_knn_qg(
            query, gallery, size, query_pids, gallery_pids, None, None,
            query_pids * cameras + query_camids, gallery_pids * cameras + gallery_camids,
        )  # fmt: skip
        scores = calc_retrieval_metrics(
            retrieved, wanted, cmc_top_k=(1,), precision_top_k=(), map_top_k=(size,), verbose=False
        )
        return float(scores["cmc"][1]), float(scores["map"][size])

    return score


def pytorch_metric_learning(work: Slice) -> Callable[[], Scores]:
    """AccuracyCalculator: features in, no camera rule, lists of FAISS as long as the gallery."""
    torch = one_thread()
    import faiss
    from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
    from pytorch_metric_learning.utils.inference import FaissKNN

    faiss.omp_set_num_threads(1)
    query, gallery = (torch.from_numpy(work.load(name)) for name in ("query", "gallery"))
    query_pids, gallery_pids = torch.from_numpy(work.query_pids), torch.from_numpy(work.gallery_pids)
    calculator = AccuracyCalculator(
        include=("mean_average_precision", "precision_at_1"),
        k=None,
        device=torch.device("cpu"),
        knn_func=FaissKNN(index_init_fn=faiss.IndexFlatIP),
    )

    def score() -> Scores:
        scores = calculator.get_accuracy(query, query_pids, gallery, gallery_pids)
        return scores["precision_at_1"], scores["mean_average_precision"]

    return score


def torchmetrics(work: Slice) -> Callable[[], Scores]:
    """RetrievalMAP: scores in, as probabilities because it drops matches at or below 0; junk left out beforehand."""
    torch = one_thread()
    from torchmetrics.retrieval import RetrievalMAP

    same_identity = work.query_pids[:, None] == work.gallery_pids
    keep = ~(same_identity & (work.query_camids[:, None] == work.gallery_camids))
    keep &= (same_identity & keep).any(axis=1, keepdims=True)
    scores = torch.from_numpy((work.load("similarity")[keep] + 1) / 2)
    target, index = torch.from_numpy(same_identity[keep]), torch.from_numpy(np.nonzero(keep)[0])

    def score() -> Scores:
        return None, float(RetrievalMAP()(scores, target, index))

    return score


# -- the command -------------------------------------------------------------------------------------------------------


def one_thread() -> Any:
    """Return torch, with one thread."""
    import torch

    torch.set_num_threads(1)
    return torch


def find_file(pattern: str) -> Path:
    """Find a file of an installed package without importing the package.

    Raises:
        ImportError: if there is none.
    """
    for path in Path(sysconfig.get_path("purelib")).glob(pattern):
        return path
    raise ImportError(f"no {pattern} in {sysconfig.get_path('purelib')}")


def load_file(name: str, pattern: str) -> ModuleType:
    """Load one module of an installed package."""
    spec = importlib.util.spec_from_file_location(name, find_file(pattern))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


EVALUATORS: dict[str, tuple[str, Callable[[Slice], Callable[[], Scores]]]] = {
    "numpy-argsort": ("numpy", numpy_argsort),
    "fastreid-cython": ("fastreid", fastreid_cython),
    "torchreid-cython": ("pyppbox-torchreid", torchreid_cython),
    "torchreid-python": ("torchreid", torchreid_python),
    "oml": ("open-metric-learning", open_metric_learning),
    "pml": ("pytorch-metric-learning", pytorch_metric_learning),
    "torchmetrics": ("torchmetrics", torchmetrics),
}
"""name -> the distribution that it comes from, what makes the function to be timed"""


def main() -> None:
    """Run one evaluator."""
    warnings.simplefilter("ignore")
    name, folder = sys.argv[1:]
    package, prepare = EVALUATORS[name]
    score = prepare(Slice(Path(folder)))
    with PeakMemory() as memory:
        start = time.process_time()
        rank1, mean_ap = score()
        seconds = time.process_time() - start
    result = {
        "seconds": seconds,
        "megabytes": memory.megabytes,
        "rank1": None if rank1 is None else float(rank1),
        "mAP": float(mean_ap),
        "version": f"{package} {importlib.metadata.version(package)}",
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
