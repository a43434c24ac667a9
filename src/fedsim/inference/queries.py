"""Single queries of a finished run: the worst and the best ones, or named ones, with what the model takes for them.

And domain confusion: what stands first in the joined galleries of several test sets. A model that has learnt its
domains' light and cameras finds wrong images at home; one that mixes domains up finds them elsewhere.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fedsim.core.errors import ConfigError, DataError
from fedsim.core.names import did_you_mean, printable
from fedsim.evaluation.pictures import Captions, RankedLists, caption_of, draw_rows, rank_lists
from fedsim.evaluation.ranker import Ranker
from fedsim.evaluation.ranking import JUNK, Floats, Ints, QueryScores, RetrievalLabels
from fedsim.functional.similarity import Distance, Similarity
from fedsim.inference.run_features import ModelOnSet, RunFeatures, each_usable, names_of
from fedsim.report.features import KEYS, Chosen, Row, about_choice

log = logging.getLogger(__name__)
_ONE_SET = "confusion: no model has features of two test sets to join; leave it out, or name another in data.unseen"
_LETTERS = 14
"""of a line below a picture; longer names are broken"""


@dataclass(frozen=True, eq=False)
class ChosenQueries:
    """The ranked lists of n queries of a test set by one model."""

    model: ModelOnSet
    index: Ints
    """[n] positions of the queries"""
    lists: RankedLists
    """[n, k]"""
    distances: Floats
    """[n, k]: 1 - cosine, or Euclidean; NaN where there is no image"""
    precision: Floats
    """[n] average precision, NaN for a query that does not count: it has no match"""
    first: Ints
    """[n] rank of the first match, from 1; 0: there is none"""
    about: str
    """the round of the model, and the choice of the queries, as a text"""

    def rows(self) -> list[Row]:
        """Return a row per query and image of its list: see ``fedsim.inference.results.RunResults.queries``."""
        labels, (queries, gallery) = self.model.labels, self._names
        rows: list[Row] = []
        for number, q in enumerate(self.index.tolist()):
            about: Row = {
                "data set": self.model.data_set,
                "model": self.model.kind,
                "owner": self.model.owner,
                "query": queries[q],
                "identity": int(labels.query_pids[q]),
                "camera": int(labels.query_camids[q]) + 1,
                "AP": float(self.precision[number]),
                "first match": int(self.first[number]),
            }
            for place, i in self._places(number):
                image: Row = {
                    "rank": place + 1,
                    "image": gallery[i],
                    "identity of image": int(labels.gallery_pids[i]),
                    "camera of image": int(labels.gallery_camids[i]) + 1,
                    "is match": int(self.lists.is_match[number, place]),
                    "distance": float(self.distances[number, place]),
                }
                rows.append(about | image)
        return rows

    def picture(self) -> Image.Image:
        """Draw a row per query: see ``fedsim.evaluation.pictures.draw_rows``.

        Below a query stand its file, identity and camera, average precision in percent, and the rank of its first
        match; below a gallery image file, identity, camera and distance.
        """
        labels, (queries, gallery) = self.model.labels, self._names
        of_query, listed = [], []
        for number, q in enumerate(self.index.tolist()):
            score = "has no match"
            if self.first[number]:
                score = f"AP {100 * self.precision[number]:.1f} %\nmatch at {self.first[number]}"
            of_query.append(
                f"{_broken(queries[q])}\n{caption_of(labels.query_pids[q], labels.query_camids[q])}\n{score}"
            )
            captions = []
            for place, i in self._places(number):
                shown = caption_of(labels.gallery_pids[i], labels.gallery_camids[i])
                captions.append(f"{_broken(gallery[i])}\n{shown}\ndistance {self.distances[number, place]:.3f}")
            listed.append(captions)
        heading = printable(f"data set {self.model.data_set}, model {self.model.title}, {self.about}")
        images = self.model.query_images.take(self.index)
        return draw_rows(self.lists, images, self.model.gallery_images, Captions(of_query, listed, heading))

    @property
    def _names(self) -> tuple[list[str], list[str]]:
        return names_of(self.model.query_images, "query"), names_of(self.model.gallery_images, "image")

    def _places(self, number: int) -> list[tuple[int, int]]:
        """Return place from 0, and gallery position, of the images in a query's list."""
        return [(place, i) for place, i in enumerate(self.lists.index[number].tolist()) if i >= 0]


