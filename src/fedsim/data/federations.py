"""From data sets to a federation: the clients with their images, and the test sets.

Unseen data sets are targets: their people may not train under another name, or in another version. Whether a fit can
use a data set shows from its labels alone.
"""

from __future__ import annotations

import logging
import os
import stat
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np

from fedsim.core.checks import known
from fedsim.core.errors import ConfigError, DataError
from fedsim.core.seeding import numpy_generator
from fedsim.data.federated import ONE_IDENTITY, ClientData, FederatedData, RetrievalSet
from fedsim.data.images import Domain, Index, Split
from fedsim.data.partitions import Partition, cap_training, divide

log = logging.getLogger(__name__)

Validation = Literal["identities", "first_image", "images", "none"]
LabelScope = Literal["own", "common"]  # numbering of the identities: by each client, or common to all

RESERVED = ("seen", "unseen", "mean seen", "mean unseen")  # names of means over data sets, in files and in tables


def build_federation(
    domains: Sequence[Domain],
    *,
    partition: Partition = "by_dataset",
    parts: int = 4,
    alpha: float = 0.5,
    unseen: Sequence[str] = (),
    public: str | None = None,
    val: Validation = "identities",
    val_fraction: float = 0.2,
    max_images: int | None = None,
    max_identities: int | None = None,
    labels: LabelScope = "own",
) -> FederatedData:
    """Turn data sets into clients and test sets.

    Data sets without training images are unseen. For the other arguments see
    :class:`fedsim.data.FederatedDataModule`, and for details :func:`fedsim.data.partitions.divide`,
    :func:`fedsim.data.partitions.cap_training` (before validation images are held out) and :func:`split_validation`.

    Raises ConfigError if a name does not exist, the public data set is named as unseen, no client is left to train, a
    client trains on people of an unseen data set, or ``val`` would hold out classes; DataError if a client's data
    cannot be split.
    """
    check_names(domains)
    names = [domain.name for domain in domains]
    known("data.unseen", unseen, names, "data set")
    known("data.public", [public] if public else [], names, "data set")
    if public in unseen:
        raise ConfigError(
            f"data.public: {public} is named in data.unseen, too, and images of the server are no test set; leave it "
            "out of one of them"
        )
    hidden = {*unseen, *([public] if public else [])}
    seen = {d.name: d.train for d in domains if d.train is not None and d.name not in hidden}
    if not seen:
        raise ConfigError(
            "data: no data set with training images is left for clients; check data.source and data.unseen"
        )
    check_unseen(domains, unseen, seen)
    unknown = {d.name for d in domains if d.name in seen and d.lacks_identities}
    tested = {d.name for d in domains if len(d.gallery)}
    clients = []
    for data_set, name, train in _shares(seen, partition, parts, alpha):
        images = cap_training(name, train, max_identities, max_images)
        tests = (data_set,) if data_set in tested else ()
        if data_set in unknown:
            clients.append(_client_without_identities(name, images, tests, val))
        else:
            clients.append(_client(name, images, tests, val, val_fraction))
    classes = None
    if labels == "common":
        if val == "identities":
            raise ConfigError(
                "data.val: identities holds out whole classes, which data.labels common must train; use images or none"
            )
        identities = np.concatenate([train.identities for train in seen.values()])
        classes, num_sets = np.unique(identities, return_counts=True)
        if joined := int((num_sets > 1).sum()):
            log.info(
                "data.labels: common: %d identities of more than one data set are one person (or class) each", joined
            )
        clients = [
            replace(client, labels=np.searchsorted(classes, client.train.pids), common_classes=len(classes))
            for client in clients
        ]
    if partition == "union":
        clients = [_unite("union", clients)]
    elif partition == "stratified":  # client i has the share i of every data set
        clients = [_unite(f"part{i + 1}", clients[i::parts]) for i in range(parts)]
    scored = tested - {public}
    sets = {d.name: RetrievalSet(d.query, d.gallery, splits=d.splits) for d in domains if d.name in scored}
    return FederatedData(
        clients=tuple(clients),
        tests=sets,
        unseen=tuple(name for name in sets if name not in seen),
        public=next((Split.join(d.parts) for d in domains if d.name == public), None),
        public_name=public,
        classes=classes,
        root=_root([d for d in domains if d.name == public], max_identities, max_images, classes),
    )


def check_names(domains: Sequence[Domain]) -> None:
    """Raise ConfigError if a data set cannot be called as it is, or two are called the same."""
    times = Counter(domain.name for domain in domains)
    if bad := [problem for name in times if (problem := _problem_of(name))]:
        raise ConfigError(f"data.source: {bad[0]}")
    if twice := [name for name, number in times.items() if number > 1]:
        raise ConfigError(f"data.source: two data sets are called {min(twice)}; rename a folder")


