"""Refuse values that the parser accepts but no field can use: null for a required value, NaN, infinite numbers."""

from __future__ import annotations

import inspect
import math
import types
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from functools import cache
from importlib import import_module
from typing import Any, get_args, get_origin

from fedsim.core.annotations import hints_of, problem_of, words_of
from fedsim.core.arguments import members_of
from fedsim.core.errors import ConfigError
from fedsim.settings.table import section, setting_at

_CHECKED_PACKAGES = ("fedsim", "lightning", "torch")
"""Packages whose classes take no infinite numbers and no empty texts; the user's classes may."""


def check_values(config: Mapping[str, Any], sections: Mapping[str, type]) -> None:
    """Check every value of a parsed config.

    Args:
        config: plain values, with a mapping for each section; a class is a mapping with a ``class_path``.
        sections: name of each section -> the class whose arguments are the section's fields.

    Raises:
        ConfigError: for the first value that no field can use; its message names the field.
    """
    for name, setting in section("").arguments.items():
        if config.get(name, False) is None and isinstance(setting.default, bool):
            raise ConfigError(f"{name}: null is not allowed; give true or false")
    for section_name, cls in sections.items():
        _check_arguments(config.get(section_name) or {}, cls, section_name)


def _check_arguments(arguments: Mapping[str, Any], cls: type, field: str) -> None:
    described = cls if is_dataclass(cls) else cls.__init__  # type: ignore[misc] # of this class only
    hints, parameters = hints_of(described), _parameters(cls)
    for name, value in arguments.items():
        if value == "" and parameters and name not in parameters:  # passed on to another class, maybe as its default
            continue
        default = parameters[name].default if name in parameters else inspect.Parameter.empty
        if type(value) is not type(default) or value != default:
            _check(value, hints.get(name, Any), f"{field}.{name}", cls)


def _check(value: Any, hint: Any, field: str, owner: type) -> None:
    """Check a value of type ``hint``, which is an argument of ``owner`` or a part of one."""
    if isinstance(value, Mapping) and "class_path" in value:
        cls = _class_at(value["class_path"])
        _check_arguments(value.get("init_args") or {}, cls or owner, field)
    elif isinstance(value, Mapping):
        _check_mapping(value, hint, field, owner)
    elif problem := _problem(value, hint, field, owner.__module__.partition(".")[0] in _CHECKED_PACKAGES):
        raise ConfigError(f"{field}: {problem}")
    elif isinstance(value, list | tuple):
        for inner in value:
            _check(inner, next(_hints_within(hint, (list, tuple)), Any), field, owner)


def _problem(value: Any, hint: Any, field: str, is_checked: bool) -> str | None:
    """Return the problem of a value without fields, or None; ``is_checked``: its class is not the user's."""
    if value is None:
        problem = f"null is not allowed; leave it out for the default, or give {words_of(hint)}"
        return None if _takes_null(hint) else problem
    if isinstance(value, float) and not math.isfinite(value):
        is_valid = math.isinf(value) and (setting_at(field).facts.may_be_infinite or not is_checked)
        return None if is_valid else f"{value} is not a finite number; give a finite one"
    if type(value) is int and is_checked and (problem := problem_of(value, int)):
        return problem
    if value == "" and is_checked:
        return "is an empty text; leave it out for the default, or give a value"
    if all(_is_section(alternative) for alternative in members_of(hint) if alternative is not types.NoneType):
        return f"is a section with fields below it, but got {value}"
    return None


def _check_mapping(value: Mapping[str, Any], hint: Any, field: str, owner: type) -> None:
    """Check a section, or a dictionary of values of one type."""
    section = next(filter(_is_section, members_of(hint)), None)
    if section is not None:
        _check_arguments(value, section, field)
        return
    for name, inner in value.items():
        _check(inner, next(_hints_within(hint, (dict,)), Any), f"{field}.{name}", owner)


@cache
def _parameters(cls: type) -> Mapping[str, inspect.Parameter]:
    """Return a class's arguments; defaults are valid even if their types differ. Empty if Python cannot list them."""
    try:
        return inspect.signature(cls).parameters
    except (TypeError, ValueError):
        return {}


def _is_section(hint: Any) -> bool:
    return isinstance(hint, type) and is_dataclass(hint)


def _takes_null(hint: Any) -> bool:
    return any(
        alternative in (Any, object, None, types.NoneType) or isinstance(alternative, str)
        for alternative in members_of(hint)
    )


def _hints_within(hint: Any, kinds: tuple[type, ...]) -> Iterator[Any]:
    """Yield the types of the elements of a list, tuple or dictionary of type ``hint``."""
    for alternative in members_of(hint):
        if get_origin(alternative) in kinds and get_args(alternative):
            yield get_args(alternative)[0 if list in kinds else -1]


def _class_at(path: str) -> type | None:
    """Return the class at a dotted path; None if it is not a class or cannot be imported."""
    module, _, name = str(path).rpartition(".")
    try:
        attribute = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError):
        return None
    return attribute if isinstance(attribute, type) else None
