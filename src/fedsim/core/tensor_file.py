"""Files of tensors: safetensors, with the system's own errors."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor


def problem_of_weights(tensors: Iterable[tuple[str, Tensor]], counters: Collection[str] = ()) -> str:
    """Return which tensor of a file cannot be a weight, and why; empty if all can.

    ``counters``: names of integers, beside those of batch normalisation.
    """
    for name, tensor in tensors:
        if not tensor.is_floating_point() and name not in counters and not name.endswith("num_batches_tracked"):
            return f"{name} holds {str(tensor.dtype).removeprefix('torch.')}, no floating-point numbers"
        if not tensor.isfinite().all():
            return f"{name} holds numbers that are not finite"
    return ""


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write contiguous CPU tensors by name.

    Raises:
        OSError: if the system refuses it, as on a full disk; the library has a class of its own for that.
    """
    try:
        save_file(dict(tensors), path, dict(metadata))
    except SafetensorError as error:
        if (number := re.search(r"os error (\d+)", str(error))) is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
