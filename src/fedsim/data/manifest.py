"""A federation as a CSV file: the images of each client, and the test sets.

One row per image and use, in the order of the federation: training and validation images client after client, then the
test sets, then the public images. Columns:

``path``: of the image; relative to the manifest's folder if it is below this folder, else absolute.
``pid``: identity; 0 a distractor, -1 junk. In a client of several data sets and in a public set, the numbers of
a data set continue those of the data set before.
``cam``: camera, from 0.
``dataset``: the source of the image. A client is tested on the data sets that it trains on; the others are unseen.
``client``: the owner of the image; empty for test and public images.
``part``: ``train``, ``val_query``, ``val_gallery``, ``query``, ``gallery`` or ``public``. A data set with several
splits lists all of its images as ``gallery``, then each split as ``query 0``, ``gallery 0``, ``query 1``, ...
"""

from __future__ import annotations

import csv
import hashlib
import io
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedsim.core.errors import ConfigError, DataError
from fedsim.core.files import replacing
from fedsim.core.names import problem_of_name
from fedsim.data.federated import ClientData, FederatedData, RetrievalSet
from fedsim.data.federations import RESERVED
from fedsim.data.images import Domain, GallerySplit, ImageFiles, ImagesInParts, Index, Split

_CLIENT_PARTS = ("train", "val_query", "val_gallery")
_PART = re.compile(r"train|val_query|val_gallery|public|(query|gallery)( (0|[1-9]\d{0,3}))?", re.ASCII)
_PID = re.compile(r"-1|\d{1,18}", re.ASCII)  # fits int64
_CAM = re.compile(r"\d{1,18}", re.ASCII)


class ManifestRow(NamedTuple):
    """One use of one image; see the head of this module."""

    path: Path
    """absolute"""
    pid: int
    cam: int
    dataset: str
    client: str
    part: str


class _Line(NamedTuple):
    path: Path
    number: int  # in the file, from 1
    row: ManifestRow

    def wrong(self, problem: str) -> DataError:
        return DataError(f"{self.path}: line {self.number}: {problem}")


_Parts = dict[str, list[_Line]]  # part -> its lines


def write_manifest(federated: FederatedData, path: Path) -> list[ManifestRow]:
    """Write a federation to a CSV file, and return its rows; raise ConfigError if images are not files."""
    rows = list(list_rows(federated))
    folder = Path(os.path.abspath(path.parent))
    shown = [row.path.relative_to(folder) if row.path.is_relative_to(folder) else row.path for row in rows]
    with replacing(path) as partial:
        partial.write_bytes(_as_csv(rows, shown))
    return rows


def list_rows(federated: FederatedData) -> Iterator[ManifestRow]:
    """Yield the rows of a federation, in their order."""
    for client in federated.clients:
        parts = {"train": client.train}
        if client.val is not None:
            parts |= {"val_query": client.val.query, "val_gallery": client.val.gallery}
        for part, split in parts.items():
            yield from _rows(split, _data_sets_of(client, split), client.name, part)
    for name, test in federated.tests.items():
        yield from _rows(test.query, [name] * len(test.query), "", "query")
        yield from _rows(test.gallery, [name] * len(test.gallery), "", "gallery")
        for number, indices in enumerate(test.splits):
            for part, index in indices._asdict().items():
                yield from _rows(test.gallery.take(index), [name] * len(index), "", f"{part} {number}")
    if federated.public is not None:
        yield from _rows(federated.public, [federated.public_name or ""] * len(federated.public), "", "public")


def hash_rows(rows: Sequence[ManifestRow]) -> str:
    """Return a SHA-256 of a federation: equal data sets and configs have equal hashes, wherever the data are.

    It is the hash of the CSV file with each path relative to the deepest common folder of its data set's images. The
    content of the images does not count.
    """
    folders: dict[str, set[str]] = {}
    for row in rows:
        folders.setdefault(row.dataset, set()).add(str(row.path.parent))
    roots = {name: os.path.commonpath(parents) for name, parents in folders.items()}
    return hashlib.sha256(_as_csv(rows, [row.path.relative_to(roots[row.dataset]) for row in rows])).hexdigest()


def _as_csv(rows: Sequence[ManifestRow], shown: Sequence[Path]) -> bytes:
    """Return the content of the file, with the paths ``shown``."""
    csv_file = io.StringIO()
    lines = ([path.as_posix(), *row[1:]] for path, row in zip(shown, rows, strict=True))
    csv.writer(csv_file, lineterminator="\n").writerows([ManifestRow._fields, *lines])
    return csv_file.getvalue().encode(errors="surrogateescape")  # names of files are bytes


def _rows(split: Split, data_sets: Sequence[str], client: str, part: str) -> Iterator[ManifestRow]:
    paths = [Path(os.path.abspath(path)) for path in split.files]
    if len(paths) < len(split):
        raise ConfigError(
            f"data.source: the images of {client or data_sets[0]} are no files ({type(split.images).__name__}), and a "
            "manifest lists files; keep the config instead, which makes the same federation everywhere"
        )
    for path, pid, cam, name in zip(paths, split.pids.tolist(), split.camids.tolist(), data_sets, strict=True):
        yield ManifestRow(path, pid, cam, name, client, part)


