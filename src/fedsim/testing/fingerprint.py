"""Hashes of the state in Python objects, which find a change of state that no checkpoint holds."""

from __future__ import annotations

import functools
import hashlib
import inspect
import os
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_MOST = 20_000
"""objects that are visited below one name: beyond, a table of constants would take seconds"""
_PLAIN = (int, float, complex, str, bytes, bool, type(None), range, slice, torch.dtype, torch.device)
_OF_LIBRARIES = (
    "fedsim", "torch", "lightning", "pytorch_lightning", "lightning_fabric", "torchmetrics", "numpy", "builtins",
    "typing", "abc", "functools", "dataclasses", "enum", "logging",
)  # fmt: skip


def state_of(part: Any) -> dict[str, str]:
    """Return the name of each place where ``part`` can keep state -> a hash of what is there.

    The places are its attributes, those of its classes outside of libraries, default values, closures and attributes of
    their functions, and the variables of their modules. Not counted are cached properties and caches of functions,
    which only keep what they can compute again.
    """
    places = {f"self.{name}": hashed(value) for name, value in _attributes(part)}
    modules: dict[str, Mapping[str, Any]] = {}
    for cls in type(part).__mro__:
        if cls.__module__.partition(".")[0] in _OF_LIBRARIES and "_watched" not in vars(cls):
            continue
        held = {name: value for name, value in vars(cls).items() if _counts(name)}
        if "_watched" in vars(cls):  # the hooks that watch are not the author's
            held = {name: value for name, value in held.items() if not callable(value)}
        places |= {f"{cls.__name__}.{name}": hashed(value) for name, value in held.items()}
        modules[cls.__module__] = {**modules.get(cls.__module__, {}), **_variables(cls)}
    for name, variables in modules.items():
        places |= {f"{name}.{n}": hashed(value, name) for n, value in variables.items() if _is_variable(n, value)}
    return places


def _variables(cls: type) -> Mapping[str, Any]:
    """Return the variables of a class's module; of a class that was sent by value, those that its functions use."""
    for held in vars(cls).values():
        if isinstance(held, types.FunctionType) and held.__module__ == cls.__module__:
            return held.__globals__
    return vars(sys.modules[cls.__module__]) if cls.__module__ in sys.modules else {}


