"""Objects as they were made: what shows that one was changed afterwards."""

from __future__ import annotations

import copy
import inspect
import sys
import zlib
from collections.abc import Mapping
from functools import cached_property
from typing import Any

LIGHTNING = ("lightning", "pytorch_lightning")
"""packages"""


def noted(made: Any) -> dict[str, Any]:
    """Return the public attributes of an object; of a network, also those of its layers, its hooks, and its tensors."""
    if not _is_network(made):
        return {name: _content(value) for name, value in _attributes(made).items() if not name.startswith("_")}
    notes: dict[str, Any] = {name: _content(tensor) for name, tensor in made.state_dict(keep_vars=True).items()}
    for prefix, layer in made.named_modules():
        for name, value in {"class": type(layer), **_attributes(layer)}.items():
            if name.endswith("_hooks") and value:
                notes[f"{prefix}.{name}"] = len(value)
            elif not name.startswith("_") and name != "training":  # clients set the mode themselves
                notes[f"{prefix}.{name}".lstrip(".")] = _content(value)
    return notes


def _is_network(made: Any) -> bool:
    """Return whether an object is a module of torch, which the commands on data do without."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(made, torch.nn.Module)


def _attributes(made: Any) -> dict[str, Any]:
    """Return the attributes of an object, and its properties that can be set, but for those of libraries."""
    classes = [cls for cls in type(made).__mro__ if cls.__module__.partition(".")[0] not in ("torch", *LIGHTNING)]
    settable = [
        name for cls in classes for name, value in vars(cls).items() if isinstance(value, property) and value.fset
    ]
    return {**vars(made), **{name: getattr(made, name, None) for name in settable}}


def first_change(made: Any, notes: Mapping[str, Any]) -> str:
    """Return the first attribute of an object that is not as noted; empty without one.

    Of a network, each counts. Of other objects, those count that are arguments, or replace one of the class; all
    others may be state.
    """
    present, is_network = noted(made), _is_network(made)
    for name in dict.fromkeys((*present, *notes)):
        is_equal = name in present and name in notes and are_same(notes[name], present[name])
        if not is_equal and (is_network or _counts(made, name, name in notes)):
            return name
    return ""


def _counts(made: Any, name: str, was_there: bool) -> bool:
    """Return whether a changed attribute of an object is no state: an argument, or in place of one of the class."""
    of_class = getattr(type(made), name, None)
    if not was_there:
        return of_class is not None and not isinstance(of_class, cached_property)
    return name in inspect.signature(type(made)).parameters


def are_same(before: Any, now: Any) -> bool:
    """Return whether two values are equal, of one type."""
    if before is now:
        return True
    try:
        return type(before) is type(now) and bool(before == now)
    except (ValueError, RuntimeError):  # of arrays
        return False


def _content(value: Any) -> Any:
    """Return a value that later changes in place leave as it is; a tensor by a hash of its bytes."""
    torch = sys.modules.get("torch")
    if torch and isinstance(value, torch.Tensor) and not (value.is_meta or torch.nn.parameter.is_lazy(value)):
        flat = value.detach().cpu().reshape(-1).contiguous()
        return (
            value.dtype,
            tuple(value.shape),
            value.requires_grad,
            zlib.crc32(flat.view(torch.uint8).numpy().tobytes()),
        )
    return copy.copy(value) if isinstance(value, list | dict | set) else value
