"""``fedsim export``: the global model of a checkpoint as safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from fedsim.checkpoint import read_checkpoint
from fedsim.core.errors import ConfigError, DataError
from fedsim.core.files import replacing
from fedsim.models.attention import holds_attention

__all__ = ["export"]


def export(ckpt_path: str, output: str, arch: str | None = None) -> str:
    """Write the global model of a checkpoint as a safetensors file.

    The backbone's tensors carry torchvision's names (``layer1.0.conv1.weight``), the neck's start with ``neck.``, so
    ``torchvision.models.resnet18().load_state_dict(load_file(output), strict=False)`` loads the backbone; only the
    classifier ``fc`` is missing. A method with private necks gives the backbone alone. A backbone whose ``norm`` is not
    ``bn`` has tensors of other names where attention stands. Torchvision's network lacks them; fedsim's with the same
    ``norm`` has them.

    Args:
        ckpt_path: a checkpoint written by fedsim fit.
        output: the file to write.
        arch: which architecture, where the federation has several.

    Returns:
        a warning, if the file does not fit torchvision's network; else nothing.
    """
    tensors = global_tensors(read_checkpoint(Path(ckpt_path)), arch)
    path = Path(output)
    if path.is_dir():
        raise DataError(f"{path}: is a folder; give --output the name of a file")
    try:
        with replacing(path) as partial:
            save_file(tensors, partial)
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path}: cannot be written ({error}); choose another --output") from error
    if not holds_attention(tensors):
        return ""
    return (
        f"{path}: holds attention, which torchvision's networks lack; load it into fedsim's own backbone with the same "
        "norm"
    )


def global_tensors(checkpoint: dict[str, Any], arch: str | None) -> dict[str, Tensor]:
    """Cut the global vector of one architecture into named tensors; the identity head is left out."""
    layouts = checkpoint["fedsim"]["layouts"]
    if arch is None and len(layouts) == 1:
        arch = next(iter(layouts))
    if arch not in layouts:
        raise ConfigError(f"--arch: choose one of the checkpoint's architectures: {', '.join(layouts)}")
    if not checkpoint["fedsim"]["complete"][arch]:
        method = checkpoint["fedsim"]["method"]
        raise ConfigError(
            f"ckpt_path: {method} keeps part of the backbone on the clients, there is no global model to export"
        )
    vector = checkpoint["state_dict"][f"server.vectors.{arch}"]
    tensors = {}
    for entry in layouts[arch]:
        name, shape = entry["name"].removeprefix("backbone."), torch.Size(entry["shape"])
        if not name.startswith("head."):
            # clone: a view would drag the whole vector into the file
            tensors[name] = vector[entry["offset"] : entry["offset"] + shape.numel()].view(shape).clone()
    return tensors
