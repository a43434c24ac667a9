"""What ranking costs: fedsim's evaluation against the bare matrix product of the same shape, and against others' code.

Features are random: an identity is a point in a space of few dimensions, an image that point plus noise, turned into
2,048 dimensions and scaled to length 1. Two noises, chosen once, stand for a good model (on Market-1501's shape mAP
about .76, rank-1 about .91) and a poor one (mAP about .3). Times are CPU-seconds of one thread. "product" is everything
that :class:`fedsim.functional.similarity.Similarity` does, so norms, too; "ranking" is the rest.

    python benchmarks/ranking.py                  # the table
    python benchmarks/ranking.py --full           # all queries of MSMT17's shape, not a slice
    python benchmarks/ranking.py --peers          # others' evaluators; makes environments first: several GB
    python benchmarks/ranking.py --device cuda    # milliseconds on a GPU
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from tabulate import tabulate
from torch import Tensor

from fedsim.core.errors import ConfigError
from fedsim.evaluation import Ranker, Ranking, RetrievalLabels, average_scores, rank_features, score_ranks
from fedsim.evaluation.backends import Backend, FaissBackend, count_ranks
from fedsim.functional.similarity import Similarity, query_blocks
from ranking_peers import PeakMemory

HERE = Path(__file__).resolve().parent
ENVIRONMENTS = HERE / ".envs"
DIMENSIONS = 2048
ROWS = 256
"""queries per block of the bare product"""
LATENT, SPREAD = 32, 0.5
"""dimensions in which identities differ; standard deviation of the logarithm of the noise over images"""
NOISE = {"good": 0.63, "poor": 1.08}
TARGETS = {"total": 1.20, "ranking": 0.15}
"""largest ratios to the bare product"""


# -- the work ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """A test set's numbers."""

    name: str
    queries: int
    gallery: int
    identities: int
    cameras: int
    distractors: int
    """gallery images of identity 0, which no query has"""
    part: int
    """queries that are measured on a CPU, unless all are asked for"""
    megabytes: int
    """target: peak memory beyond the features"""


SHAPES = {
    "market": Shape("Market-1501", 3368, 19732, 750, 6, 6617, 3368, 64),
    "msmt17": Shape("MSMT17", 11659, 82161, 3060, 15, 0, 1000, 200),
}


@dataclass(frozen=True)
class Work:
    """Features and labels."""

    query: Tensor
    gallery: Tensor
    labels: RetrievalLabels

    def take(self, queries: int) -> Work:
        """Return the first queries; they are in random order."""
        return Work(self.query[:queries], self.gallery, self.labels.take(slice(queries)))

    def blocks(self) -> list[slice]:
        """Return fedsim's blocks of queries."""
        return query_blocks(len(self.query), len(self.gallery))


def make_work(shape: Shape, noise: float) -> Work:
    """Draw a test set: gallery in order of identities, one query per identity and camera in random order."""
    rng = np.random.default_rng(0)
    weights = rng.gamma(8.0, size=shape.identities)
    shown = 1 + rng.choice(shape.identities, shape.gallery - shape.distractors, p=weights / weights.sum())
    gallery_pids = np.concatenate([np.zeros(shape.distractors, dtype=np.int64), np.sort(shown)])
    gallery_camids = rng.integers(shape.cameras, size=shape.gallery)
    pairs = rng.choice(shape.identities * shape.cameras, shape.queries, replace=False)
    query_pids, query_camids = 1 + pairs // shape.cameras, pairs % shape.cameras
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(shape.identities + 1, LATENT, generator=generator)
    basis = torch.linalg.qr(torch.randn(DIMENSIONS, LATENT, generator=generator)).Q
    query, gallery = (
        draw_features(centres[torch.from_numpy(pids)], pids == 0, noise, generator) @ basis.T
        for pids in (query_pids, gallery_pids)
    )
    return Work(query, gallery, RetrievalLabels(query_pids, query_camids, gallery_pids, gallery_camids))


def draw_features(
    centres: Tensor, is_distractor: np.ndarray[tuple[int, ...], np.dtype[np.bool_]], noise: float, g: torch.Generator
) -> Tensor:
    """Return [n, LATENT] of length 1: centres plus noise of different strengths; each distractor has its own centre."""
    own_centres = torch.randn(centres.shape, generator=g)
    centres = torch.where(torch.from_numpy(is_distractor)[:, None], own_centres, centres)
    strength = noise * torch.exp(SPREAD * torch.randn(len(centres), 1, generator=g))
    return torch.nn.functional.normalize(centres + strength * torch.randn(centres.shape, generator=g))


