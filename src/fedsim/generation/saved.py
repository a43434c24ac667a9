"""Trained generators on the disk: a folder per client.

``FOLDER/CLIENT/generator.safetensors`` holds the tensors of generator and teacher, and a description of the training
images as metadata; it is written at the end of the training. ``training.ckpt`` is the checkpoint of an interrupted
training, ``losses.csv`` its losses.

A decoder can memorise its training images: such a folder is as private as the images.
"""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from fedsim.core.errors import DataError
from fedsim.core.files import replacing
from fedsim.core.readable import has_file
from fedsim.core.tensor_file import problem_of_weights, write_tensors
from fedsim.data.federated import ClientData
from fedsim.data.images import Index, Size
from fedsim.generation.quality import SwapQuality

CHECKPOINT = "training.ckpt"

_FILE = "generator.safetensors"
_QUALITY = "quality.json"
_FORMAT = 1
_KEY = "fedsim"  # of the metadata
_BACKBONE = "generator.appearance.backbone."  # prefix of the tensors of the appearance encoder's backbone


def is_finished(folder: Path) -> bool:
    """Whether a client's folder holds a trained generator."""
    return has_file(folder / _FILE)


def is_begun(folder: Path) -> bool:
    """Whether a client's folder holds a generator, trained or in training."""
    return is_finished(folder) or has_file(folder / CHECKPOINT)


def _hash_identities(client: ClientData) -> str:
    return hashlib.sha256(client.train.pids.tobytes() + client.labels.tobytes()).hexdigest()[:16]


def hash_images(pixels: Tensor, labels: Index) -> str:
    """Hash training images, uint8 [n, 3, H, W], and their labels [n]."""
    digest = hashlib.blake2b(repr(tuple(pixels.shape)).encode() + labels.tobytes(), digest_size=16)
    digest.update(pixels.cpu().contiguous().numpy().data)
    return digest.hexdigest()


def write_trained(
    folder: Path, tensors: Mapping[str, Tensor], client: ClientData, size: Size, images_hash: str
) -> None:
    """Write a trained generator to a client's folder; see :func:`check_trained` for the other arguments.

    Names of ``tensors`` begin with ``generator.`` or ``teacher.``.
    """
    content = {"client": client.name, "identities": _hash_identities(client)}
    description = {"format": _FORMAT, **content, "size": size, "images": images_hash}
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with replacing(folder / _FILE) as partial:
        write_tensors(partial, contiguous, {_KEY: json.dumps(description)})  # one entry, since several have no order


def write_losses(folder: Path, history: Sequence[Mapping[str, float]]) -> None:
    """Write means of losses, a line per epoch, to losses.csv; a loss that has not begun is empty."""
    columns = list(dict.fromkeys(name for row in history for name in row))
    with replacing(folder / "losses.csv") as partial, partial.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: f"{value:.6g}" for name, value in row.items()} for row in history)


def has_quality(folder: Path) -> bool:
    """Whether a client's folder holds the quality of its generator."""
    return has_file(folder / _QUALITY)


def write_quality(folder: Path, quality: SwapQuality) -> None:
    """Write the quality of a client's generator."""
    with replacing(folder / _QUALITY) as partial:
        partial.write_text(json.dumps(asdict(quality), indent=2) + "\n")


def read_quality(folder: Path) -> SwapQuality:
    """Read the quality of a client's generator; raise DataError if the file cannot be read."""
    try:
        numbers = json.loads((folder / _QUALITY).read_text())
        return SwapQuality(**{name: float(number + 0) for name, number in numbers.items()})
    except (OSError, ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise DataError(f"{folder / _QUALITY}: cannot be read ({error}); remove it") from error


def read_backbone(folder: Path) -> dict[str, Tensor]:
    """Read the appearance encoder's backbone, the only part that other clients may get; raise DataError without one."""
    with _opened(folder) as file:
        return _tensors(file, _BACKBONE)


def _tensors(file: Any, prefix: str) -> dict[str, Tensor]:
    """Read the tensors whose names begin with ``prefix``; names in the result are without it."""
    names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118 - not a dict
    return {name.removeprefix(prefix): file.get_tensor(name) for name in names}


def check_trained(folder: Path, client: ClientData, size: Size, images_hash: str | None = None) -> None:
    """Raise DataError unless a client's folder holds a generator that was trained on its present images.

    ``size`` is the required height and width of the generator's images, pixels. ``images_hash`` is that of
    :func:`hash_images`; None: only the identities are compared.
    """
    path = folder / _FILE
    with _opened(folder) as file:
        try:
            description = json.loads((file.metadata() or {})[_KEY])
            has_format = description["format"] == _FORMAT
            of_client = description["client"] == client.name and description["identities"] == _hash_identities(client)
            its_size, its_images = tuple(description["size"]), description["images"]
        except (KeyError, ValueError, TypeError, RecursionError) as error:
            raise DataError(f"{path}: is not a generator of fedsim augment fit; remove it") from error
    if not has_format:
        raise DataError(f"{path}: was written by another version of fedsim; remove it and fit again")
    if of_client and its_size != tuple(size):
        raise DataError(f"{path}: makes images of {list(its_size)} pixels, not {list(size)}; fit into another folder")
    if not of_client or images_hash not in (None, its_images):
        raise DataError(
            f"{path}: was trained on other images than client {client.name} has now; give the --config that it was "
            "trained with, or fit into another folder"
        )


def restore(folder: Path, modules: Mapping[str, nn.Module]) -> None:
    """Load a trained generator into ``modules`` by name; raise DataError if it is damaged or has other networks."""
    with _opened(folder) as file:
        for name, module in modules.items():
            try:
                module.load_state_dict(_tensors(file, f"{name}."))
            except RuntimeError as error:
                raise DataError(f"{folder / _FILE}: has other networks ({str(error)[:160]})") from error


def _opened(folder: Path) -> Any:
    path = folder / _FILE
    if not has_file(path):
        raise DataError(f"{path}: there is no trained generator; run fedsim augment fit until it ends")
    try:
        file: Any = safe_open(path, framework="pt")
        problem = problem_of_weights((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118 - not a dict
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path}: cannot be read ({error}); remove it and fit again") from error
    if problem:
        raise DataError(f"{path}: {problem}; remove it and fit again")
    return file