def choose_queries(features: RunFeatures, chosen: Chosen, num: int, top: int) -> list[ChosenQueries]:
    """Rank the galleries of chosen queries, of each test set and model.

    Args:
        features: of a run.
        chosen: worst: the lowest average precision; best: the highest; of equal ones the first. Queries without a match
            do not count. Or the names of queries' files; sets without such queries are left out.
        num: largest number of worst or best queries of a set.
        top: k, images per list.

    Raises:
        ConfigError: if no name is given, or no test set has a query of a name.
    """
    if isinstance(chosen, str) and chosen not in ("worst", "best"):
        chosen = [chosen]
    if not isinstance(chosen, str):
        _check_names(features, chosen)
    settings, lists, about = features.settings, [], about_choice(features.round_, word_of(chosen))
    for model in features.models:
        scores = Ranker(settings.distance).score_queries(model.query, model.gallery, model.labels)
        if isinstance(chosen, str):
            index = extreme_queries(scores, chosen == "worst", num)
        else:
            index = np.flatnonzero(np.isin(names_of(model.query_images, "query"), list(chosen)))
        if len(index):
            lists.append(_ranked(model, index, scores, settings.distance, top, about))
    return lists


def word_of(chosen: Chosen) -> str:
    """Return a choice of queries as a word."""
    return chosen if chosen in ("worst", "best") else "named"


def extreme_queries(scores: QueryScores, worst: bool, num: int) -> Ints:
    """Return the positions of the ``num`` queries with the lowest, or highest, average precision, in this order.

    >>> scores = QueryScores(np.array([2, 1, 0, 9]), np.array([0.5, 1.0, 0.0, 0.1]), *2 * [np.zeros(4)])
    >>> extreme_queries(scores, True, 2), extreme_queries(scores, False, 1)
    (array([3, 0]), array([1]))
    """
    valid = np.flatnonzero(scores.first)
    keys = scores.precision[valid] if worst else -scores.precision[valid]
    return valid[np.argsort(keys, kind="stable")[:num]]


def _check_names(features: RunFeatures, names: Sequence[str]) -> None:
    all_names = {name for model in features.models for name in names_of(model.query_images, "query")}
    if not names:
        raise ConfigError("queries: no name is given; give worst, best, or the names of queries' files")
    if missing := next((name for name in names if name not in all_names), None):
        remedy = did_you_mean(missing, all_names, f"names are those of files, such as {min(all_names)}")
        raise ConfigError(f"queries: no test set has the query {printable(missing)}; {remedy}")


def _ranked(
    model: ModelOnSet, index: Ints, scores: QueryScores, distance: Distance, top: int, about: str
) -> ChosenQueries:
    similarity, labels = Similarity(model.query, model.gallery, distance), model.labels.take(index)

    def blocks_of_chosen() -> Iterator[tuple[Ints, Tensor]]:
        for rows, block in similarity:
            places = np.flatnonzero((index >= rows.start) & (index < rows.stop))
            if len(places):
                yield places, block[torch.from_numpy(index[places] - rows.start)]

    lists = rank_lists(blocks_of_chosen(), labels, top)
    first = scores.first[index]
    precision = np.where(first > 0, scores.precision[index], np.nan)
    return ChosenQueries(model, index, lists, _distances(model, index, lists, distance), precision, first, about)


def _distances(model: ModelOnSet, index: Ints, lists: RankedLists, distance: Distance) -> Floats:
    """Return [n, k]; a block of Euclidean similarities has only what orders them."""
    if distance == "cosine":
        values = 1.0 - lists.similarity.astype(np.float64)
    else:
        query, gallery = model.query[index].double(), model.gallery[np.maximum(lists.index, 0)].double()
        values = (gallery - query[:, None]).norm(dim=2).numpy()
    return np.where(lists.index >= 0, values, np.nan)


def _broken(name: str) -> str:
    r"""Return a name in lines of a picture's width, as equal as possible.

    >>> _broken("0038_c5s1_000000_00.jpg")
    '0038_c5s1_00\n0000_00.jpg'
    """
    text = printable(name)
    length = math.ceil(len(text) / math.ceil(len(text) / _LETTERS))
    return "\n".join(text[start : start + length] for start in range(0, len(text), length))