def _problem_of(name: str) -> str:
    """Return why a data set cannot be called so, with the remedy; empty if it can."""
    return f"a data set cannot be called {name}, the name of a mean; rename the folder" if name in RESERVED else ""


def _shares(seen: dict[str, Split], partition: Partition, parts: int, alpha: float) -> Iterator[tuple[str, str, Split]]:
    """Yield (data set, client, its training images)."""
    for name, train in seen.items():
        if partition in ("by_dataset", "union"):
            yield name, name, train
        else:
            for part in divide(name, train, partition, parts, alpha):
                yield name, f"{name}-{part.name}", train.take(part.images)


def _client(name: str, train: Split, tests: tuple[str, ...], val: Validation, fraction: float) -> ClientData:
    kept, held_out = split_validation(name, train, val, fraction)
    return ClientData(name, kept, np.searchsorted(kept.identities, kept.pids), held_out, tests)


def _client_without_identities(name: str, train: Split, tests: tuple[str, ...], val: Validation) -> ClientData:
    if val != "none":
        raise DataError(
            f"client {name}: validation needs identities, but those of its images are unknown; set data.val to none"
        )
    return ClientData(name, train, np.zeros_like(train.pids), None, tests).without_identities()


def _root(
    public: Sequence[Domain], max_identities: int | None, max_images: int | None, classes: Index | None
) -> ClientData | None:
    """Return the labelled training images of the public data set; of ``classes``, where all clients have the same."""
    labelled = [domain for domain in public if domain.train is not None and not domain.lacks_identities]
    if not labelled:
        return None
    name, train = labelled[0].name, labelled[0].train
    assert train is not None
    if classes is not None:
        train = train.take(np.flatnonzero(np.isin(train.pids, classes)))
    if len(train.identities) < 2:
        return None
    caps = [cap for cap in (max_identities, max_images) if cap is not None]  # each identity keeps an image
    kept = cap_training(name, train, min(caps, default=None), max_images)
    if classes is None:
        return _client(name, kept, (), "none", 0.5)
    return ClientData(name, kept, np.searchsorted(classes, kept.pids), None, (), len(classes))


def _unite(name: str, clients: Sequence[ClientData]) -> ClientData:
    """Return one client with all images; its validation set joins the members' sets."""
    train = Split.join([client.train for client in clients])
    held_out = [client.val for client in clients if client.val is not None]
    common = clients[0].common_classes
    val = _join_retrieval(held_out, apart=common is None) if held_out else None
    labels = train.pids if common is None else np.concatenate([client.labels for client in clients])
    tests = tuple(name for client in clients for name in client.tests)
    return ClientData(name, train, labels, val, tests, common)


def _join_retrieval(sets: Sequence[RetrievalSet], apart: bool) -> RetrievalSet:
    """Join query and gallery sets; members keep separate cameras, and separate identities if ``apart``."""
    people, cameras, start = 0, 0, 0
    moved: list[list[Split]] = []
    positions: list[Index] = []
    for pair in sets:
        moved.append([Split(s.images, s.pids + people, s.camids + cameras) for s in (pair.query, pair.gallery)])
        if pair.own is not None:
            positions.append(pair.own + start)
        start += len(pair.gallery)
        people += int(pair.gallery.pids.max()) + 1 if apart else 0
        cameras += int(max(pair.query.camids.max(), pair.gallery.camids.max())) + 1
    query, gallery = (Split.concatenate(parts) for parts in zip(*moved, strict=True))
    return RetrievalSet(query, gallery, np.concatenate(positions) if positions else None)


def split_validation(client: str, train: Split, val: Validation, fraction: float) -> tuple[Split, RetrievalSet | None]:
    """Hold out part of a client's training data, so that models are never selected on test data.

    ``identities``: a random share of the identities. Queries are the first image of each held-out identity and camera;
    the gallery is all held-out images. A query is in the gallery, but is no match for itself.
    ``first_image``: the first image of each identity is a query; the gallery is the remaining training images.
    ``images``: a random share of the images are queries; the gallery is the remaining training images.
    ``none``: nothing.

    ``client``: its name, the key of the random choice, which is the same in every run. ``fraction``: share of
    ``identities`` (at least 2 are held out, at least 2 stay) or of ``images`` (at least 1). Returns (remaining training
    images, held-out set). Raises DataError if a client has too few identities, or an identity would be left without
    training images.
    """
    if not 0 < fraction < 1:
        raise ConfigError(f"data.val_fraction: {fraction} is not between 0 and 1")
    if val == "none":
        return train, None
    if val == "first_image":
        return _hold_out_first_images(client, train)
    if val == "images":
        return _hold_out_images(client, train, fraction)
    identities = train.identities
    count = max(2, round(fraction * len(identities)))
    if len(identities) == 1:
        raise DataError(f"client {client}: {ONE_IDENTITY}; add people, or name it in data.unseen")
    if len(identities) - count < 2:
        too_few = f"{len(identities)} identities are too few to hold {count} out"
        raise DataError(f"client {client}: {too_few}; set data.val to first_image or none")
    order = numpy_generator("validation", client).permutation(len(identities))
    held = np.isin(train.pids, identities[order[:count]])
    gallery = train.take(np.flatnonzero(held))
    keys = np.stack([gallery.pids, gallery.camids], axis=1)
    first = np.sort(np.unique(keys, axis=0, return_index=True)[1])
    return train.take(np.flatnonzero(~held)), RetrievalSet(gallery.take(first), gallery, own=first)


