"""Division of one data set's training images among several clients, and caps on a client's images."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

from fedsim.core.checks import at_least, positive, within
from fedsim.core.errors import ConfigError
from fedsim.core.seeding import numpy_generator
from fedsim.data.images import Index, Split, turns

Partition = Literal["by_dataset", "union", "by_camera", "by_identity", "iid", "stratified", "dirichlet", "shards"]

_SHARDS = 2  # per client (McMahan et al., AISTATS 2017)


class Part(NamedTuple):
    """The share of one client."""

    name: str  # added to the data set's name
    images: Index  # positions in the training images, ascending


def divide(data_set: str, train: Split, partition: Partition, parts: int = 4, alpha: float = 0.5) -> list[Part]:
    """Divide training images; every image goes to one client.

    ``by_camera``: each camera is a client (paper 003). ``by_identity``: identities are dealt out in equal numbers
    (paper 003). ``iid``: images are dealt out at random. ``stratified``: each client gets equally many images
    of each identity, up to a difference of one (paper 002, Table 10). ``dirichlet``: each identity's images are dealt
    out in proportions sampled from a Dirichlet distribution (Hsu et al., 2019). ``shards``: images sorted by identity
    are cut into two shards per client (McMahan et al., 2017).

    ``parts`` is the number of clients, except for ``by_camera``. Small values of ``alpha``, of ``dirichlet``, give each
    identity to few clients. The data set's name is the key of random choices. Raises ConfigError if a client would have
    no image.
    """
    if partition == "by_camera":
        return [Part(f"cam{camera + 1}", np.flatnonzero(train.camids == camera)) for camera in np.unique(train.camids)]
    within("data", f"[1, {len(train)}]", parts=parts)  # at least one image per client
    rng = numpy_generator("partition", data_set, partition)
    owner = np.empty(len(train), dtype=np.int64)
    if partition == "by_identity":
        of_identity = np.empty(len(train.identities), dtype=np.int64)
        of_identity[rng.permutation(len(of_identity))] = np.arange(len(of_identity)) % parts
        owner = of_identity[np.searchsorted(train.identities, train.pids)]
    elif partition == "iid":
        owner = rng.permutation(np.arange(len(train)) % parts)
    elif partition == "stratified":  # in turn, from one identity to the next: remainders are dealt evenly, too
        order = rng.permutation(len(train))
        owner[order[np.argsort(train.pids[order], kind="stable")]] = np.arange(len(train)) % parts
    elif partition == "dirichlet":
        owner = _deal_by_dirichlet(train, parts, alpha, rng)
    elif partition == "shards":
        shards = np.array_split(np.argsort(train.pids, kind="stable"), _SHARDS * parts)
        for position, shard in enumerate(rng.permutation(len(shards))):
            owner[shards[shard]] = position % parts
    else:
        raise ConfigError(f"data.partition: {partition} does not divide a data set")
    divided = [Part(f"part{number + 1}", np.flatnonzero(owner == number)) for number in range(parts)]
    if empty := [part.name for part in divided if not len(part.images)]:
        hint = " or a larger data.alpha" if partition == "dirichlet" else ""
        raise ConfigError(f"data.parts: {partition} leaves {data_set}-{empty[0]} without images; use fewer parts{hint}")
    return divided


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


def cap_training(client: str, train: Split, max_identities: int | None, max_images: int | None) -> Split:
    """Keep a random part of a client's training images, in their order.

    Identities are sampled first, then one image of each identity in turn, until there are enough: each of these
    identities keeps an image. A larger cap keeps all images of a smaller one; None keeps all. The client's name
    is the key of the random choice. Raises ConfigError for a cap below 1, or fewer images than identities.
    """
    at_least("data", 1, "; null keeps everything", max_identities=max_identities, max_images=max_images)
    kept = np.arange(len(train))
    if max_identities is not None:
        order = numpy_generator("caps", client, "identities").permutation(train.identities)
        kept = np.flatnonzero(np.isin(train.pids, order[:max_identities]))
    if max_images is not None and max_images < len(kept):
        count = len(np.unique(train.pids[kept]))
        if max_images < count:
            raise ConfigError(
                f"data.max_images: {max_images} is less than the {count} identities of client {client}, each of which "
                f"keeps an image; set data.max_identities to at most {max_images}"
            )
        # in random order, but the first images of all identities before their second ones, and so on
        shuffled = numpy_generator("caps", client, "images").permutation(len(train))
        shuffled = shuffled[np.isin(shuffled, kept)]
        kept = np.sort(shuffled[np.argsort(turns(train.pids[shuffled]), kind="stable")][:max_images])
    return train if len(kept) == len(train) else train.take(kept)
