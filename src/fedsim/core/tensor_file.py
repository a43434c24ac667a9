"""Files of tensors: safetensors, with the system's own errors."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor


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
