"""The identity of a run's data: people, cameras and images of each data set, and a digest of its files and labels.

It is that of the data sets as their sources list them: validation, clients and limits are divided off by settings. The
digest of a data set depends on the roles of its images (training, query, gallery), on their identities and cameras, and
on the names and sizes of their files below the deepest common folder. It depends neither on this folder nor on the
order of the files. A file whose new content has as many bytes as the old one has the same digest.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from fedsim.data.federated import ClientData
from fedsim.data.images import Domain, Index, ReIDSource, Split

ROLES = ("train", "query", "gallery")
LABELS_ONLY = " (labels only)"
"""end of a digest that no pixel decides: images of a class of the user's, without files and without a content"""


def identity_of(domains: Sequence[Domain], sources: Sequence[ReIDSource], most_listed: int) -> dict[str, Any]:
    """Return the identity of data sets, as ``summary.json`` has it.

    ``digest``: of all of them; ``sets``: name -> ``train``, ``query`` and ``gallery``, each with its ``people``,
    ``cameras`` and ``images``, and ``digest``. Of a data set with random splits, query and gallery are those of the
    first one, and ``pool`` is all images from which the ``splits`` take them. Of more than ``most_listed`` data sets
    there are only the sums of images.
    """
    if len(domains) <= most_listed:
        sets = {domain.name: _described(domain) for domain in domains}
        return {"digest": _short(*(f"{name}\0{sets[name]['digest']}" for name in sorted(sets))), "sets": sets}
    digests = [source.digest() for source in sources]
    if not digests or None in digests:
        digests = [f"{domain.name}\0{digest_of(domain)}" for domain in domains]
    images = {role: sum(len(getattr(domain, role) or ()) for domain in domains) for role in ROLES}
    return {"digest": _short(*map(str, digests)), "num_sets": len(domains), "images": images}


def identity_of_generated(clients: Iterable[ClientData]) -> dict[str, Any] | None:
    """Return number and digest of the clients' generated images; None if there are none."""
    digests, images = [], 0
    for client in clients:
        if generated := client.generated:
            split = Split(generated.images, generated.labels, np.zeros_like(generated.labels))
            empty = split.take(np.zeros(0, dtype=np.int64))
            labels = hashlib.sha256(generated.classes.tobytes() + generated.weights.tobytes()).hexdigest()
            digests.append(f"{client.name}\0{digest_of(Domain(client.name, split, empty, empty))}\0{labels}")
            images += len(generated)
    return {"digest": _short(*digests), "images": images} if images else None


def digest_of(domain: Domain) -> str:
    """Return a digest of a data set; see the head of this module."""
    parts = {role: split for role in ROLES if (split := getattr(domain, role)) is not None}
    is_known = True
    paths = {role: ["" if path is None else str(path) for path in s.images.origins()] for role, s in parts.items()}
    start = _length_of_folder([path for of_part in paths.values() for path in of_part if path])
    hashed, order = hashlib.sha256(), np.zeros(0, dtype=np.int64)
    for role, split in parts.items():
        names = [path[start:] for path in paths[role]]
        order = np.array(sorted(range(len(names)), key=names.__getitem__), dtype=np.int64)
        sizes = np.array(file_sizes(paths[role]) if any(paths[role]) else [0] * len(names), dtype=np.int64)
        content = split.images.content()
        is_known &= content is not None
        hashed.update(f"{role} {len(split)}\0".encode() + (content or b""))
        hashed.update("\0".join([names[i] for i in order]).encode(errors="surrogateescape"))
        for numbers in (sizes, split.pids, split.camids):
            hashed.update(numbers[order].astype("<i8").tobytes())
    places = np.argsort(order)  # of the gallery's images, among the sorted ones
    for split_of_gallery in domain.splits:
        for index in split_of_gallery:
            hashed.update(f"{len(index)}\0".encode() + np.sort(places[index]).astype("<i8").tobytes())
    return hashed.hexdigest()[:16] + ("" if is_known else LABELS_ONLY)


def file_sizes(paths: Iterable[str | os.PathLike[str]]) -> list[int]:
    """Return the bytes of each file; -1 if it cannot be found: reading it will raise the error."""
    sizes = []
    for path in paths:
        try:
            sizes.append(os.stat(path).st_size)
        except (OSError, ValueError):
            sizes.append(-1)
    return sizes


def _length_of_folder(paths: Sequence[str]) -> int:
    """Return the number of characters of the deepest common folder, with its slash."""
    # characters are meant: they are cut at a slash
    common = os.path.commonprefix([min(paths), max(paths)]) if paths else ""  # noqa: RUF071
    return common.rfind("/") + 1


def _described(domain: Domain) -> dict[str, Any]:
    gallery, pool = domain.gallery, {}
    of_query, of_gallery = (domain.query.pids, domain.query.camids), (gallery.pids, gallery.camids)
    if domain.splits:
        of_query, of_gallery = ((gallery.pids[index], gallery.camids[index]) for index in domain.splits[0])
        pool = {"pool": _counts(gallery.pids, gallery.camids), "splits": len(domain.splits)}
    train = None if domain.train is None else _counts(domain.train.pids, domain.train.camids)
    if domain.train is not None and train is not None:  # an identity 0 is a class, and no distractor
        train["people"] = None if domain.lacks_identities else len(domain.train.identities)
    described = {"train": train, "query": _counts(*of_query), "gallery": _counts(*of_gallery), **pool}
    return described | {"digest": digest_of(domain)}


def _counts(pids: Index, camids: Index) -> dict[str, int | None]:
    return {"people": len(np.unique(pids[pids > 0])), "cameras": len(np.unique(camids)), "images": len(pids)}


def _short(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode(errors="surrogateescape")).hexdigest()[:16]
