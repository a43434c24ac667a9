"""Retrieval among the images of one list: n images with D features, in groups (people, or clusters) and cameras."""

from __future__ import annotations

import torch
from torch import Tensor

from fedsim.functional.similarity import Similarity


def leave_one_out_rank1(features: Tensor, groups: Tensor, cameras: Tensor) -> float:
    """Return the share of images whose most similar other image is of their own group; 0 if none could be.

    As on test sets, images of the query's group in the query's camera do not count. Of a group in a single camera only
    the query does not count. Queries are the images of groups of at least two.

    Args:
        features: [n, D], of any length.
        groups: [n] int64 on the CPU, -1: of none, and then neither query nor found.
        cameras: [n] int64 on the CPU.

    >>> features = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.6, 0.7]])
    >>> leave_one_out_rank1(features, torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 0, 1]))
    1.0
    >>> leave_one_out_rank1(features, torch.tensor([0, 1, 1, 0]), torch.tensor([0, 1, 0, 1]))
    0.0
    """
    inside = (groups >= 0).nonzero().flatten()
    groups, cameras, device = groups[inside], cameras[inside], features.device
    in_cameras = torch.stack([groups, cameras], dim=1).unique(dim=0)[:, 0].bincount()
    places = torch.where(in_cameras[groups] > 1, cameras, -1 - torch.arange(len(groups)))  # -1 - i: of image i alone
    queries = (groups.bincount()[groups] > 1).nonzero().flatten().to(device)
    if not len(queries):
        return 0.0
    features, groups, places = features[inside.to(device)], groups.to(device), places.to(device)
    hits = torch.zeros((), dtype=torch.int64, device=device)
    for rows, similarity in Similarity(features[queries], features):
        at = queries[rows, None]
        left_out = (groups[at] == groups) & (places[at] == places)
        hits += (groups[similarity.masked_fill_(left_out, -torch.inf).argmax(1)] == groups[at[:, 0]]).sum()
    return int(hits) / len(queries)
