"""Checks of the form of uploads: shapes, types and devices are those that the server expects."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedsim.core.errors import TrainingError
from fedsim.training.client import Client
from fedsim.training.messages import Upload


def check_form(
    sender: object, client: Client, upload: object, extras: Mapping[str, tuple[int, ...]], *, tables: Mapping[str, int]
) -> Upload:  # fmt: skip
    """Check and return an upload of a method, an attack or a privacy mechanism for a client.

    ``extras``: name -> shape of the further tensors that the method declares; ``tables``: name -> columns. Values are
    checked at the end of the session.

    Raises:
        TrainingError: if a part has another shape, type or device, or is missing; nothing is cast, as that would hide
            an error of the sender.
    """
    subject = f"client {client.client_name}, round {client.round + 1}: {type(sender).__name__} sends"
    if not isinstance(upload, Upload):
        raise TrainingError(f"{subject} a {type(upload).__name__}, but an Upload is expected; correct its code")
    if names := sorted(upload.extras.keys() ^ extras.keys()):
        problem = "no {}, which payload declares" if names[0] in extras else "{}, which payload does not declare"
        raise TrainingError(f"{subject} {problem.format(names[0])}; correct its code")
    shared = client.model.shared
    empty = torch.empty(0, device=shared.device)
    _check(subject, "vector", upload.vector, _form(shared))
    for name, tensor in upload.extras.items():
        _check(subject, name, tensor, _form(empty, extras[name]))
    for name, rows in upload.rows.items():
        if name not in tables:
            raise TrainingError(f"{subject} rows of {name}, a table that payload does not declare; correct its code")
        is_table = isinstance(rows, Tensor) and rows.dim() == 2
        _check(subject, f"rows of {name}", rows, _form(empty, (len(rows) if is_table else 1, tables[name])))
    if upload.mask is not None:
        _check(subject, "mask", upload.mask, _form(empty.bool(), (client.model.flat.num_shared_parameters,)))
    return upload


def _form(tensor: Tensor, shape: tuple[int, ...] | None = None) -> str:
    """Describe a tensor, or one of another ``shape``."""
    sizes = [*tensor.shape] if shape is None else [*shape]
    return f"{sizes} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"


def _check(subject: str, name: str, part: object, expected: str) -> None:
    if not isinstance(part, Tensor):
        raise TrainingError(f"{subject} a {type(part).__name__} as its {name}; {name} {expected} is expected")
    if (form := _form(part)) != expected:
        raise TrainingError(f"{subject} {name} {form}, but {name} {expected} is expected; correct its code")
