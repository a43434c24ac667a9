"""Smaller clients: a random part of the identities, and of their images."""

from __future__ import annotations

import numpy as np

from fedsim.core.checks import at_least
from fedsim.core.errors import ConfigError
from fedsim.core.seeding import numpy_generator
from fedsim.data.images import Split, turns


def cap_training(client: str, train: Split, max_identities: int | None, max_images: int | None) -> Split:
    """Keep a random part of a client's training images, in their order.

    Identities are drawn first. Then one image of each identity is drawn in turn, until there are enough, so each of
    these identities keeps an image. A larger cap keeps all images of a smaller one; None keeps all. The client's name
    is the key of the draw. Raises ConfigError for a cap below 1, or fewer images than identities.
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
