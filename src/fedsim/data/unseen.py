"""Unseen data sets are targets: their people may not train under another name, or in another version."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from functools import cache
from pathlib import Path

from fedsim.core.errors import ConfigError
from fedsim.data.images import Domain

_VERSIONS = (frozenset({"cuhk03", "cuhk03np"}),)
"""Names of data sets that are versions of one. Two of one name are refused anyway."""


def check_unseen(domains: Sequence[Domain], unseen: Collection[str], training: Collection[str]) -> None:
    """Refuse a target among the sources.

    Args:
        domains: all data sets.
        unseen: names of the targets, as the user gives them.
        training: names of the data sets on which clients train.

    Raises:
        ConfigError: if a source is another version of a target, or one of its training images is an image of a target.
    """
    sources = [domain for domain in domains if domain.name in training]
    location_of = _places()
    for target in (domain for domain in domains if domain.name in unseen):
        files = {location_of(path) for split in target.parts for path in split.files}
        for source in sources:
            if any({target.name, source.name} <= versions for versions in _VERSIONS):
                raise ConfigError(
                    f"data.unseen: {target.name} is among the sources: {source.name} shows the same people; take "
                    f"{source.name} out of data.source"
                )
            trained = source.train.files if source.train is not None else ()
            shared = (path for path in trained if location_of(path) in files)
            if (image := next(shared, None)) is not None:
                raise ConfigError(
                    f"data.unseen: {target.name} is among the sources: {source.name} trains on its image {image}; take "
                    f"{source.name} out of data.source"
                )


def _places() -> Callable[[Path], tuple[str, str]]:
    """Return a function from a file to its real folder and its name: few folders have many files."""
    real = cache(os.path.realpath)
    return lambda path: (real(path.parent), path.name)