# -- fedsim against the bare product -----------------------------------------------------------------------------------


def cpu_seconds(function: Callable[[], object]) -> float:
    """Return how long a call takes."""
    start = time.process_time()
    function()
    return time.process_time() - start


def multiply(work: Work, out: Tensor) -> None:
    """Compute the bare product in blocks: what no evaluator that ranks by float32 products can go below."""
    for rows in work.query.split(ROWS):
        torch.mm(rows, work.gallery.T, out=out[: len(rows)])


def multiply_with_fedsim(work: Work) -> None:
    """Compute the similarities and nothing else."""
    similarity = Similarity(work.query, work.gallery)
    for rows in work.blocks():
        similarity.block(rows)


def ranking_seconds(work: Work) -> float:
    """Rank, with the clock stopped during products; the same quantity as total - product, with less noise."""
    similarity, seconds, ranks = Similarity(work.query, work.gallery), 0.0, []
    for rows in work.blocks():
        block = similarity.block(rows)
        start = time.process_time()
        ranks += count_ranks(block, work.labels.take(rows))
        seconds += time.process_time() - start
    return seconds + cpu_seconds(lambda: average_scores(score_ranks(ranks)))


@dataclass(frozen=True)
class Costs:
    """CPU-seconds, medians over repeats."""

    floor: float
    total: float
    product: float
    ranking: float
    """with the clock stopped during products"""

    @property
    def rest(self) -> float:
        """Ranking as total - product."""
        return self.total - self.product


def measure(work: Work, repeats: int) -> Costs:
    """Run everything in turns."""
    out = torch.empty(ROWS, len(work.gallery))
    columns: list[tuple[float, ...]] = []
    for _ in range(repeats):
        fresh = replace(work, labels=replace(work.labels))  # nothing cached
        columns.append((
            cpu_seconds(lambda: multiply(work, out)),
            cpu_seconds(lambda work=fresh: rank_features(work.query, work.gallery, work.labels)),
            cpu_seconds(lambda: multiply_with_fedsim(work)),
            ranking_seconds(replace(work, labels=replace(work.labels))),
        ))  # fmt: skip
    return Costs(*(statistics.median(column) for column in zip(*columns, strict=True)))


