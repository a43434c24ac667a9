"""Values that the parser lets pass though nobody can mean them: null where there is no null, NaN, endless numbers."""

from __future__ import annotations

import inspect
import math
import types
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from functools import cache
from importlib import import_module
from typing import Any, Union, get_args, get_origin, get_type_hints

from fedsim.core.errors import ConfigError

_ENDLESS = ("model.hardware.",)
"""Sections in which an infinite number has a meaning."""
_OWN = ("fedsim", "lightning", "torch")
"""Packages in whose classes an infinite number has none."""


def check_values(config: Mapping[str, Any], sections: Mapping[str, type]) -> None:
    """Look at every value of a parsed config.

    Args:
        config: of plain values, with a mapping for each section; a class is a mapping with a ``class_path``.
        sections: name of each section -> the class whose arguments its fields are.

    Raises:
        ConfigError: for the first value that cannot be meant; it names the field.
    """
    for name in ("overwrite", "save_ranking", "save_maps"):
        if config.get(name, False) is None:
            raise ConfigError(f"{name}: null means nothing here; give true or false")
    for section, cls in sections.items():
        _check_arguments(config.get(section) or {}, cls, section)


def _check_arguments(given: Mapping[str, Any], cls: type, where: str) -> None:
    """Check the arguments of a class."""
    hints, parameters = _hints(cls), _parameters(cls)
    for name, value in given.items():
        if value == "" and parameters and name not in parameters:  # it goes on to another class, maybe as its default
            continue
        if name not in parameters or not _same(value, parameters[name].default):
            _check(value, hints.get(name, Any), f"{where}.{name}", cls)


def _same(value: Any, default: Any) -> bool:
    return type(value) is type(default) and bool(value == default)


def _check(value: Any, hint: Any, where: str, owner: type) -> None:
    """Check a value of type ``hint``, which is an argument of ``owner`` or stands within one."""
    if isinstance(value, Mapping) and "class_path" in value:
        cls = _class_at(value["class_path"])
        _check_arguments(value.get("init_args") or {}, cls or owner, where)
    elif isinstance(value, Mapping):
        _check_mapping(value, hint, where, owner)
    elif problem := _problem(value, hint, where, owner.__module__.partition(".")[0] in _OWN):
        raise ConfigError(f"{where}: {problem}")
    elif isinstance(value, list | tuple):
        for inner in value:
            _check(inner, next(_hints_within(hint, (list, tuple)), Any), where, owner)


def _problem(value: Any, hint: Any, where: str, is_own: bool) -> str | None:
    """Return what is wrong with a value that has no fields; ``is_own``: its class is not the user's."""
    if value is None:
        named = f"null means nothing here; leave it out for the default, or give {_named(hint)}"
        return None if _takes_null(hint) else named
    if isinstance(value, float) and not math.isfinite(value):
        endless = math.isinf(value) and (where.startswith(_ENDLESS) or not is_own)
        return None if endless else f"{value} is no number that can be used; give a finite one"
    if value == "" and is_own:
        return "is an empty text; leave it out for the default, or give a value"
    if all(_is_section(one) for one in _alternatives(hint) if one is not types.NoneType):
        return f"is a section, with fields below it, and not {value}"
    return None


def _check_mapping(value: Mapping[str, Any], hint: Any, where: str, owner: type) -> None:
    """Check a section, or a dictionary of values of one type."""
    section = next(filter(_is_section, _alternatives(hint)), None)
    if section is not None:
        _check_arguments(value, section, where)
        return
    for name, inner in value.items():
        _check(inner, next(_hints_within(hint, (dict,)), Any), f"{where}.{name}", owner)


@cache
def _hints(cls: type) -> dict[str, Any]:
    """Return the types of a class's arguments."""
    try:
        return get_type_hints(cls if is_dataclass(cls) else cls.__init__)  # type: ignore[misc] # of the class alone
    except (NameError, TypeError):  # names for type checkers only, or no Python
        return {}


@cache
def _parameters(cls: type) -> Mapping[str, inspect.Parameter]:
    """Return a class's arguments; their defaults are right whatever their types say. None are known of some classes."""
    try:
        return inspect.signature(cls).parameters
    except (TypeError, ValueError):
        return {}


def _alternatives(hint: Any) -> tuple[Any, ...]:
    """Return the types of a union, or the one type."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _is_section(hint: Any) -> bool:
    return isinstance(hint, type) and is_dataclass(hint)


def _takes_null(hint: Any) -> bool:
    return any(one in (Any, object, None, types.NoneType) or isinstance(one, str) for one in _alternatives(hint))


def _hints_within(hint: Any, kinds: tuple[type, ...]) -> Iterator[Any]:
    """Yield the types of what is in a list, tuple or dictionary of type ``hint``."""
    for one in _alternatives(hint):
        if get_origin(one) in kinds and get_args(one):
            yield get_args(one)[0 if list in kinds else -1]


def _named(hint: Any) -> str:
    """Return a type as people write it."""
    names = [getattr(one, "__name__", "") for one in _alternatives(hint) if get_origin(one) is None]
    choices = [repr(choice) for one in _alternatives(hint) for choice in get_args(one) if isinstance(choice, str)]
    return " or ".join([*filter(None, names), *choices]) or "a value"


def _class_at(path: str) -> type | None:
    """Return the class, or the class that a function is to return; None if it is neither."""
    module, _, name = str(path).rpartition(".")
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError):
        return None
    return found if isinstance(found, type) else None
