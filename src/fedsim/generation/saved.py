"""Trained generators on the disk: a folder per client.

``FOLDER/CLIENT/generator.safetensors`` holds the generator's and the teacher's tensors and, as metadata, whose images
it has seen; it is written last, when the training is over. ``training.ckpt`` is where an interrupted one goes on,
``losses.csv`` what it says about itself.

A decoder can know its training images by heart: such a folder is as private as the images.
"""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from fedsim.core.errors import DataError
from fedsim.core.files import replacing
from fedsim.data.federated import ClientData
from fedsim.data.images import Index, Size
from fedsim.generation.quality import SwapQuality

__all__ = [
    "CHECKPOINT",
    "check_trained",
    "has_quality",
    "hash_images",
    "is_begun",
    "is_finished",
    "read_backbone",
    "read_quality",
    "restore",
    "write_losses",
    "write_quality",
    "write_trained",
]

CHECKPOINT = "training.ckpt"

_FILE = "generator.safetensors"
_QUALITY = "quality.json"
_FORMAT = 1
_SAID = "fedsim"
_BACKBONE = "generator.appearance.backbone."
"""what names of the appearance encoder's backbone begin with"""


def is_finished(folder: Path) -> bool:
    """Whether a client's folder holds a trained generator."""
    return (folder / _FILE).is_file()


def is_begun(folder: Path) -> bool:
    """Whether a client's folder holds a generator, trained or in training."""
    return is_finished(folder) or (folder / CHECKPOINT).is_file()


def _hash_identities(client: ClientData) -> str:
    """Hash who is on which training image; what the images look like is not in it."""
    return hashlib.sha256(client.train.pids.tobytes() + client.labels.tobytes()).hexdigest()[:16]


def hash_images(pixels: Tensor, labels: Index) -> str:
    """Hash training images and who is on them.

    Args:
        pixels: uint8 [n, 3, H, W].
        labels: [n].
    """
    digest = hashlib.blake2b(repr(tuple(pixels.shape)).encode() + labels.tobytes(), digest_size=16)
    digest.update(pixels.cpu().contiguous().numpy().data)
    return digest.hexdigest()


def write_trained(
    folder: Path, tensors: Mapping[str, Tensor], client: ClientData, size: Size, images_hash: str
) -> None:
    """Write a trained generator.

    Args:
        folder: the client's.
        tensors: ``generator.``..., ``teacher.``...
        client: on whose images it was trained.
        size: of its images, pixels.
        images_hash: see :func:`hash_images`.
    """
    said = {
        "format": _FORMAT, "client": client.name, "identities": _hash_identities(client), "size": size,
        "images": images_hash,
    }  # fmt: skip
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with replacing(folder / _FILE) as partial:
        save_file(contiguous, partial, {_SAID: json.dumps(said)})  # one entry: several have no order


def write_losses(folder: Path, history: Sequence[Mapping[str, float]]) -> None:
    """Write means of losses, a line per epoch, to losses.csv; empty where a loss was not there yet."""
    columns = list(dict.fromkeys(name for row in history for name in row))
    with replacing(folder / "losses.csv") as partial, partial.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: f"{value:.6g}" for name, value in row.items()} for row in history)


def has_quality(folder: Path) -> bool:
    """Whether a client's folder says how good its generator is."""
    return (folder / _QUALITY).is_file()


def write_quality(folder: Path, quality: SwapQuality) -> None:
    """Write how good a client's generator is."""
    with replacing(folder / _QUALITY) as partial:
        partial.write_text(json.dumps(asdict(quality), indent=2) + "\n")


def read_quality(folder: Path) -> SwapQuality:
    """Read how good a client's generator is.

    Raises:
        DataError: if the file cannot be read.
    """
    try:
        return SwapQuality(**json.loads((folder / _QUALITY).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{folder / _QUALITY}: cannot be read ({error}); remove it") from error


def read_backbone(folder: Path) -> dict[str, Tensor]:
    """Read what an appearance encoder passes on to other clients: its backbone, and nothing else.

    Raises:
        DataError: if there is no trained generator, or the file cannot be read.
    """
    with _opened(folder) as file:
        names = [name for name in file.keys() if name.startswith(_BACKBONE)]  # noqa: SIM118 - not a dict
        return {name.removeprefix(_BACKBONE): file.get_tensor(name) for name in names}


def check_trained(folder: Path, client: ClientData, size: Size, images_hash: str | None = None) -> None:
    """See whether a trained generator is of a client's images.

    Args:
        folder: the client's.
        client: as it is now.
        size: of the images that the generator shall make.
        images_hash: see :func:`hash_images`; None: where the images have not been read, who is on them must do.

    Raises:
        DataError: if it is not, or there is none, or the file is damaged.
    """
    path = folder / _FILE
    with _opened(folder) as file:
        try:
            said = json.loads((file.metadata() or {})[_SAID])
            known = said["format"] == _FORMAT
            of_client = said["client"] == client.name and said["identities"] == _hash_identities(client)
            its_size, its_images = tuple(said["size"]), said["images"]
        except (KeyError, ValueError, TypeError) as error:
            raise DataError(f"{path}: is no generator that fedsim augment fit has written; remove it") from error
    if not known:
        raise DataError(f"{path}: is of another version of fedsim; remove it and fit again")
    if of_client and its_size != tuple(size):
        raise DataError(f"{path}: makes images of {list(its_size)} pixels, not {list(size)}; fit into another folder")
    if not of_client or images_hash not in (None, its_images):
        raise DataError(
            f"{path}: was trained on other images than client {client.name} has now; give the --config that it was "
            "trained with, or fit into another folder"
        )


def restore(folder: Path, modules: Mapping[str, nn.Module]) -> None:
    """Load a client's trained generator into ``generator`` and ``teacher``.

    Args:
        folder: the client's.
        modules: first part of the tensors' names -> module.

    Raises:
        DataError: if the file is missing or damaged, or of other networks.
    """
    with _opened(folder) as file:
        for prefix, module in modules.items():
            start = f"{prefix}."
            names = [name for name in file.keys() if name.startswith(start)]  # noqa: SIM118 - not a dict
            tensors = {name.removeprefix(start): file.get_tensor(name) for name in names}
            try:
                module.load_state_dict(tensors)
            except RuntimeError as error:
                raise DataError(f"{folder / _FILE}: is of other networks ({str(error)[:160]})") from error


def _opened(folder: Path) -> safe_open:
    path = folder / _FILE
    if not path.is_file():
        raise DataError(f"{path}: there is no trained generator; run fedsim augment fit, to its end")
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path}: cannot be read ({error}); remove it and fit again") from error