def measure_memory(shape: str, regime: str, queries: int) -> float:
    """Return MB at the peak beyond the features, in a process of its own."""
    command = [sys.executable, __file__, "--alone", "--shape", shape, "--regime", regime, "--queries", str(queries)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return float(output.splitlines()[-1])


def run_alone(work: Work) -> float:
    """Rank after a warm-up that loads libraries; return MB at the peak beyond what there was before."""
    labels = RetrievalLabels(*(np.arange(8) for _ in range(4)))
    rank_features(work.query[:8], work.gallery[:8], labels)
    with PeakMemory() as memory:
        rank_features(work.query, work.gallery, work.labels)
    return memory.megabytes


def missed(costs: Costs, megabytes: float, shape: Shape) -> str:
    """Name the targets that are missed."""
    ratios = {"total": costs.total / costs.floor, "ranking": costs.rest / costs.floor}
    names = [name for name, ratio in ratios.items() if ratio > TARGETS[name]]
    return ", ".join(names + ["memory"] * (megabytes > shape.megabytes)) or "none"


def make_rows(key: str, regime: str, queries: int, args: argparse.Namespace) -> Iterator[list[str]]:
    """Return a row for fedsim's own backend, and two for FAISS."""
    shape = SHAPES[key]
    work = make_work(shape, NOISE[regime]).take(queries)
    costs = measure(work, args.repeats)
    scores = rank_features(work.query, work.gallery, work.labels)
    megabytes = measure_memory(key, regime, queries)
    yield [
        f"{shape.name}, {regime}", f"{len(work.query):,}", "torch", f"{costs.floor:.2f}", f"{costs.total:.2f}",
        f"{costs.total / costs.floor:.2f}", f"{costs.rest:.2f}", f"{costs.rest / costs.floor:.3f}",
        f"{costs.ranking:.2f}", f"{costs.ranking / costs.floor:.3f}", f"{megabytes:.0f}",
        f"{costs.total * shape.queries / len(work.query):.1f}",
        f"{scores.mAP:.3f}", f"{scores.rank1:.3f}", f"{scores.mINP:.3f}", missed(costs, megabytes, shape),
    ]  # fmt: skip
    for k in (1000, 2048):
        yield make_faiss_row(work.take(args.faiss_queries), shape, regime, k)


HEADERS = [
    "work", "queries", "backend", "floor s", "total s", "/ floor", "total - product s", "/ floor", "ranking s",
    "/ floor", "extra MB", "total s, all queries", "mAP", "rank-1", "mINP", "targets missed",
]  # fmt: skip


def make_faiss_row(work: Work, shape: Shape, regime: str, k: int) -> list[str]:
    """Time lists of k images from FAISS, completed by counting, on a slice of queries."""
    try:
        ranker = Ranker(backend=FaissBackend(k))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return [f"{shape.name}, {regime}", "-", f"faiss, k = {k}", *["-"] * (len(HEADERS) - 3)]
    import faiss

    faiss.omp_set_num_threads(1)
    floor = cpu_seconds(lambda: multiply(work, torch.empty(ROWS, len(work.gallery))))
    results: list[Ranking] = []
    total = cpu_seconds(lambda: results.append(ranker.score(work.query, work.gallery, work.labels)))
    counted = np.mean([row[-1] > k for row in ranks_of(work) if len(row)])
    return [
        f"{shape.name}, {regime}", f"{len(work.query):,}", f"faiss, k = {k} (about {counted:.0%} of queries counted)",
        f"{floor:.2f}", f"{total:.2f}", f"{total / floor:.2f}", *["-"] * 5,
        f"{total * shape.queries / len(work.query):.1f}",
        f"{results[0].mAP:.3f}", f"{results[0].rank1:.3f}", f"{results[0].mINP:.3f}", "-",
    ]  # fmt: skip


def ranks_of(work: Work) -> list[np.ndarray[tuple[int, ...], np.dtype[np.int64]]]:
    """Return the ranks of all matches."""
    backend: Backend = Ranker().backend
    return backend.ranks(work.query, work.gallery, work.labels, "cosine", work.blocks())


def chosen(shape: Shape, args: argparse.Namespace) -> int:
    """Return how many queries to measure."""
    return int(args.queries or (shape.queries if args.full else shape.part))


def compare_with_floor(args: argparse.Namespace) -> str:
    """Return the table."""
    rows = [
        row
        for key in args.shapes
        for regime in args.regimes
        for row in make_rows(key, regime, chosen(SHAPES[key], args), args)
    ]
    return tabulate(rows, headers=HEADERS, tablefmt="github", disable_numparse=True)


# -- others' evaluators ------------------------------------------------------------------------------------------------

PACKAGES = {
    "reid": [
        ["numpy==2.4.6", "cython==3.3.1", "setuptools"],
        ["--no-deps", "fastreid==1.4.0"],  # wants a torch of its own, which its evaluator does without
        ["--no-deps", "pyppbox-torchreid==1.4.1.0"],
        ["--no-deps", "torchreid==0.2.5"],
    ],
    "metrics": [
        ["torch==2.15.0"],
        ["open-metric-learning==4.0.0", "omegaconf"],
        ["pytorch-metric-learning==2.9.0", "faiss-cpu==1.15.1"],
        ["torchmetrics==1.9.0"],
    ],
}
"""environment -> what pip is called with, one after another"""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


@dataclass(frozen=True)
class Peer:
    """An evaluator of :mod:`ranking_peers`."""

    title: str
    environment: str
    slow: bool = False
    """slow or hungry: on a slice of Market-1501's queries only"""
    takes_features: bool = False
    camera_aware: bool = True
    invalid_as_zero: bool = False
    remark: str = ""


PEERS = {
    "numpy-argsort": Peer("numpy, whole argsort (no peer: written here)", "reid", remark="unstable sort: ties"),
    "fastreid-cython": Peer("fast-reid, Cython", "reid", remark="unstable sort: ties"),
    "torchreid-cython": Peer("torchreid, Cython", "reid", remark="unstable sort; float32 sums"),
    "torchreid-python": Peer("torchreid, Python", "reid", slow=True),
    "oml": Peer("open-metric-learning", "metrics", slow=True, takes_features=True, invalid_as_zero=True,
                remark="queries without a match are zeros: fedsim's, too"),
    "pml": Peer("pytorch-metric-learning", "metrics", slow=True, takes_features=True, camera_aware=False,
                remark="no camera rule: fedsim without it"),
    "torchmetrics": Peer("torchmetrics RetrievalMAP", "metrics", slow=True, remark="rounded to (1 + cos) / 2; no CMC"),
}  # fmt: skip


def make_environment(name: str) -> Path:
    """Return the Python of an environment; packages that cannot be installed are named and left out."""
    home, wanted = ENVIRONMENTS / name, json.dumps(PACKAGES[name])
    python, stamp = home / "bin" / "python", home / "installed.json"
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    print(f"installing into {home}", file=sys.stderr)
    venv.create(home, symlinks=True, with_pip=True)
    (ENVIRONMENTS / ".gitignore").write_text("*\n")
    failed = [packages for packages in PACKAGES[name] if not install(python, packages)]
    if not failed:
        stamp.write_text(wanted)
    return python


def install(python: Path, packages: list[str]) -> bool:
    """Call pip; print why if it fails."""
    command = [str(python), "-m", "pip", "install", "--quiet", *packages]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print(f"{' '.join(packages)} cannot be installed: {last_line(done.stderr)}", file=sys.stderr)
    return done.returncode == 0


def last_line(output: str) -> str:
    """Return the end of an error message."""
    return next((line.strip() for line in reversed(output.splitlines()) if line.strip()), "no output")


def write_work(work: Work, folder: Path) -> None:
    """Write what :class:`ranking_peers.Slice` reads; similarities are fedsim's, the same bits for all."""
    similarity = Similarity(work.query, work.gallery)
    arrays = {name: getattr(work.labels, name) for name in ("query_pids", "query_camids")}
    arrays |= {name: getattr(work.labels, name) for name in ("gallery_pids", "gallery_camids")}
    arrays |= {"query": work.query.numpy(), "gallery": work.gallery.numpy()}
    arrays["similarity"] = np.concatenate([similarity.block(rows).numpy().copy() for rows in work.blocks()])
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)


