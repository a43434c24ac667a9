"""Generated training images: what a generator of people has made of a client's own images (paper 002, Table 7).

A folder holds a sub-folder for each client, of its name, with images and a file ``labels.csv``:

    file,pid,weight
    0001_000000.png,1,0.8

``file``: an image in the sub-folder, of any size.
``pid``: who it shows: an identity of the client's own training images, with the number that it has in its data set.
``weight``: how sure that is, in (0, 1]: the weight of the image's cross-entropy; real images have 1.

They take places of real images in the batches of local training. Elsewhere nothing changes: they are in no validation
or test set and do not count in n_k.

Paper silent on how many of a batch's images are generated, and on whose place they take.
"""

from __future__ import annotations

import csv
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from fedsim.core.errors import ConfigError, DataError
from fedsim.core.files import replacing
from fedsim.data.images import ImageFiles, Images, Index
from fedsim.data.pixels import Pixels

if TYPE_CHECKING:
    from fedsim.data.federations import ClientData, FederatedData

__all__ = ["Generated", "GeneratedImages", "Mixture", "add_generated", "write_generated"]

log = logging.getLogger(__name__)

_LABELS = "labels.csv"
_COLUMNS = ["file", "pid", "weight"]


@dataclass(frozen=True, kw_only=True)
class Generated:
    """Generated images that join the clients' local training."""

    root: str
    """folder with a sub-folder for each client, of its name: images and a labels.csv; a client that has none trains
    on its real images alone"""
    share: float = 0.25
    """probability that a place in a batch is taken by a generated image of the same identity, if there is one"""

    def __post_init__(self) -> None:
        """Check the range."""
        if not 0 < self.share <= 1:
            raise ConfigError(f"data.generated.share: {self.share} is not in (0, 1]; leave data.generated out for none")


@dataclass(frozen=True)
class GeneratedImages:
    """The generated images of one client."""

    images: Images
    labels: Index
    """[m] training labels of the client, ascending"""
    weights: NDArray[np.float32]
    """[m] of their cross-entropy, in (0, 1]"""
    share: float
    """see :class:`Generated`"""

    def __len__(self) -> int:
        """Return m."""
        return len(self.labels)


# -- folders -----------------------------------------------------------------------------------------------------------


def write_generated(folder: Path, images: Tensor, pids: Sequence[int], weights: Sequence[float]) -> None:
    """Write the generated images of one client, losslessly.

    ``labels.csv`` comes last, so an interrupted call leaves nothing that could be read as a part of the images.

    Args:
        folder: the client's.
        images: uint8 [m, 3, H, W], RGB.
        pids: [m] identities, as in the client's data set.
        weights: [m] in (0, 1].

    Raises:
        ValueError: if the arguments do not fit together.
        DataError: if there are generated images in the folder.
    """
    if images.dtype != torch.uint8 or images.dim() != 4 or images.shape[1] != 3:
        raise ValueError(f"images are {images.dtype} {list(images.shape)}; give uint8 [m, 3, H, W]")
    if not len(images) == len(pids) == len(weights) > 0:
        raise ValueError(f"{len(images)} images, {len(pids)} pids and {len(weights)} weights; give as many of each")
    if not all(0 < weight <= 1 for weight in weights):
        raise ValueError(f"weights from {min(weights)} to {max(weights)}; give numbers in (0, 1]")
    if (folder / _LABELS).exists():
        raise DataError(f"{folder}: holds generated images; remove it, or write to another folder")
    rows = []
    for row, (image, pid, weight) in enumerate(zip(images, pids, weights, strict=True)):
        name = f"{pid:04d}_{row:06d}.png"
        with replacing(folder / name) as partial:
            Image.fromarray(image.permute(1, 2, 0).cpu().numpy()).save(partial, format="png")
        rows.append([name, int(pid), repr(float(weight))])
    with replacing(folder / _LABELS) as partial, partial.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([_COLUMNS, *rows])


def add_generated(federated: FederatedData, settings: Generated) -> FederatedData:
    """Return a federation whose clients hold the generated images that are there for them.

    Raises:
        DataError: if there are none for anybody, or a client's cannot be used; the message names client, file and
            identity.
    """
    root = Path(settings.root).expanduser()
    if not root.is_dir():
        raise DataError(f"{root}: no such folder; set data.generated.root, or data.generated to null")
    missing = [client.name for client in federated.clients if not (root / client.name).is_dir()]
    if len(missing) == len(federated.clients):
        raise DataError(f"{root}: holds no folder of a client; expected {', '.join(missing)}")
    if missing:
        log.warning("%s: without generated images: %s", root, ", ".join(missing))
    clients = (
        client if client.name in missing else replace(client, generated=_read(root / client.name, client, settings))
        for client in federated.clients
    )
    return replace(federated, clients=tuple(clients))


