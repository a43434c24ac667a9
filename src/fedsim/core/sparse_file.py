"""Files of pruned models: a bit for each element of a pruned tensor, and its values that are not zero.

It is a safetensors file. A tensor without pruned elements is stored as NAME. A pruned tensor is stored as
``bitmap/NAME``, uint8 [ceil(n / 8)], first element in the highest bit, and ``values/NAME``, float32 [number of values].
The file's metadata hold ``format`` and, as JSON, the ``shapes`` of the pruned tensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fedsim.core.errors import DataError
from fedsim.core.tensor_file import problem_of_weights, write_tensors

_FORMAT = "fedsim sparse 1"


def write_sparse(tensors: Mapping[str, Tensor], pruned: Collection[str], path: Path) -> None:
    """Write float32 CPU tensors by name; tensors whose names are in ``pruned`` are stored without their zeros."""
    parts, shapes = {}, {}
    for name, tensor in tensors.items():
        values = tensor.flatten()
        left = values != 0
        if name not in pruned or bool(left.all()):
            parts[name] = tensor.contiguous()
            continue
        parts[f"bitmap/{name}"] = torch.from_numpy(np.packbits(left.numpy()))
        parts[f"values/{name}"] = values[left]
        shapes[name] = list(tensor.shape)
    write_tensors(path, parts, {"format": _FORMAT, "shapes": json.dumps(shapes)})


def read_sparse(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file of :func:`write_sparse`, with zeros for pruned elements.

    Raises:
        DataError: if it is another kind of file, or damaged.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            parts = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - it is no dict
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path}: cannot be read ({type(error).__name__}); is it complete?") from error
    if metadata.get("format") != _FORMAT:
        raise DataError(f"{path}: is not a sparse file of fedsim export (format {_FORMAT})")
    shapes: dict[str, list[int]] = json.loads(metadata["shapes"])
    tensors = {key: tensor for key, tensor in parts.items() if "/" not in key}
    for name, shape in shapes.items():
        try:
            tensors[name] = _unpack(parts[f"bitmap/{name}"], parts[f"values/{name}"], shape)
        except (KeyError, ValueError) as error:
            raise DataError(f"{path}: tensor {name} is damaged; export it again") from error
    if problem := problem_of_weights(tensors.items()):
        raise DataError(f"{path}: {problem}; export it again")
    return tensors


def _unpack(bitmap: Tensor, values: Tensor, shape: list[int]) -> Tensor:
    """Raise ValueError if the parts do not fit together."""
    length = math.prod(shape)
    if bitmap.shape != (-(-length // 8),):
        raise ValueError("the bitmap has another length")
    left = torch.from_numpy(np.unpackbits(bitmap.numpy(), count=length)).bool()
    if values.shape != (int(left.count_nonzero()),):
        raise ValueError("there are more or fewer values than bits")
    tensor = torch.zeros(length)
    tensor[left] = values
    return tensor.view(shape)