def run_peer(key: str, folder: Path) -> dict[str, float | str | None] | str:
    """Return what a peer printed, or why it did not."""
    command = [str(make_environment(PEERS[key].environment)), str(HERE / "ranking_peers.py"), key, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **ONE_THREAD})
    if done.returncode:
        return last_line(done.stderr)
    result: dict[str, float | str | None] = json.loads(done.stdout.splitlines()[-1])
    return result


@dataclass(frozen=True)
class Ours:
    """fedsim on a peer's slice."""

    floor: float
    ranking: float
    scores: Ranking


def measure_ours(work: Work, peer: Peer, repeats: int) -> Ours:
    """Run fedsim on a slice by a peer's rules."""
    work = replace(work, labels=replace(work.labels, camera_aware=peer.camera_aware))
    costs = measure(work, repeats)
    ranker = Ranker(invalid_as_zero=peer.invalid_as_zero)
    return Ours(costs.floor, costs.ranking, ranker.score(work.query, work.gallery, work.labels))


def make_peer_row(key: str, shape: Shape, work: Work, folder: Path, repeats: int) -> list[str]:
    """Return a peer's row; the peer runs once."""
    peer, result = PEERS[key], run_peer(key, folder)
    if isinstance(result, str):
        return [shape.name, f"{len(work.query):,}", peer.title, f"cannot run: {result}", *["-"] * 9]
    ours = measure_ours(work, peer, repeats)
    seconds, megabytes, rank1, mean_ap = (result[name] for name in ("seconds", "megabytes", "rank1", "mAP"))
    assert isinstance(seconds, float)
    assert isinstance(mean_ap, float)
    beyond = seconds - ours.floor if peer.takes_features else seconds
    return [
        shape.name, f"{len(work.query):,}", peer.title, str(result["version"]),
        "features" if peer.takes_features else "similarities", f"{beyond:.2f}", f"{ours.ranking:.3f}",
        f"{beyond / ours.ranking:.0f}", f"{beyond * shape.queries / len(work.query):.1f}", f"{megabytes:.0f}",
        f"{mean_ap:.6f} ({mean_ap - ours.scores.mAP:+.0e})",
        "-" if not isinstance(rank1, float) else f"{rank1:.6f} ({rank1 - ours.scores.rank1:+.0e})",
        peer.remark,
    ]  # fmt: skip