def _hold_out_first_images(client: str, train: Split) -> tuple[Split, RetrievalSet]:
    identities, first, counts = np.unique(train.pids, return_index=True, return_counts=True)
    if counts.min() < 2:
        raise DataError(
            f"client {client}: identity {identities[counts.argmin()]} has one image, and data.val first_image would "
            "leave it without training images; set data.val to identities or none"
        )
    kept = train.take(np.setdiff1d(np.arange(len(train)), first))
    return kept, RetrievalSet(train.take(first), kept)


def _hold_out_images(client: str, train: Split, fraction: float) -> tuple[Split, RetrievalSet]:
    if len(train) < 2:
        raise DataError(f"client {client}: its only image cannot be held out; set data.val to none")
    count = min(max(1, round(fraction * len(train))), len(train) - 1)
    order = numpy_generator("validation", client).permutation(len(train))
    kept = train.take(np.sort(order[count:]))
    return kept, RetrievalSet(train.take(np.sort(order[:count])), kept)


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


def is_readable_file(path: Path) -> bool:
    """Whether a file is there, is a plain one, and is not empty; it is not opened."""
    try:
        status = path.stat()
    except (OSError, ValueError):
        return False
    return stat.S_ISREG(status.st_mode) and status.st_size > 0


def obstacle_of(domain: Domain) -> str:
    """Return why a fit refuses a data set, with the remedy; empty if it does not."""
    if problem := _problem_of(domain.name):
        return problem
    if domain.train is not None and len(domain.train.identities) == 1:
        unknown = "; if number 0 means that people are unknown, set unlabelled: true of data.source"
        advice = unknown if domain.train.identities[0] == 0 else ""
        return f"{ONE_IDENTITY}{advice}"
    if has_matches(RetrievalSet(domain.query, domain.gallery, splits=domain.splits)):
        return ""
    cameras = np.unique(np.concatenate([part.camids for part in (domain.query, domain.gallery)]))
    of_cameras = f"all test images are of camera {cameras[0] + 1}" if len(cameras) == 1 else "all matches are junk"
    return (
        f"no query has a match from another camera ({of_cameras}); add images of other cameras, or set "
        "model.evaluation.camera_aware to false"
    )


def has_matches(sets: RetrievalSet, camera_aware: bool = True) -> bool:
    """Whether evaluation finds a query with a match, in each split; ``camera_aware``: one from another camera."""
    pool = sets.gallery
    trials = [(pool.take(query), pool.take(gallery)) for query, gallery in sets.splits] or [(sets.query, pool)]
    if camera_aware:
        return all(_num_valid(query, gallery) for query, gallery in trials)
    least = 1 if sets.own is None else 2  # the query itself is no match
    return all(any((gallery.pids == pid).sum() >= least for pid in query.pids if pid >= 0) for query, gallery in trials)


def notes_of(domain: Domain) -> str:
    """Return remarks for the owner of a data set that a fit accepts; empty if there are none."""
    notes = []
    if domain.train is not None and len(np.unique(domain.train.camids)) == 1:
        notes.append(
            "training images are of one camera, so data.val needs to be none, or model.evaluation.camera_aware false"
        )
    tested = domain.query.pids if len(domain.query) else domain.gallery.pids
    if domain.train is not None and 1 < len(domain.train.identities) < 4:
        notes.append("training identities are fewer than 4, so data.val needs to be first_image or none")
    if not tested.any():
        notes.append("all tested people are identity 0, the number of distractors")
    return "; ".join(notes)


def _num_valid(query: Split, gallery: Split) -> int:
    """Return the number of queries with a match in another camera."""
    shown = np.unique(np.stack([gallery.pids, gallery.camids], axis=1), axis=0)
    pids, counts = np.unique(shown[:, 0], return_counts=True)
    cameras = dict(zip(pids.tolist(), counts.tolist(), strict=True))
    pairs = set(map(tuple, shown.tolist()))
    labels = zip(query.pids.tolist(), query.camids.tolist(), strict=True)
    return sum(pid >= 0 and cameras.get(pid, 0) > ((pid, cam) in pairs) for pid, cam in labels)
