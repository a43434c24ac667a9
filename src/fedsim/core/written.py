"""Objects as they stand in a config: the way back from what jsonargparse builds."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable, Mapping
from enum import Enum
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

import torch
from torch import nn

from fedsim.core.annotations import hints_of, python_number
from fedsim.core.arguments import ChecksArguments, KeepsArguments, arguments_of, members_of
from fedsim.core.as_made import LIGHTNING, are_same, first_change, noted


class NotInConfigError(Exception):
    """A value has no form in a config; the message names its place."""


def written(value: Any, declared: Any = None, option: str = "") -> Any:
    """Return a value as a config has it: plain values, and objects by ``class_path`` and ``init_args``.

    Args:
        value: a setting: plain values, a dataclass, an object that keeps its arguments, a class of modules or a
            partial of one, a function that makes an optimizer.
        declared: the annotation of the setting: a section of one dataclass has its fields alone.
        option: the setting's name, for messages.

    Raises:
        NotInConfigError: naming the place of the first value that has no such form.
    """
    value = python_number(value.value if isinstance(value, Enum) else value)
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, list | tuple):
        inner = [type_ for part in members_of(declared) for type_ in get_args(part)]
        return [written(item, inner[0] if inner else None, f"{option}.{i}") for i, item in enumerate(value, start=1)]
    if type(value) in (dict, MappingProxyType):  # no other, such as omegaconf's, which has more than its items
        inner = [type_ for part in members_of(declared) for type_ in get_args(part)][1:]
        return {
            str(name): written(item, inner[0] if inner else None, f"{option}.{name}") for name, item in value.items()
        }
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = {field.name for field in dataclasses.fields(value)}
        _check_as_made(value, {name: note for name, note in noted(value).items() if name in names}, option)
        fields = written_fields(value, option)
        return fields if type(value) in members_of(declared) else class_written(type(value), fields, option)
    return _object(value, option)


def _object(value: Any, option: str) -> dict[str, Any]:
    """Return an object, or what makes one, by its class and arguments; raise NotInConfigError as :func:`written`."""
    if isinstance(value, KeepsArguments):
        return class_written(type(value), written_arguments(value, option), option)
    factory = value.func if isinstance(value, partial) else value
    if isinstance(factory, type) and issubclass(factory, nn.Module):  # a module that is built for each client
        arguments = _named(value, option) if isinstance(value, partial) else {}
        return class_written(factory, written(arguments, None, option), option)
    if type(value).__module__.partition(".")[0] in LIGHTNING:  # whose objects keep each argument as an attribute
        return class_written(type(value), _attributes(value, option), option)
    if callable(value) and not isinstance(value, nn.Module):
        return _optimizer(value, option)
    if _takes_nothing(value):
        _check_as_made(value, {}, option)
        return class_written(type(value), {}, option)
    raise NotInConfigError(f"{option}: the arguments of {type(value).__name__} are not known")


def written_fields(value: Any, option: str) -> dict[str, Any]:
    """Return the fields of a dataclass as those of a section; raise NotInConfigError as :func:`written`."""
    hints = hints_of(type(value))
    names = [field.name for field in dataclasses.fields(value) if field.init]
    if {*inspect.signature(type(value)).parameters} != {*names}:
        raise NotInConfigError(f"{option}: {type(value).__name__} takes other arguments than its fields")
    return {name: written(getattr(value, name), hints.get(name), f"{option}.{name}") for name in names}


def written_arguments(value: KeepsArguments, option: str) -> dict[str, Any]:
    """Return the arguments of an object as the fields of a section; raise NotInConfigError as :func:`written`."""
    if "_noted" in vars(value):
        _check_as_made(value, vars(value)["_noted"], option)
    hints = hints_of(type(value).__init__)
    return {name: written(arg, hints.get(name), f"{option}.{name}") for name, arg in arguments_of(value).items()}


def _takes_nothing(value: Any) -> bool:
    """Return whether an object is what its class makes of no arguments: it has no constructor, and no attribute."""
    makers: tuple[Any, ...] = (object.__new__, ChecksArguments.__new__)
    attributes = getattr(value, "__dict__", None)  # None: of a class in C
    is_made = type(value).__init__ is object.__init__ and type(value).__new__ in makers
    return is_made and attributes is not None and all(name.startswith("_") for name in attributes)


def _attributes(value: Any, option: str) -> dict[str, Any]:
    """Return the arguments of an object that keeps them as attributes, as a config has them, without defaults.

    Raises NotInConfigError if an object made with them is another one, or one of them cannot be written.
    """
    arguments = {}
    for name, parameter in inspect.signature(type(value)).parameters.items():
        kept = vars(value).get(name, vars(value).get(f"_{name}", parameter.default))
        if not are_same(kept, parameter.default):
            arguments[name] = kept
    try:
        twin, content = vars(type(value)(**arguments)), {name: written(kept) for name, kept in arguments.items()}
    except Exception:
        twin, content = {}, {}
    if {*twin} != {*vars(value)} or not all(are_same(twin[name], kept) for name, kept in vars(value).items()):
        raise NotInConfigError(f"{option}: the arguments of {type(value).__name__} are not known")
    return content


def _check_as_made(value: Any, notes: Mapping[str, Any], option: str) -> None:
    """Raise NotInConfigError if an object is no longer as its arguments made it."""
    earlier = getattr(value, "__dict__", {}).get("_changed_before", ())
    for name in (*earlier, first_change(value, notes) if hasattr(value, "__dict__") else ""):
        if name:
            made = type(value).__name__
            raise NotInConfigError(f"{option}.{name}: was changed after {made} was made; give it as an argument")


def _named(made: partial[Any], option: str) -> dict[str, Any]:
    """Return the arguments of a partial by name; raise NotInConfigError for one that has none."""
    parameters = inspect.signature(made.func).parameters.values()
    names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    if len(made.args) > len(names):
        raise NotInConfigError(f"{option}: {made.func.__name__} takes arguments without a name")
    return {**dict(zip(names, made.args, strict=False)), **made.keywords}


def class_written(cls: type, arguments: Mapping[str, Any], option: str) -> dict[str, Any]:
    """Return a class with arguments; that of a script, or of a function, cannot be found by its path."""
    is_found = getattr(sys.modules.get(cls.__module__), cls.__qualname__, None) is cls
    if cls.__module__ == "__main__" or not is_found:
        raise NotInConfigError(f"{option}: {cls.__qualname__} is a class of the script")
    path = f"{cls.__module__}.{cls.__qualname__}"
    return {"class_path": path, "init_args": dict(arguments)} if arguments else {"class_path": path}


def _optimizer(make: Callable[..., Any], option: str) -> dict[str, Any]:
    """Return an optimizer's class and the settings that it has, as the function makes it of any parameters."""
    try:
        made = make([nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(2))])
        [group] = made.param_groups
        names = [name for name in inspect.signature(type(made)).parameters if name in made.defaults]
        arguments = {name: made.defaults[name] for name in names}
        is_whole = type(made)([nn.Parameter(torch.zeros(1))], **arguments).defaults == made.defaults
    except Exception as error:  # a function of the user's
        raise NotInConfigError(f"{option}: is no function that makes an optimizer of a list") from error
    if not is_whole or any(group[name] != value for name, value in made.defaults.items()):
        raise NotInConfigError(f"{option}: makes an optimizer that is not decided by its arguments")
    return class_written(type(made), written(arguments, None, option), option)