def _attributes(part: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of an object, without its cached properties."""
    for name, value in vars(part).items() if hasattr(part, "__dict__") else ():
        if not isinstance(inspect.getattr_static(type(part), name, None), functools.cached_property):
            yield name, value


def _counts(name: str) -> bool:
    return not (name.startswith("__") and name.endswith("__")) and not name.startswith("_abc_") and name != "_watched"


def _is_variable(name: str, value: Any) -> bool:
    return _counts(name) and not isinstance(value, types.ModuleType) and not name.startswith("@")


def hashed(value: Any, module: str | None = None) -> str:
    """Return a hash of a value, of all that it holds; ``module``: of objects, only its own are entered."""
    digest, seen, waiting, count = hashlib.blake2b(digest_size=12), dict[int, Any](), [value], 0
    while waiting and count < _MOST:
        held, count = waiting.pop(), count + 1
        if isinstance(held, _PLAIN):
            digest.update(repr(held).encode())
        elif id(held) not in seen:
            seen[id(held)] = held  # held: another object could get its id
            content, inner = _content(held, module)
            digest.update(content)
            waiting += inner
    return digest.hexdigest()


def _content(held: Any, module: str | None) -> tuple[bytes, list[Any]]:
    """Return bytes that identify an object itself, and the objects that it holds."""
    for held_type, identity in _WITHOUT_INNER.items():
        if isinstance(held, held_type):
            return identity(held), []
    if isinstance(held, Mapping):
        return b"{%d" % len(held), [inner for item in held.items() for inner in item]
    if isinstance(held, list | tuple | deque):
        return b"[%d" % len(held), list(held)
    if isinstance(held, nn.Module):
        return type(held).__qualname__.encode(), [dict(held.state_dict())]
    if isinstance(held, types.FunctionType | types.MethodType):
        return held.__qualname__.encode(), _of_function(held, module)
    if isinstance(held, property | classmethod | staticmethod):
        return b"property", [f for f in (getattr(held, "fget", None), getattr(held, "__func__", None)) if f]
    return type(held).__qualname__.encode(), _of_object(held, module)


def _of_tensor(tensor: Tensor) -> bytes:
    name = f"{tensor.dtype}{tuple(tensor.shape)}".encode()
    return name + tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


_WITHOUT_INNER: Mapping[Any, Callable[[Any], bytes]] = {
    Tensor: _of_tensor,
    np.ndarray: lambda array: repr((array.dtype, array.shape)).encode() + array.tobytes(),
    set: lambda members: repr(sorted(map(repr, members))).encode(),
    frozenset: lambda members: repr(sorted(map(repr, members))).encode(),
    torch.Generator: lambda stream: bytes(stream.get_state().numpy().tobytes()),
    np.random.Generator: lambda stream: repr(stream.bit_generator.state).encode(),
    random.Random: lambda stream: repr(stream.getstate()).encode(),
}
"""class -> the content of an object of it, of those that hold no other objects"""


def _of_function(function: Any, module: str | None) -> list[Any]:
    if (function.__module__ or "").partition(".")[0] in _OF_LIBRARIES:
        return []
    if module is not None and function.__module__ != module:
        return []
    cells = [cell.cell_contents for cell in function.__closure__ or () if _is_full(cell)]
    kept = [cell for cell in cells if not isinstance(cell, type)]  # super() has the class in a cell
    return [function.__defaults__, function.__kwdefaults__, dict(vars(function)), *kept]


def _is_full(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _of_object(held: Any, module: str | None) -> list[Any]:
    """Return the attributes of objects of the author's own classes, and of classes in the module."""
    cls = held if isinstance(held, type) else type(held)
    owner = cls.__module__
    is_foreign = module is not None and owner != module and cls is not types.SimpleNamespace
    if owner.partition(".")[0] in _OF_LIBRARIES or is_foreign:
        return [*_counter(held)]
    if isinstance(held, type):
        return [value for name, value in vars(held).items() if _counts(name) and not callable(value)]
    return [inner for item in _attributes(held) for inner in item]


def _counter(held: Any) -> Iterator[str]:
    """Yield the position of an iterator such as itertools.count or a range's."""
    if type(held).__module__ in ("itertools", "builtins") and hasattr(held, "__next__"):
        with suppress(TypeError):  # generators cannot be described
            yield repr(held.__reduce__())


def changed(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Return the names of places that are new, gone or different."""
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


def global_streams() -> dict[str, bytes]:
    """Return the states of the global random streams, by library."""
    numpy_state: Callable[[], Any] = np.random.get_state
    _, key, *places = numpy_state()
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy": key.tobytes() + repr(places).encode(),  # the repr of 624 numbers would take most of a fit's time
        "random": repr(hash(random.getstate())).encode(),
    }


def global_settings() -> dict[str, str]:
    """Return settings that all parts of a process share -> their values, or hashes of them."""
    return {
        "torch's default dtype": str(torch.get_default_dtype()),
        "torch's number of threads": str(torch.get_num_threads()),
        "torch's choice of deterministic algorithms": str(torch.are_deterministic_algorithms_enabled()),
        "torch's recording of gradients": str(torch.is_grad_enabled()),
        "torch's precision of matrix products": torch.get_float32_matmul_precision(),
        "the working folder": os.getcwd(),
        "sys.path": repr(sys.path),
        "NumPy's treatment of errors": repr(np.geterr()),
        **{f"the environment's {name}": value for name, value in os.environ.items()},
    }


def moved(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Return the names whose values differ; libraries add variables to the environment when they are imported."""
    return [name for name in before.keys() & after.keys() if before[name] != after[name]]


def num_hooks(tensor: Tensor) -> int:
    """Return the number of hooks on a tensor's gradient."""
    return len(tensor._backward_hooks or ())


def shape_of(network: nn.Module) -> dict[str, str]:
    """Return a network without its values, place by place: layers, hooks, and which tensors train."""
    shape: dict[str, str] = {}
    for name, layer in network.named_modules():
        hooks = [len(held) for attribute, held in vars(layer).items() if attribute.endswith("_hooks")]
        shape |= {f"the layer {name}": type(layer).__qualname__, f"the hooks of layer {name}": repr(hooks)}
    for name, tensor in network.named_parameters():
        shape |= {f"requires_grad of {name}": f"{tensor.requires_grad}", f"the hooks of {name}": f"{num_hooks(tensor)}"}
    return shape


def modes_of(network: nn.Module) -> dict[str, str]:
    """Return whether each layer is in training mode."""
    return {f"the mode of layer {name}": str(layer.training) for name, layer in network.named_modules()}


def unsettle(seed: int) -> None:
    """Set all global random streams to another state: nothing may depend on it."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - as above
    torch.manual_seed(seed)
