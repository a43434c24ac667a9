"""``fedsim rank``: score features from any program."""

from __future__ import annotations

import inspect
import json as json_format
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
import torch
from jsonargparse import ArgumentParser
from tabulate import tabulate
from torch import Tensor
from tqdm import tqdm

from fedsim.cli.commands import add_options
from fedsim.core.checked import checked
from fedsim.core.checks import Count, Natural, Share, Weight
from fedsim.core.devices import Device
from fedsim.core.errors import ConfigError, DataError, FedSimError, first_line
from fedsim.core.metrics import METRICS
from fedsim.core.paths import Figure, InputFile, RankedLists
from fedsim.evaluation.backends import BackendName, make_backend, make_search
from fedsim.evaluation.feature_file import read_features
from fedsim.evaluation.ranker import Ranker, score_blocks
from fedsim.evaluation.ranking import Ranking, average_scores
from fedsim.evaluation.reranking import expand_queries, rerank_blocks
from fedsim.evaluation.verification import RATES, PairCounts, count_pairs, pair_blocks
from fedsim.functional.similarity import Distance, NotFiniteError, Similarity, query_blocks
from fedsim.parsing.error_lines import parsed
from fedsim.report.layout import new_figure, save_figure, style_of

T = TypeVar("T")


@checked("--", positional="features")
def rank_file(  # not rank: jsonargparse would look for it in fedsim, and import fedsim.rank
    features: InputFile,
    distance: Distance = "cosine",
    camera_aware: bool = True,
    junk_pids: tuple[int, ...] = (-1,),
    invalid_as_zero: bool = False,
    single_gallery_shot: bool = False,
    backend: BackendName = "auto",
    device: Device = "cpu",
    expand: Natural = 0,
    alpha: Weight = 0.0,
    rerank: bool = False,
    rule: Literal["code", "paper"] = "code",
    k1: Count = 20,
    k2: Count = 6,
    lambda_: Share = 0.3,
    verification: bool = False,
    roc: Figure | None = None,
    save_ranking: RankedLists | None = None,
    json: bool = False,
) -> str:
    """Score features of queries and gallery.

    Args:
        features: an npz file with arrays query [Q, D], query_pids [Q], query_camids [Q], gallery [G, D], gallery_pids
            [G], gallery_camids [G]; large ones are read from the disk as they are needed.
        distance: cosine, or euclidean on features as they are.
        camera_aware: whether the same identity in the same camera is junk.
        junk_pids: identities whose gallery images count neither as right nor as wrong.
        invalid_as_zero: average over all queries, those without a match as zeros.
        single_gallery_shot: CMC on galleries with one random image per identity, in expectation.
        backend: torch, faiss, or auto: torch to rank, FAISS to find neighbours.
        device: cpu, cuda, cuda:1 ...
        expand: number of nearest gallery images to average each query with; 0: none.
        alpha: weigh these images by similarity to the power of alpha; 0: equal weights.
        rerank: re-rank by k-reciprocal encoding.
        rule: two neighbourhoods join in re-ranking if they share more than two thirds, as in its authors' code, the
            source of published numbers; or at least two thirds, as in its paper.
        k1: neighbours for re-ranking.
        k2: neighbours to average over in re-ranking.
        lambda_: weight of the original distance in re-ranking.
        verification: also give true positive rates at false positive rates of 1e-2, 1e-3 and 1e-4, over all pairs.
        roc: also draw the ROC curve of verification, over all pairs, into this image file (png, pdf, svg).
        save_ranking: also write the first 50 images of each list to this npz file.
        json: return JSON instead of a table.

    Raises:
        DataError: if the file cannot be used, or no query has a match.
        ConfigError: if an option is wrong.
    """
    _check_options(distance, rerank, expand, verification, roc)
    _check_refinements({"rule": rule, "k1": k1, "k2": k2, "lambda_": lambda_}, "rerank", rerank)
    _check_refinements({"alpha": alpha}, "expand", expand != 0)
    file = read_features(Path(features), camera_aware, tuple(junk_pids))
    labels = file.labels
    if labels.num_valid == 0:
        raise DataError(f"{features}: no query has a match: {labels.why_no_match()}")
    torch_device = _working(device)
    query, gallery = file.query.to(torch_device), file.gallery.to(torch_device)
    search = make_search(backend, torch_device)

    def blocks() -> Iterable[tuple[slice, Tensor]]:
        if not rerank:
            return Similarity(query, gallery, distance)
        reranked = rerank_blocks(query, gallery, search, k1=k1, k2=k2, lambda_=lambda_, rules=rule)
        return ((rows, torch.from_numpy(-distances)) for rows, distances in reranked)

    with _naming(features):
        Similarity(query, gallery)  # checks every feature once
        query = expand_queries(query, gallery, search, expand, alpha) if expand else query
        if rerank:
            scores = score_blocks(_with_bar(blocks()), labels, single_gallery_shot)
        else:
            todo = _with_bar(query_blocks(len(query), len(gallery)))
            ranker = Ranker(distance, make_backend(backend), single_gallery_shot)
            scores = ranker.score_queries(query, gallery, labels, todo)
        if save_ranking is not None:
            from fedsim.evaluation.pictures import rank_lists, write_ranked_lists  # imports the readers of data sets

            write_ranked_lists(Path(save_ranking), rank_lists(_with_bar(blocks()), labels))
        has_pairs = verification or roc is not None
        pairs = count_pairs(lambda: _with_bar(pair_blocks(query, gallery, distance)), labels) if has_pairs else None
    if pairs is not None and roc is not None:
        _draw_roc(pairs, Path(roc))
    ranking = average_scores(scores, invalid_as_zero)
    return _as_json(ranking, pairs) if json else _as_table(ranking, pairs)