def _data_sets_of(client: ClientData, split: Split) -> list[str]:
    """Return each image's data set; a client of several data sets has their images one after the other."""
    if len(client.tests) == 1:
        return [client.tests[0]] * len(split)
    assert isinstance(split.images, ImagesInParts)
    members = zip(client.tests, split.images.parts, strict=True)
    return [name for name, part in members for _ in range(len(part))]


def read_manifest(path: Path) -> FederatedData:
    """Build the federation of a manifest, without opening images; raise DataError with file, line and problem."""
    clients: dict[str, _Parts] = {}
    tests: dict[str, _Parts] = {}
    public: list[_Line] = []
    for line in _read_lines(path):
        row = line.row
        if row.part == "public":
            public.append(line)
        else:
            group = clients.setdefault(row.client, {}) if row.client else tests.setdefault(row.dataset, {})
            group.setdefault(row.part, []).append(line)
    _check_once(clients, tests)
    if not clients:
        raise DataError(f"{path}: no client has training images; some rows need a client and the part train")
    members = tuple(_client(name, parts, tests) for name, parts in clients.items())
    trained = {line.row.dataset for parts in clients.values() for line in parts["train"]}
    for line in public:
        if line.row.dataset in trained | set(tests):
            raise line.wrong(f"{line.row.dataset} is public, so it cannot be used for training or test")
    sets = {name: _test_set(name, parts) for name, parts in tests.items()}
    unseen = tuple(name for name in tests if name not in trained)
    public_name = public[0].row.dataset if public else None
    return FederatedData(members, sets, unseen, _split(public) if public else None, public_name)


def _check_once(clients: Mapping[str, _Parts], tests: Mapping[str, _Parts]) -> None:
    """Raise DataError for an image that is twice in one part, or that is both trained and tested on."""
    trained: dict[Path, _Line] = {}
    for parts in clients.values():
        trained |= {line.row.path: line for line in parts.get("train", ())}
    for group in (*clients.values(), *tests.values()):
        for lines in group.values():
            first: dict[Path, int] = {}
            for line in lines:
                path, client, part = line.row.path, line.row.client, line.row.part
                if (number := first.setdefault(path, line.number)) != line.number:
                    raise line.wrong(f"{path.name} is in this {part} twice, first in line {number}; remove one of them")
                if not client and path in trained:
                    first_use = f"in train of {trained[path].row.client}, line {trained[path].number}"
                    raise line.wrong(f"{path.name} is tested on ({part}), and {first_use}; remove one of them")


def domains_of(federated: FederatedData) -> list[Domain]:
    """Return the data sets of a federation, with the images that clients hold out for validation.

    A client of several data sets, or of one that is not tested on, is a data set of its own.
    """
    empty = _split([])
    domains = []
    for name, test in federated.tests.items():
        trains = [_all_images(client) for client in federated.clients if client.tests == (name,)]
        train = Split.concatenate(trains) if trains else None
        domains.append(Domain(name, train, test.query, test.gallery, test.splits))
    single = {client.name: _all_images(client) for client in federated.clients if len(client.tests) != 1}
    single |= {} if federated.public is None else {federated.public_name or "public": federated.public}
    return domains + [Domain(name, train, empty, empty) for name, train in single.items()]


def _all_images(client: ClientData) -> Split:
    """Return a client's images, each once, before the division into training and validation."""
    held_out = [] if client.val is None else [client.val.query, client.val.gallery]
    everything = Split.concatenate([client.train, *held_out])
    places = {path: position for position, path in enumerate(map(str, everything.images.locations()))}
    return everything.take(np.array(sorted(places.values()), dtype=np.int64)) if held_out else client.train


def _read_lines(path: Path) -> list[_Line]:
    try:
        if path.exists() and not path.is_file():  # all ranks read it, and a pipe would be waited for
            raise OSError("it is a folder, a pipe or a device, not a file")
        csv_text = path.read_bytes().decode("utf-8-sig", errors="surrogateescape")
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot read this manifest ({error}); write one with fedsim data manifest") from error
    reader = csv.reader(io.StringIO(csv_text, newline=""), strict=True)
    folder = Path(os.path.abspath(path.parent))
    lines: list[_Line] = []
    try:
        for fields in reader:
            if reader.line_num == 1 and fields != list(ManifestRow._fields):
                raise DataError(
                    f"{path}: line 1 is not {','.join(ManifestRow._fields)}; write one with fedsim data manifest"
                )
            if reader.line_num > 1:
                if problem := _problem_of(fields):
                    raise DataError(f"{path}: line {reader.line_num}: {problem}")
                file, pid, cam, *names = fields
                row = ManifestRow(Path(os.path.abspath(folder / file)), int(pid), int(cam), *names)
                lines.append(_Line(path, reader.line_num, row))
    except csv.Error as error:
        raise DataError(f"{path}: line {reader.line_num}: is not CSV ({error})") from error
    if not lines:
        raise DataError(f"{path}: lists no images; write one with fedsim data manifest")
    return lines