def _read(folder: Path, client: ClientData, settings: Generated) -> GeneratedImages:
    label_of = dict(zip(client.train.pids.tolist(), client.labels.tolist(), strict=True))
    found: dict[str, tuple[int, float]] = {}
    for where, row in _rows(folder / _LABELS):
        name, pid, weight = row["file"], _integer(row["pid"]), _number(row["weight"])
        if not (name and Path(name).name == name and (folder / name).is_file()):
            raise DataError(f"{where}: there is no image {name!r} in {folder}; remove the line")
        if name in found:
            raise DataError(f"{where}: {name} is listed twice; remove a line")
        if not 0 < weight <= 1:
            raise DataError(f"{where}: the weight {row['weight']!r} of {name} is not a number in (0, 1]")
        if pid not in label_of:
            raise DataError(
                f"{where}: client {client.name} trains on no identity {row['pid']!r}, which {name} is said to show; "
                "remove the line, or see whether data.val or data.max_identities leaves that identity out"
            )
        found[name] = (label_of[pid], weight)
    if not found:
        raise DataError(f"{folder / _LABELS}: lists no images; remove the folder")
    names = sorted(found, key=lambda name: (found[name][0], name))
    labels, weights = zip(*(found[name] for name in names), strict=True)
    images = ImageFiles([folder / name for name in names])
    return GeneratedImages(images, np.array(labels), np.array(weights, dtype=np.float32), settings.share)


def _rows(path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield (file and line, for messages; columns)."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, restval="", strict=True)
            if reader.fieldnames != _COLUMNS:
                raise DataError(f"{path}: does not begin with the columns {','.join(_COLUMNS)}")
            for row in reader:
                yield f"{path}, line {reader.line_num}", row
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: cannot be read ({error}); it says who is on each generated image") from error


def _integer(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() else None


def _number(text: str) -> float:
    """Return NaN for what is no number."""
    try:
        return float(text)
    except ValueError:
        return math.nan


# -- batches -----------------------------------------------------------------------------------------------------------


class Mixture:
    """A client's generated images on their way into its batches.

    One takes the place of a real image of the same identity, so batches keep their size and what a sampler has put into
    them. Identities without generated images keep all of their places.

    Args:
        generated: labels, weights and share.
        pixels: the images.
        num_classes: size of the client's label space.
    """

    def __init__(self, generated: GeneratedImages, pixels: Pixels, num_classes: int) -> None:
        self.pixels = pixels
        self.share = generated.share
        self.weights = torch.from_numpy(generated.weights)
        self.counts = torch.from_numpy(np.bincount(generated.labels, minlength=num_classes))
        self.first = self.counts.cumsum(0) - self.counts
        """[num_classes] where the images of each label begin"""

    def choose(self, labels: Tensor, generator: torch.Generator) -> Tensor:
        """Draw who takes which place.

        Args:
            labels: [B] int64 of the real images, on the CPU.
            generator: a CPU generator.

        Returns:
            [B] int64 numbers of generated images, -1: the real image stays.
        """
        taken, which = torch.rand((len(labels), 2), generator=generator, dtype=torch.float64).unbind(1)
        counts = self.counts[labels]
        rows = self.first[labels] + (which * counts).long()
        return rows.where((taken < self.share) & (counts > 0), -1)

    def mix(
        self, real: Iterator[Tensor], labels: Sequence[Tensor], generator: torch.Generator
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batch after batch with some images replaced.

        Args:
            real: uint8 [B, 3, H, W] each, on the device.
            labels: [B] int64 each, on the CPU.
            generator: a CPU generator.

        Yields:
            images like the real ones, and their weights [B] float32 on the device.
        """
        chosen = [self.choose(of_batch, generator) for of_batch in labels]
        places = [torch.nonzero(rows >= 0).flatten() for rows in chosen]
        numbers = [rows[place] for rows, place in zip(chosen, places, strict=True)]
        for images, place, number, new in zip(real, places, numbers, self.pixels.batches(numbers), strict=True):
            weights = torch.ones(len(images)).index_copy(0, place, self.weights[number])
            # a copy: images may be part of a mapped file
            mixed = images.index_copy(0, place.to(images.device, non_blocking=True), new)
            yield mixed, weights.to(images.device, non_blocking=True)
