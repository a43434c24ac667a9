"""Rows about evaluation: time for Market-1501's shape, neighbours of re-ranking, FAISS."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

import ranking
from acceptance_rows.terms import Bench, NotHereError, Outcome
from fedsim.cli.doctor.probe import disagreement
from fedsim.core.errors import ConfigError
from fedsim.evaluation import Ranker
from fedsim.evaluation.backends import make_search
from fedsim.evaluation.reranking import rerank_blocks
from fedsim.functional.neighbours import Search, nearest

SMALL = ranking.Shape("a small set", 60, 500, 20, 6, 100, 60, 0)
MOST_MS = 90.0
"""for Market-1501's queries and gallery, when all features are on the GPU: about 40 ms are the host's, which finds
positives and junk"""
RERANKED = (300, 2000)
"""queries and gallery images whose re-ranked distances are compared with the CPU's"""
CLOSE = 1e-4
"""largest difference of re-ranked distances: those of neighbours that are equally far may change places"""
REPEATS = 20
"""searches by FAISS, each on top of a busy stream"""


def make_work(bench: Bench) -> ranking.Work:
    """Draw features of Market-1501's shape, 2,048 wide, on the device."""
    work = ranking.make_work(SMALL if bench.reduced else ranking.SHAPES["market"], ranking.NOISE["good"])
    return replace(work, query=work.query.to(bench.device), gallery=work.gallery.to(bench.device))


def market(bench: Bench) -> Outcome:
    """CMC and mAP of all queries, beside the bare matrix product; the scores are those of the CPU."""
    work = make_work(bench)
    out = work.query.new_empty(ranking.ROWS, len(work.gallery))
    product = bench.median_ms(lambda: ranking.multiply(work, out), 5)
    # new labels: what an evaluation prepares counts
    total = bench.median_ms(lambda: Ranker().score(work.query, work.gallery, replace(work.labels)), 5)
    part = work.take(60)
    ours, theirs = (Ranker().score(part.query.to(at), part.gallery.to(at), part.labels) for at in (bench.device, "cpu"))
    gap = abs(ours.mAP - theirs.mAP)
    figure = f"{total:.1f} ms, {total / product:.2f} of the product; mAP {gap:.0e} from the CPU's"
    return Outcome(figure, f"{MOST_MS:.0f} ms, mAP within 1e-5", gap <= 1e-5 and total <= MOST_MS, of_speed=True)


def reciprocal(bench: Bench) -> Outcome:
    """Distances of k-reciprocal re-ranking, by neighbours that the device has found, beside the CPU's."""
    work = make_work(bench)
    num_queries, num_gallery = (30, 200) if bench.reduced else RERANKED
    query, gallery = work.query[:num_queries], work.gallery[-num_gallery:]
    ours, theirs = (rerank(query.to(at), gallery.to(at), nearest) for at in (bench.device, "cpu"))
    off = np.abs(ours - theirs) > CLOSE
    everything = torch.cat([work.query, work.gallery])
    seconds = bench.median_ms(lambda: nearest(everything, everything, 21), 1) / 1e3
    share = f"{100 * off.mean():.3f} %"
    figure = f"{share} of the distances are off by more than {CLOSE:.0e}; neighbours of all images: {seconds:.2f} s"
    return Outcome(figure, "0.1 %", float(off.mean()) <= 1e-3)


def rerank(query: Tensor, gallery: Tensor, search: Search) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """Return re-ranked distances [Q, G]."""
    return np.concatenate([block.copy() for _, block in rerank_blocks(query, gallery, search)])


def faiss(bench: Bench) -> Outcome:
    """FAISS's lists and torch's, while the stream is busy, on each GPU, also on one that is not the current one."""
    work = make_work(bench)
    query = torch.nn.functional.normalize(work.query[:512].cpu())
    gallery = torch.nn.functional.normalize(work.gallery.cpu())
    similarity = (query.double() @ gallery.double().T).numpy()
    devices = [torch.device("cuda", index) for index in range(bench.gpus)] or [bench.device]
    problems = []
    for device in devices:
        try:
            search = make_search("faiss", device)
        except ConfigError as error:
            raise NotHereError(str(error)) from error
        device_query, device_gallery = query.to(device), gallery.to(device)
        ours = nearest(device_query, device_gallery, 100)
        for _ in range(2 if bench.reduced else REPEATS):
            theirs = search(late(device_query), late(device_gallery), 100)  # FAISS must wait for its input
            problems.append(disagreement(ours, theirs, similarity))
    wrong = [problem for problem in problems if problem]
    figure = f"{len(wrong)} of {len(problems)} searches on {', '.join(map(str, devices))} differ"
    return Outcome(f"{figure}: {wrong[0]}" if wrong else figure, "0", not wrong)


def late(tensor: Tensor) -> Tensor:
    """Return a copy that the device makes only after some milliseconds of other work, while the host goes on."""
    work = torch.randn(2048 if tensor.is_cuda else 16, 2048 if tensor.is_cuda else 16, device=tensor.device)
    for _ in range(8):
        work = work @ work
        work /= work.abs().amax().clamp_min(1.0)  # or it would overflow
    return tensor + 0.0 * work[0, 0]
