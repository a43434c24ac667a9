"""Objects as they were made: what shows that one was changed afterwards."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import nn


def noted(made: Any) -> dict[str, Any]:
    """Return the public attributes of an object; of a network, also those of its layers, and its tensors' contents."""
    layers = dict(made.named_modules()) if isinstance(made, nn.Module) else {"": made}
    notes = {}
    for prefix, layer in layers.items():
        values = {"class": type(layer), **vars(layer)} if isinstance(made, nn.Module) else vars(layer)
        for name, value in values.items():
            if not name.startswith("_") and name != "training":  # clients set the mode themselves
                notes[f"{prefix}.{name}".lstrip(".")] = _content(value)
    if isinstance(made, nn.Module):
        notes |= {name: _content(tensor) for name, tensor in made.state_dict(keep_vars=True).items()}
    return notes


def first_change(made: Any, notes: Mapping[str, Any]) -> str:
    """Return the first attribute of an object that is not as noted; empty without one.

    What was empty, and is no argument, fills in use; a further attribute counts where it replaces one of the class.
    """
    arguments = getattr(type(made).__init__, "__annotations__", {})
    present = noted(made)
    for name, value in present.items():
        before = notes.get(name, value)
        is_state = not (before or name in arguments or isinstance(made, nn.Module))
        of_class = getattr(type(made), name, None)
        is_new = name not in notes and hasattr(type(made), name) and not isinstance(of_class, cached_property)
        if is_new or not (is_state or _are_same(before, value)):
            return name
    return next((name for name in notes if name not in present), "")


def _are_same(before: Any, now: Any) -> bool:
    if before is now:
        return True
    try:
        return type(before) is type(now) and bool(before == now)
    except (ValueError, RuntimeError):  # of arrays
        return False


def _content(value: Any) -> Any:
    """Return a value that later changes in place leave as it is; a tensor by a hash of its bytes."""
    if isinstance(value, torch.Tensor) and not (value.is_meta or nn.parameter.is_lazy(value)):
        flat = value.detach().cpu().reshape(-1).contiguous()
        return (
            value.dtype,
            tuple(value.shape),
            value.requires_grad,
            zlib.crc32(flat.view(torch.uint8).numpy().tobytes()),
        )
    return copy.copy(value) if isinstance(value, list | dict | set) else value
