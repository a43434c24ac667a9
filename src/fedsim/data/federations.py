"""From data sets to a federation: the clients with their images, and the test sets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from fedsim.core.checks import known
from fedsim.core.errors import ConfigError, DataError
from fedsim.core.seeding import numpy_generator
from fedsim.data.federated import ONE_IDENTITY, ClientData, FederatedData, RetrievalSet
from fedsim.data.images import Domain, Index, Split
from fedsim.data.partitions import Partition, cap_training, divide
from fedsim.data.unseen import check_unseen

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

    Raises ConfigError if a name does not exist, no client is left to train, a client trains on people of an unseen data
    set, or ``val`` would hold out classes; DataError if a client's data cannot be split.
    """
    check_names(domains)
    names = [domain.name for domain in domains]
    known("data.unseen", unseen, names, "data set")
    known("data.public", [public] if public else [], names, "data set")
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
        classes = np.unique(np.concatenate([train.identities for train in seen.values()]))
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
    )


def check_names(domains: Sequence[Domain]) -> None:
    """Raise ConfigError if a data set cannot be called as it is, or two are called the same."""
    times = Counter(domain.name for domain in domains)
    if bad := [name for name in RESERVED if name in times]:
        raise ConfigError(f"data.source: a data set cannot be called {bad[0]}, the name of a mean; rename the folder")
    if twice := [name for name, number in times.items() if number > 1]:
        raise ConfigError(f"data.source: two data sets are called {min(twice)}; rename a folder")


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
