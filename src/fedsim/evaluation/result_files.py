"""Files about single images: ranked lists, and pictures of them and of a model's maps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedsim.data.federated import RetrievalSet
from fedsim.data.images import Images
from fedsim.data.pixels import Pixels
from fedsim.evaluation.feature_file import Files
from fedsim.evaluation.pictures import (
    caption_of,
    draw_maps,
    draw_ranked_lists,
    rank_lists,
    write_picture,
    write_ranked_lists,
)
from fedsim.evaluation.ranking import RetrievalLabels
from fedsim.evaluation.scored_set import ScoredSet
from fedsim.training.flat_model import FlatModel

_MAPS = 8  # images whose maps are drawn


def write_lists(path: Path, blocks: Iterable[tuple[slice, Tensor]], labels: RetrievalLabels, data: ScoredSet) -> None:
    """Write ranked lists to ``path``.npz and a picture of some to ``path``.png; see :func:`rank_lists` for ``blocks``.

    ``labels`` are those of ``data``, or of its first random split.
    """
    query, gallery = first_images(data.images)
    lists = rank_lists(blocks, labels)
    write_ranked_lists(path.with_name(f"{path.name}.npz"), lists, files_of(data))
    write_picture(path.with_name(f"{path.name}.png"), draw_ranked_lists(lists, labels, query, gallery))


def files_of(data: ScoredSet) -> Files:
    """Return the files of a set's queries and gallery, or of its first random split."""
    paths = ([str(path or "") for path in images.locations()] for images in first_images(data.images))
    query, gallery = (np.array(names, dtype=np.str_) for names in paths)
    return Files(query, gallery)


def first_images(data: RetrievalSet) -> tuple[Images, Images]:
    """Return the images of the queries and the gallery of a set, or of its first random split."""
    query, gallery = data.query.images, data.gallery.images
    if not data.splits:
        return query, gallery
    first = data.splits[0]
    return gallery.take(first.query), gallery.take(first.gallery)


def write_maps(
    path: Path, model: FlatModel, data: ScoredSet, open_images: Callable[[Images, str, torch.device], Pixels]
) -> None:
    """Draw a model's maps of the first queries, or of the first gallery images if there are no queries, as a PNG file.

    The model is in evaluation mode. ``open_images``: images, name, device -> their pixels. Raises ConfigError if the
    backbone has no maps.
    """
    split = data.images.query if len(data.images.query) else data.images.gallery
    first = split.take(np.arange(min(_MAPS, len(split))))
    captions = [caption_of(pid, camera) for pid, camera in zip(first.pids, first.camids, strict=True)]
    [pixels] = open_images(first.images, f"maps of {data.domain}", model.device).batches([torch.arange(len(first))])
    write_picture(path, draw_maps(model.network.backbone, pixels, captions))