def count_first_images(features: RunFeatures) -> list[Row]:
    """Count the first images of all queries, where a model's galleries of several test sets are joined.

    Identities of two data sets are two people, unless clients have common labels; so are their cameras. Junk is left
    out, and queries without a match do not count, as in the scores; nor does a set without any match. Of a personalised
    model these are the test sets of which ``fedsim predict`` writes its features: those of its client and the unseen
    ones.

    Returns:
        A row per model, data set of the queries, data set and camera of the first image, and whether it is a match,
        with the number of ``queries``; the keys are ``fedsim.report.features.KEYS``, cameras count from 1.

    Raises:
        DataError: if no model has features of two test sets with matches, or each has features of different widths.
    """
    by_model: dict[str, list[ModelOnSet]] = {}
    for model in features.models:
        if model.kind != "personalised" or model.owner:  # else each set may have a model of its own
            by_model.setdefault(model.title, []).append(model)
    has_common = features.data.federated.classes is not None
    joined = [sets for sets in by_model.values() if len(sets) > 1]
    rows = each_usable(joined, lambda sets: _rows_of(sets, has_common, features.settings.distance))
    if not rows:
        raise DataError(_ONE_SET)
    return [row for of_model in rows for row in of_model]


def joined_labels(parts: Sequence[RetrievalLabels], has_common: bool) -> list[RetrievalLabels]:
    """Return the labels of each set's queries in the joined gallery of all sets, in the order of the sets.

    ``has_common``: whether equal identities of two sets are one person.
    """
    is_junk = np.concatenate([part.is_junk for part in parts])
    gallery = [part.gallery_pids for part in parts]
    pids = _numbered([*gallery, *(part.query_pids for part in parts)], apart=not has_common)
    camids = _numbered([*(part.gallery_camids for part in parts), *(part.query_camids for part in parts)], apart=True)
    of_gallery = np.where(is_junk, JUNK, np.concatenate(pids[: len(parts)]))
    cameras, starts = np.concatenate(camids[: len(parts)]), np.cumsum([0, *map(len, gallery)])
    joined = []
    for number, part in enumerate(parts):
        places = None if part.own is None else np.where(part.own >= 0, part.own + starts[number], -1)
        of_queries = pids[len(parts) + number], camids[len(parts) + number]
        joined.append(RetrievalLabels(*of_queries, of_gallery, cameras, part.camera_aware, (JUNK,), places))
    return joined


def _numbered(values: Sequence[Ints], apart: bool) -> list[Ints]:
    """Number the values of n galleries, then of their n sets of queries, from 0; ``apart``: each set has its own."""
    half, sizes = len(values) // 2, list(map(len, values))
    of_set = np.repeat(np.arange(len(values)) % half, sizes) * apart
    _, numbers = np.unique(np.stack([of_set, np.concatenate(values)]), axis=1, return_inverse=True)
    return np.split(numbers.reshape(-1).astype(np.int64), np.cumsum(sizes)[:-1])


def _rows_of(sets: Sequence[ModelOnSet], has_common: bool, distance: Distance) -> list[Row]:
    """Return the rows of one model; a set of which no query has a match is left out, with a line."""
    if len(widths := {model.query.shape[1] for model in sets}) > 1:
        raise DataError(
            f"confusion: the features of {sets[0].title} have {' and '.join(map(str, sorted(widths)))} numbers "
            "in different test sets, which cannot be joined; write all anew by fedsim predict"
        )
    labels = joined_labels([model.labels for model in sets], has_common)
    matching = [model for model, joined in zip(sets, labels, strict=True) if joined.num_valid]
    if len(matching) < 2:
        raise DataError(_ONE_SET)
    if len(matching) < len(sets):
        for model in (model for model in sets if model not in matching):
            log.warning("left out: confusion: no query of %s has a match: %s", model.name, model.labels.why_no_match())
        return _rows_of(matching, has_common, distance)
    gallery = torch.cat([model.gallery for model in sets])
    domain = np.repeat(np.arange(len(sets)), [len(model.gallery) for model in sets])
    cameras = np.concatenate([model.labels.gallery_camids for model in sets]) + 1
    rows: list[Row] = []
    for model, joined in zip(sets, labels, strict=True):
        lists = rank_lists(Similarity(model.query, gallery, distance), joined, k=1)
        counts: Counter[tuple[int, int, bool]] = Counter()
        for q, (image, is_match) in enumerate(zip(lists.index[:, 0].tolist(), lists.is_match[:, 0], strict=True)):
            if len(joined.positives_and_junk(q)[0]):
                counts[int(domain[image]), int(cameras[image]), bool(is_match)] += 1
        for (first, camera, is_match), count in sorted(counts.items()):
            values = model.kind, model.owner, model.data_set, sets[first].data_set, camera, int(is_match), count
            rows.append(dict(zip(KEYS, values, strict=True)))
    return rows
