"""How a source lists its data sets, in texts: two lists are compared, also between processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np

from fedsim.data.images import Domain, ReIDSource, Size, Split

SEEN = 12
"""images of a part that are decoded"""


def labels_of(domains: list[Domain]) -> list[Any]:
    """Return names, labels and locations of data sets."""
    return [
        (domain.name, [(list(part.pids), list(part.camids), part.images.locations()) for part in domain.parts])
        for domain in domains
    ]


def chosen_of(part: Split) -> np.ndarray[Any, Any]:
    """Return the positions [m] int64 of some images at equal distances."""
    return np.unique(np.linspace(0, len(part) - 1, min(SEEN, len(part))).astype(np.int64))


def listed_and_decoded(source: ReIDSource, size: Size) -> tuple[list[Any], list[bytes]]:
    """Return the labels of all data sets, and the pixels of some images of each part."""
    domains = source.domains()
    parts = [part for domain in domains for part in domain.parts if len(part)]
    pixels = [part.images.take(chosen_of(part)).decode(size).numpy().tobytes() for part in parts]
    return labels_of(domains), pixels


@contextmanager
def folders_reversed() -> Iterator[None]:
    """Let folders list their files in the opposite order, as another file system could."""
    names, entries = os.listdir, os.scandir

    with (
        mock.patch.object(os, "listdir", lambda *args: names(*args)[::-1]),
        mock.patch.object(os, "scandir", lambda *args: _Reversed(entries(*args))),
    ):
        yield


class _Reversed:
    """The entries of a folder from the last one to the first."""

    def __init__(self, entries: Any) -> None:
        with entries:
            self._entries = iter([*entries][::-1])

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._entries)

    def __enter__(self) -> Iterator[Any]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the entries."""
