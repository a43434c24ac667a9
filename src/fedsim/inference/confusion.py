"""Domain confusion: what stands first in the joined galleries of several test sets.

A model that has learnt its domains' light and cameras finds wrong images at home; one that mixes domains up finds them
elsewhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch

from fedsim.core.errors import DataError
from fedsim.evaluation.pictures import rank_lists
from fedsim.evaluation.ranking import JUNK, Ints, RetrievalLabels
from fedsim.functional.similarity import Distance, Similarity
from fedsim.inference.run_features import ModelOnSet, RunFeatures
from fedsim.report.query_files import KEYS, Row


def count_first_images(features: RunFeatures) -> list[Row]:
    """Count the first images of all queries, where a model's galleries of several test sets are joined.

    Identities of two data sets are two people, unless clients have common labels; so are their cameras. Junk is left
    out, and queries without a match do not count, as in the scores. Of a personalised model these are the test sets of
    which ``fedsim predict`` writes its features: those of its client and the unseen ones.

    Returns:
        A row per model, data set of the queries, data set and camera of the first image, and whether it is a match,
        with the number of ``queries``; the keys are ``fedsim.report.query_files.KEYS``, cameras count from 1.

    Raises:
        DataError: if each model has features of one test set only.
    """
    by_model: dict[str, list[ModelOnSet]] = {}
    for model in features.models:
        if model.kind != "personalised" or model.owner:  # else each set may have a model of its own
            by_model.setdefault(model.title, []).append(model)
    rows: list[Row] = []
    for sets in by_model.values():
        if len(sets) > 1:
            labels = joined_labels([model.labels for model in sets], features.has_common_labels)
            rows += _rows_of(sets, labels, features.settings.distance)
    if not rows:
        raise DataError("confusion: no model has features of two test sets, whose galleries could be joined")
    return rows


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


def _rows_of(sets: Sequence[ModelOnSet], labels: Sequence[RetrievalLabels], distance: Distance) -> list[Row]:
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