PEER_HEADERS = [
    "work", "queries", "evaluator", "package", "takes", "ranking s", "fedsim's", "times", "ranking s, all queries",
    "extra MB", "mAP (- fedsim's)", "rank-1 (- fedsim's)", "remark",
]  # fmt: skip


def compare_with_peers(args: argparse.Namespace) -> str:
    """Return the table; who takes features has the bare product's time taken off."""
    rows = []
    for key in args.shapes:
        shape = SHAPES[key]
        work = make_work(shape, NOISE["good"])
        for slow in (False, True):
            peers = [name for name, peer in PEERS.items() if peer.slow == slow and (not slow or key == "market")]
            part = work.take(args.peer_queries if slow else chosen(shape, args))
            with tempfile.TemporaryDirectory() as folder:
                write_work(part, Path(folder))
                rows += [make_peer_row(name, shape, part, Path(folder), args.repeats) for name in peers]
    return tabulate(rows, headers=PEER_HEADERS, tablefmt="github", disable_numparse=True)


# -- GPU ---------------------------------------------------------------------------------------------------------------


def gpu_milliseconds(function: Callable[[], object], repeats: int) -> float:
    """Return the median wall time of a call, after one to warm up."""
    times = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[1:])


def compare_on_gpu(args: argparse.Namespace) -> str:
    """Return the table for a GPU: all queries, features on the device, TF32 off."""
    torch.set_float32_matmul_precision("highest")
    rows = []
    for key in args.shapes:
        for regime in args.regimes:
            work = make_work(SHAPES[key], NOISE[regime])
            work = replace(work, query=work.query.cuda(), gallery=work.gallery.cuda())
            out = work.query.new_empty(ROWS, len(work.gallery))
            floor = gpu_milliseconds(lambda work=work, out=out: multiply(work, out), args.repeats)
            total = gpu_milliseconds(lambda work=work: Ranker().score(work.query, work.gallery, work.labels),
                                     args.repeats)  # fmt: skip
            lists = gpu_faiss(work, args.repeats)
            rows.append(
                [f"{SHAPES[key].name}, {regime}", f"{floor:.1f}", f"{total:.1f}", f"{total / floor:.2f}", lists]
            )
    headers = ["work", "bare product, ms", "fedsim, ms", "/ product", "faiss, k = 1000, ms"]
    return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)


def gpu_faiss(work: Work, repeats: int) -> str:
    """Time FAISS's lists, or say why not."""
    try:
        ranker = Ranker(backend=FaissBackend(1000))
        return f"{gpu_milliseconds(lambda: ranker.score(work.query, work.gallery, work.labels), repeats):.1f}"
    except ConfigError as error:
        return str(error)


# -- the command -------------------------------------------------------------------------------------------------------


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[*SHAPES, "all"], default="all")
    parser.add_argument("--regime", choices=[*NOISE, "all"], default="all")
    parser.add_argument("--queries", type=int, help="measure so many; default: all of Market-1501, 1,000 of MSMT17")
    parser.add_argument("--full", action="store_true", help="measure all queries")
    parser.add_argument("--faiss-queries", type=int, default=842)
    parser.add_argument("--peer-queries", type=int, default=842, help="for slow peers")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.shapes = list(SHAPES) if args.shape == "all" else [args.shape]
    args.regimes = list(NOISE) if args.regime == "all" else [args.regime]
    return args


def main() -> None:
    """Print a table."""
    args = parse_arguments()
    torch.set_num_threads(1)
    if args.alone:
        print(run_alone(make_work(SHAPES[args.shape], NOISE[args.regime]).take(args.queries)))
    elif args.device == "cuda" and not torch.cuda.is_available():
        print("no GPU here: skipped")
    elif args.device == "cuda":
        print(compare_on_gpu(args))
    else:
        print(compare_with_peers(args) if args.peers else compare_with_floor(args))


if __name__ == "__main__":
    main()