def _check_options(distance: Distance, rerank: bool, expand: int, verification: bool, roc: str | None) -> None:
    for name, is_given in (("verification", verification), ("roc", roc is not None)):
        if is_given and rerank:
            raise ConfigError(f"--{name}: not with --rerank, whose distances differ in scale between queries")
    for name, wanted in (("rerank", rerank), ("expand", expand != 0)):
        if wanted and distance != "cosine":
            raise ConfigError(f"--{name}: is defined for --distance cosine")


def _check_refinements(values: Mapping[str, object], option: str, is_given: bool) -> None:
    """Refuse values that only have an effect with another option, unless they are the defaults."""
    for name, value in values.items():
        if not is_given and value != inspect.signature(rank_file).parameters[name].default:
            raise ConfigError(f"--{name}: has no effect without --{option}; add that, or leave --{name} out")


@contextmanager
def _naming(path: str) -> Iterator[None]:
    """Name the file in errors about its features."""
    try:
        yield
    except FedSimError:
        raise
    except NotFiniteError as error:
        raise DataError(f"{path}: {error}; write features that are finite, and of a smaller scale") from error
    except ValueError as error:
        raise DataError(f"{path}: {error}") from error


def _working(name: str) -> torch.device:
    device = torch.device(name)
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # the device exists, but does not work
        raise ConfigError(f"--device: {name} cannot be used ({first_line(error)})") from error
    return device


def _with_bar(blocks: Iterable[T]) -> Iterable[T]:
    """Show a progress bar if the blocks take long."""
    return tqdm(blocks, desc="ranking", unit="block", delay=2.0, disable=None, leave=False)


def _as_table(ranking: Ranking, pairs: PairCounts | None) -> str:
    """Return percentages, and the number of queries that count; then of pairs."""
    row = [f"{100 * value:.2f}" for value in ranking.metrics.values()]
    table = tabulate([row], headers=METRICS, disable_numparse=True)
    output = f"{table}\n\nin percent; {ranking.num_valid:,} of {ranking.num_queries:,} queries have a match that counts"
    if pairs is None:
        return output
    rates = _verification_scores(pairs)
    row = ["-" if math.isnan(rate) else f"{100 * rate:.2f}" for rate in rates.values()]
    table = tabulate([row], headers=[*rates], disable_numparse=True)
    counts = f"{pairs.num_positives:,} pairs of one identity, {pairs.num_negatives:,} of two"
    return f"{output}\n\n{table}\n\nin percent, over all queries together; {counts}"


def _as_json(ranking: Ranking, pairs: PairCounts | None) -> str:
    """Return scores as fractions of 1."""
    scores, counts = ranking.metrics, {"n_valid": ranking.num_valid, "n_queries": ranking.num_queries}
    if pairs is not None:
        scores |= _verification_scores(pairs)
        counts |= {"n_positive_pairs": pairs.num_positives, "n_negative_pairs": pairs.num_negatives}
    return json_format.dumps({**scores, **counts, "cmc": ranking.cmc}, indent=2)


def _verification_scores(pairs: PairCounts) -> dict[str, float]:
    return {f"TPR@FPR={name}": pairs.true_positive_rate(rate) for name, rate in RATES.items()}


def _draw_roc(pairs: PairCounts, path: Path) -> None:
    """Draw true over false positive rates, of all thresholds; no false pair is at the left edge, as the axis is log."""
    if not pairs.num_negatives:
        raise DataError("--roc: there is no pair of two identities; leave it out")
    errors, last = np.unique(pairs.false_positives[::-1], return_index=True)  # of equal errors, the largest true rate
    right = pairs.true_positives[::-1][last] / pairs.num_positives
    edge = 0.5 / pairs.num_negatives
    x = [edge, *np.maximum(errors / pairs.num_negatives, edge).tolist(), 1.0]
    with new_figure(4.2, 3.2) as figure:
        axes = figure.subplots()
        axes.step(x, [0.0, *right.tolist(), 1.0], where="post", color=style_of(0).colour, linewidth=1.4)
        for name, rate in RATES.items():
            axes.axvline(rate, color="0.6", linestyle=":", linewidth=0.8)
            share = f"{100 * pairs.true_positive_rate(rate):.1f} %"
            axes.annotate(f"{name}: {share}", (rate, 1.0), (2, -2), textcoords="offset points", rotation=90, va="top")
        axes.set(xscale="log", xlim=(edge, 1.0), ylim=(0.0, 1.0), xlabel="false positive rate",
                 ylabel="true positive rate",
                 title=f"{pairs.num_positives:,} pairs of one identity, {pairs.num_negatives:,} of two")  # fmt: skip
        axes.xaxis.set_major_formatter("{x:g}")
        save_figure(figure, path, "--roc")


def run(args: list[str]) -> str:
    """Parse ``fedsim rank FEATURES.npz [options]``."""
    parser = ArgumentParser(
        exit_on_error=False, allow_abbrev=False, prog="fedsim rank", description="Score features from any program."
    )
    parser.add_argument("features", type=str, help="an npz file, as fedsim predict writes it")
    flags = ("invalid_as_zero", "single_gallery_shot", "rerank", "verification", "json")
    add_options(parser, rank_file, flags, skip=["features"])
    return rank_file(**parsed(parser, args).as_dict())
