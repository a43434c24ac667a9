"""Smaller clients: a random part of the identities, and of their images."""

from __future__ import annotations

import numpy as np

from fedsim.core.checks import at_least
from fedsim.core.errors import ConfigError
from fedsim.core.seeding import numpy_generator
from fedsim.data.images import Index, Split, turns

__all__ = ["cap_training"]


def cap_training(client: str, train: Split, max_identities: int | None, max_images: int | None) -> Split:
    """Keep a random part of a client's training images, in their order.

    Identities are drawn first. Then one image of each identity is drawn in turn, until there are enough, so each of
    these identities keeps an image. A larger cap keeps all images of a smaller one.

    Args:
        client: its name, for messages and as the key of the draw.
        train: its training images.
        max_identities: at most; None: all.
        max_images: at most; None: all.

    Raises:
        ConfigError: if a cap is below 1, or there are fewer images than identities.
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
        kept = np.sort(_deal(client, train.pids, kept)[:max_images])
    return train if len(kept) == len(train) else train.take(kept)


def _deal(client: str, pids: Index, kept: Index) -> Index:
    """Order positions at random, but the first images of all identities before their second ones, and so on."""
    everything = numpy_generator("caps", client, "images").permutation(len(pids))
    shuffled = everything[np.isin(everything, kept)]
    order: Index = shuffled[np.argsort(turns(pids[shuffled]), kind="stable")]
    return order
