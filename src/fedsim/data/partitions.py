"""Division of one data set's training images among several clients."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

from fedsim.core.checks import at_least, positive
from fedsim.core.errors import ConfigError
from fedsim.core.seeding import numpy_generator
from fedsim.data.images import Index, Split

Partition = Literal["by_dataset", "union", "by_camera", "by_identity", "iid", "dirichlet", "shards"]

_SHARDS = 2
"""Shards per client (McMahan et al., AISTATS 2017)."""


class Part(NamedTuple):
    """The share of one client."""

    name: str
    """added to the data set's name"""
    images: Index
    """positions in the training images, ascending"""


def divide(data_set: str, train: Split, how: Partition, parts: int = 4, alpha: float = 0.5) -> list[Part]:
    """Divide training images; every image goes to one client.

    ``by_camera``: each camera is a client (paper 003). ``by_identity``: identities are dealt out in equal numbers
    (paper 003). ``iid``: images are dealt out at random. ``dirichlet``: each identity's images are dealt out in
    proportions drawn from a Dirichlet distribution (Hsu et al., 2019). ``shards``: images sorted by identity are cut
    into two shards per client (McMahan et al., 2017).

    ``parts`` is the number of clients, except for ``by_camera``. Small values of ``alpha``, of ``dirichlet``, give each
    identity to few clients. The data set's name is the key of random choices.

    Raises:
        ConfigError: if a client would have no image.
    """
    if how == "by_camera":
        return [Part(f"cam{camera + 1}", np.flatnonzero(train.camids == camera)) for camera in np.unique(train.camids)]
    at_least("data", 1, parts=parts)
    rng = numpy_generator("partition", data_set, how)
    if how == "by_identity":
        owner = _deal_identities(train, parts, rng)
    elif how == "iid":
        owner = rng.permutation(np.arange(len(train)) % parts)
    elif how == "dirichlet":
        owner = _deal_by_dirichlet(train, parts, alpha, rng)
    elif how == "shards":
        owner = _deal_shards(train, parts, rng)
    else:
        raise ConfigError(f"data.partition: {how} does not divide a data set")
    found = [Part(f"part{number + 1}", np.flatnonzero(owner == number)) for number in range(parts)]
    if empty := [part.name for part in found if not len(part.images)]:
        hint = " or a larger data.alpha" if how == "dirichlet" else ""
        raise ConfigError(f"data.parts: {how} leaves {data_set}-{empty[0]} without images; use fewer parts{hint}")
    return found


def _deal_identities(train: Split, parts: int, rng: np.random.Generator) -> Index:
    identities = train.identities
    of_identity = np.empty(len(identities), dtype=np.int64)
    of_identity[rng.permutation(len(identities))] = np.arange(len(identities)) % parts
    owner: Index = of_identity[np.searchsorted(identities, train.pids)]
    return owner


def _deal_by_dirichlet(train: Split, parts: int, alpha: float, rng: np.random.Generator) -> Index:
    positive("data", alpha=alpha)
    owner = np.empty(len(train), dtype=np.int64)
    for pid in train.identities:
        images = rng.permutation(np.flatnonzero(train.pids == pid))
        shares = rng.dirichlet(np.full(parts, alpha))
        bounds = np.round(np.cumsum(shares)[:-1] * len(images)).astype(np.int64)
        for number, group in enumerate(np.split(images, bounds)):
            owner[group] = number
    return owner


def _deal_shards(train: Split, parts: int, rng: np.random.Generator) -> Index:
    shards = np.array_split(np.argsort(train.pids, kind="stable"), _SHARDS * parts)
    owner = np.empty(len(train), dtype=np.int64)
    for position, shard in enumerate(rng.permutation(len(shards))):
        owner[shards[shard]] = position % parts
    return owner
