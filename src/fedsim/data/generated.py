"""Generated training images: a generator of people made them from a client's images (paper 002, Table 7).

A folder holds a sub-folder for each client, of its name, with images and a file ``labels.csv``:

    file,pid,weight
    0001_000000.png,1,0.6
    0001_000000.png,7,0.3

``file``: an image in the sub-folder, of any size; one line for each identity that it may show.
``pid``: an identity of the client's training images, numbered as in the data set.
``weight``: the probability of this identity, in (0, 1].

An image's weights are its soft label, with a sum of at most 1; a smaller sum makes the image count less. In batches of
local training, it takes the place of a real image with the identity on its first line. Nothing else changes: generated
images are in no validation or test set and do not count in n_k.

Paper silent on the number of generated images per batch, on the images that they replace, and on their labels.
"""

from __future__ import annotations

import csv
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fedsim.core.arguments import Section
from fedsim.core.errors import ConfigError, DataError
from fedsim.core.files import new_folder
from fedsim.core.names import file_names
from fedsim.core.paths import FOLDER, given_path
from fedsim.data.federated import ClientData, FederatedData, GeneratedImages
from fedsim.data.images import ImageFiles
from fedsim.data.pixels import Pixels
from fedsim.settings.facts import Facts

log = logging.getLogger(__name__)

_LABELS = "labels.csv"
_COLUMNS = ["file", "pid", "weight"]
_DIGITS = 20  # of an identity; more than 64 bits hold
_MOST = 1 + 1e-6  # largest sum of an image's weights, with rounding errors


@dataclass(frozen=True, kw_only=True)
class Generated(Section, option="data.generated"):
    """Generated images for the clients' local training."""

    root: Annotated[str, Facts(is_file=True)]
    """folder with a sub-folder for each client, of its name: images and a labels.csv; a client without a sub-folder
    trains on its real images alone"""
    share: float = 0.25
    """probability that a generated image replaces a real image of the same identity in a batch"""

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ConfigError(
                f"data.generated.share: {self.share} is not in (0, 1]; set data.generated to null for none"
            )


def write_generated(folder: Path, images: Tensor, labels: Sequence[Mapping[int, float]]) -> None:
    """Write the generated images of one client, losslessly; an interrupted call leaves no folder.

    ``images``: uint8 [m, 3, H, W], RGB. ``labels``: [m] soft labels: identity, as in the client's data set -> weight in
    (0, 1], with a sum of at most 1. An image takes the place of its first identity. Raises ValueError if the arguments
    do not fit together, and DataError if the client's ``folder`` is not empty.
    """
    if images.dtype != torch.uint8 or images.dim() != 4 or images.shape[1] != 3:
        raise ValueError(f"images are {images.dtype} {list(images.shape)}; give uint8 [m, 3, H, W]")
    if not len(images) == len(labels) > 0:
        raise ValueError(f"{len(images)} images and {len(labels)} labels; give a label for each image")
    for label in labels:
        if not (label and all(0 < weight <= 1 for weight in label.values()) and sum(label.values()) <= _MOST):
            raise ValueError(f"a label {dict(label)}; give identities with weights in (0, 1] and a sum of at most 1")
    check_is_free(folder)
    rows = []
    with new_folder(folder) as partial:
        for row, (image, label) in enumerate(zip(images, labels, strict=True)):
            name = f"{next(iter(label)):04d}_{row:06d}.png"
            Image.fromarray(image.permute(1, 2, 0).cpu().numpy()).save(partial / name)
            rows += [[name, int(pid), repr(float(weight))] for pid, weight in label.items()]
        with (partial / _LABELS).open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([_COLUMNS, *rows])


def folders_of_clients(root: Path, federated: FederatedData) -> dict[str, Path]:
    """Return client -> its folder in ``root``, of generators or of generated images, which may not exist yet.

    The folder has the client's name, as far as a folder can; see :func:`fedsim.core.names.file_names`.
    """
    files = file_names([client.name for client in federated.clients])
    return {client: root / file for client, file in files.items()}


def check_is_free(folder: Path) -> None:
    """Raise DataError unless a client's folder is empty or missing."""
    if folder.exists() and not (folder.is_dir() and next(folder.iterdir(), None) is None):
        problem = "holds generated images" if (folder / _LABELS).exists() else "is not an empty folder"
        raise DataError(f"{folder}: {problem}; remove it, write to another folder, or leave this client out")


def add_generated(federated: FederatedData, settings: Generated) -> FederatedData:
    """Return a federation whose clients hold their generated images.

    Raise DataError if no client has any, or a file is wrong; the message names client, file and identity.
    """
    root = given_path(settings.root, "data.generated.root")
    FOLDER.check(root, "data.generated.root")
    folders = folders_of_clients(root, federated)
    missing = [client for client, folder in folders.items() if not folder.is_dir()]
    if len(missing) == len(federated.clients):
        raise DataError(f"{root}: holds no folder of a client; expected {', '.join(missing)}")
    if missing:
        log.warning("%s: without generated images: %s", root, ", ".join(missing))
    clients = (
        client if client.name in missing else replace(client, generated=_read(folders[client.name], client, settings))
        for client in federated.clients
    )
    return replace(federated, clients=tuple(clients))


