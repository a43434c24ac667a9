"""Retrieval among the images of one list: n images with D features, in groups (people, or clusters) and cameras."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedsim.core.transfer import send
from fedsim.functional.similarity import Similarity


class Retrieved(NamedTuple):
    """Scores of images that search for their group; both are 0 without queries."""

    mAP: float  # noqa: N815 - its name everywhere
    """mean average precision"""
    rank1: float
    """share of images whose most similar other image is of their group"""


def average_precisions(matches: Tensor) -> Tensor:
    """Return the average precision of each query, [q] float64, from its ranked matches [q, n] bool; NaN without any.

    >>> average_precisions(torch.tensor([[False, True, True], [True, False, False]])).tolist()
    [0.5833333333333333, 1.0]
    """
    ranks, hits = torch.arange(1, matches.shape[1] + 1, device=matches.device), matches.double()
    # counts: a cumulated sum of floats has no deterministic form on GPUs
    return (matches.cumsum(1).double() / ranks * hits).sum(1) / hits.sum(1)


def leave_one_out(features: Tensor, groups: Tensor, cameras: Tensor) -> Retrieved:
    """Rank all images for each image, and score the ranks of the other images of its group.

    As on test sets, images of the query's group in the query's camera do not count. In a group of a single camera only
    the query does not count. Queries are the images of groups of at least two.

    Args:
        features: [n, D], of any length.
        groups: [n] int64 on the CPU, -1: no group; such an image is neither query nor in the gallery.
        cameras: [n] int64 on the CPU.

    >>> features = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.6, 0.7]])
    >>> leave_one_out(features, torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 0, 1]))
    Retrieved(mAP=1.0, rank1=1.0)
    >>> leave_one_out(features, torch.tensor([0, 1, 1, 0]), torch.tensor([0, 1, 0, 1]))
    Retrieved(mAP=0.41666666666666663, rank1=0.0)
    """
    inside = (groups >= 0).nonzero().flatten()
    groups, cameras, device = groups[inside], cameras[inside], features.device
    in_cameras = torch.stack([groups, cameras], dim=1).unique(dim=0)[:, 0].bincount()
    places = torch.where(in_cameras[groups] > 1, cameras, -1 - torch.arange(len(groups)))  # -1 - i: of image i alone
    queries = (groups.bincount()[groups] > 1).nonzero().flatten()
    if not len(queries):
        return Retrieved(0.0, 0.0)
    queries, inside, groups, places = (send(index, device) for index in (queries, inside, groups, places))
    features = features[inside]
    first, precision = [], []
    for rows, similarity in Similarity(features[queries], features):
        at = queries[rows, None]
        in_group = groups[at] == groups
        left_out = in_group & (places[at] == places)
        order = similarity.masked_fill_(left_out, -torch.inf).sort(dim=1, descending=True, stable=True).indices
        matches = (in_group & ~left_out).gather(1, order)
        first.append(matches[:, 0].double())
        precision.append(average_precisions(matches))
    return Retrieved(*torch.stack([torch.cat(precision).mean(), torch.cat(first).mean()]).tolist())