def _problem_of(fields: list[str]) -> str | None:
    if len(fields) != len(ManifestRow._fields):
        return f"has {len(fields)} fields instead of {len(ManifestRow._fields)}"
    file, pid, cam, dataset, client, part = fields
    is_train = part in _CLIENT_PARTS
    of_dataset, of_client = problem_of_name(dataset), problem_of_name(client) if client else None
    checks = (
        (not file, "path is empty"),
        (not _PID.fullmatch(pid), f"pid {pid!r} is not an integer from -1 on"),
        (not _CAM.fullmatch(cam), f"cam {cam!r} is not an integer from 0 on"),
        (dataset in ("", *RESERVED), f"a data set cannot be called {dataset!r}"),
        (bool(of_dataset), f"of a data set, {of_dataset}; rename it"),
        (not _PART.fullmatch(part), f"part {part!r} is not one of {', '.join(_CLIENT_PARTS)}, query, gallery, public"),
        (is_train and not client, f"part {part} needs a client"),
        (bool(of_client), f"of a client, {of_client}; rename it"),
        (not is_train and client != "", f"part {part} belongs to no client; leave client empty"),
        (is_train and pid == "-1", f"part {part} has no junk images (pid -1)"),
    )
    return next((problem for is_wrong, problem in checks if is_wrong), None)


def _split(lines: Sequence[_Line]) -> Split:
    pids = np.array([line.row.pid for line in lines], dtype=np.int64)
    camids = np.array([line.row.cam for line in lines], dtype=np.int64)
    return Split(ImageFiles([line.row.path for line in lines]), pids, camids)


def _client(name: str, parts: _Parts, tests: Mapping[str, _Parts]) -> ClientData:
    if "train" not in parts:
        raise next(iter(parts.values()))[0].wrong(f"client {name} has no training images")
    train = _split(parts["train"])
    data_sets = tuple(dict.fromkeys(line.row.dataset for line in parts["train"]))
    if len(data_sets) == 1:  # a client of several data sets has other numbers for their people
        test = tests.get(data_sets[0], {})
        # queries, or the gallery from which splits take them, must not show training identities
        tested = {line.row.pid for line in test.get("query", test.get("gallery", [])) if line.row.pid > 0}
        if common := [line for line in parts["train"] if line.row.pid in tested]:
            raise common[0].wrong(f"identity {common[0].row.pid} is in both train and test of {data_sets[0]}")
    labels = np.searchsorted(train.identities, train.pids)
    return ClientData(name, train, labels, _validation(parts), tuple(n for n in data_sets if n in tests))


def _validation(parts: _Parts) -> RetrievalSet | None:
    query, gallery = (parts.get(name, []) for name in ("val_query", "val_gallery"))
    if not query and not gallery:
        return None
    if not query or not gallery:
        raise (query or gallery)[0].wrong("a client needs both val_query and val_gallery, or neither")
    positions = _positions(query, gallery)
    if -1 in positions and (positions >= 0).any():
        problem = "this query is not in val_gallery, but other queries are; list all queries there, or none"
        raise query[positions.tolist().index(-1)].wrong(problem)
    return RetrievalSet(_split(query), _split(gallery), None if -1 in positions else positions)


def _test_set(name: str, parts: _Parts) -> RetrievalSet:
    if "gallery" not in parts:
        raise next(iter(parts.values()))[0].wrong(f"{name} has no gallery")
    numbered = len(parts) - 1 - ("query" in parts)
    if ("query" in parts) == (numbered > 0):
        raise parts["gallery"][0].wrong(f"{name} needs rows with the part query, or else query 0, gallery 0, ...")
    numbers = range((numbered + 1) // 2)
    splits = (GallerySplit(*(_in_pool(name, parts, f"{part} {n}") for part in GallerySplit._fields)) for n in numbers)
    return RetrievalSet(_split(parts.get("query", [])), _split(parts["gallery"]), splits=tuple(splits))


def _in_pool(name: str, parts: _Parts, part: str) -> Index:
    """Return the positions in the gallery of one part of a split."""
    pool = parts["gallery"]
    if part not in parts:
        raise pool[0].wrong(f"{name} has no rows with the part {part}; splits are numbered from 0 on")
    positions = _positions(parts[part], pool)
    if -1 in positions:
        raise parts[part][positions.tolist().index(-1)].wrong(f"this image of {part} is not in the gallery of {name}")
    return positions


def _positions(lines: Sequence[_Line], gallery: Sequence[_Line]) -> Index:
    """Return the positions of images in a gallery, by their paths; -1: absent."""
    place_of: dict[Path, int] = {}
    for position, line in enumerate(gallery):
        if place_of.setdefault(line.row.path, position) != position:
            raise line.wrong(f"{line.row.path.name} is in this {line.row.part} twice")
    positions = np.array([place_of.get(line.row.path, -1) for line in lines], dtype=np.int64)
    for line, position in zip(lines, positions, strict=True):
        if position >= 0 and gallery[position].row[1:3] != line.row[1:3]:
            raise line.wrong(f"pid or cam differ from line {gallery[position].number}, which is the same image")
    return positions