def _read(folder: Path, client: ClientData, settings: Generated) -> GeneratedImages:
    label_of = dict(zip(client.train.pids.tolist(), client.labels.tolist(), strict=True))
    soft_labels: dict[str, dict[int, float]] = {}
    for location, row in _rows(folder / _LABELS):
        name, weight = row["file"], _number(row["weight"])
        digits = row["pid"]
        pid = int(digits) if digits.isascii() and digits.isdecimal() and len(digits) <= _DIGITS else None
        if not (name and Path(name).name == name and (folder / name).is_file()):
            raise DataError(f"{location}: there is no image {name!r} in {folder}; remove the line")
        if not 0 < weight <= 1:
            raise DataError(f"{location}: the weight {row['weight']!r} of {name} is not a number in (0, 1]")
        if pid not in label_of:
            raise DataError(
                f"{location}: client {client.name} does not train on identity {row['pid']!r} of {name}; "
                "remove the line, or check whether data.val or data.max_identities leaves that identity out"
            )
        label, soft = label_of[pid], soft_labels.setdefault(name, {})
        if label in soft:
            raise DataError(f"{location}: {name} is listed twice with identity {pid}; remove a line")
        soft[label] = weight
        if (mass := sum(soft.values())) > _MOST:
            raise DataError(f"{location}: the weights of {name} sum to {mass:.6g}; the sum must be at most 1")
    if not soft_labels:
        raise DataError(f"{folder / _LABELS}: lists no images; remove the folder")
    names = sorted(soft_labels, key=lambda name: (next(iter(soft_labels[name])), name))
    shape = len(names), max(len(soft) for soft in soft_labels.values())
    classes, weights = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.float32)
    for number, name in enumerate(names):
        soft = soft_labels[name]
        classes[number, : len(soft)], weights[number, : len(soft)] = list(soft), list(soft.values())
    images = ImageFiles([folder / name for name in names])
    return GeneratedImages(images, classes[:, 0].copy(), classes, weights, settings.share)


def _rows(path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield (file and line, for messages; columns)."""
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise OSError("it is not a file")
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, restval="", strict=True)
            if reader.fieldnames != _COLUMNS:
                raise DataError(f"{path}: does not begin with the columns {','.join(_COLUMNS)}")
            for row in reader:
                if None in row:
                    raise DataError(f"{path}, line {reader.line_num}: has more than 3 columns; remove them")
                yield f"{path}, line {reader.line_num}", row
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        problem = f"cannot be read ({error}); it lists the identities of each generated image"
        raise DataError(f"{path}: {problem}") from error


def _number(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        return math.nan


class Mixture:
    """Puts a client's generated images into its batches, in the place of real images of the same identity.

    So batches keep their size and their identities. Identities without generated images keep all real images.
    ``pixels`` are the generated images, and ``num_classes`` is the size of the client's label space.
    """

    def __init__(self, generated: GeneratedImages, pixels: Pixels, num_classes: int) -> None:
        self.pixels, self.share, self.num_classes = pixels, generated.share, num_classes
        self.classes = torch.from_numpy(generated.classes)
        self.weights = torch.from_numpy(generated.weights)
        self.counts = torch.from_numpy(np.bincount(generated.labels, minlength=num_classes))
        self.first = self.counts.cumsum(0) - self.counts
        """[num_classes] position of the first image of each label"""

    def choose(self, labels: Tensor, generator: torch.Generator) -> Tensor:
        """Sample the generated image for each place of a batch with real ``labels`` [B] int64, on the CPU.

        The result is [B] int64, positions among the generated images; -1: the real image stays.
        """
        chance, position = torch.rand((len(labels), 2), generator=generator, dtype=torch.float64).unbind(1)
        counts = self.counts[labels]
        rows = self.first[labels] + (position * counts).long()
        return rows.where((chance < self.share) & (counts > 0), -1)

    def targets(self, labels: Tensor, rows: Tensor, device: torch.device) -> Tensor:
        """Return the soft labels of a batch, one-hot for real images: [B, num_classes] float32 on ``device``.

        ``labels`` [B] int64 of the real images, and ``rows`` [B] int64 of :meth:`choose`, are on the CPU.
        """
        is_new = (rows >= 0)[:, None]
        classes = self.classes[rows].where(is_new, labels[:, None])
        weights = self.weights[rows].where(is_new, torch.eye(1, self.weights.shape[1]))
        soft_labels = torch.zeros((len(labels), self.num_classes), device=device)
        # add, because padding must not overwrite the weight of a label that it repeats
        weights = weights.to(device, non_blocking=True)
        return soft_labels.scatter_add_(1, classes.to(device, non_blocking=True), weights)

    def mix(
        self, real: Iterator[Tensor], labels: Sequence[Tensor], generator: torch.Generator
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches with some images replaced, and their soft labels [B, num_classes] float32 on the device.

        ``real`` are batches uint8 [B, 3, H, W] on the device; their labels [B] int64, and the generator, on the CPU.
        """
        chosen = [self.choose(batch_labels, generator) for batch_labels in labels]
        places = [torch.nonzero(rows >= 0).flatten() for rows in chosen]
        numbers = [rows[positions] for rows, positions in zip(chosen, places, strict=True)]
        batches = zip(real, self.pixels.batches(numbers), labels, chosen, places, strict=True)
        for images, new, batch_labels, rows, positions in batches:
            # a copy: images may be part of a mapped file
            mixed = images.index_copy(0, positions.to(images.device, non_blocking=True), new)
            yield mixed, self.targets(batch_labels, rows, images.device)
