"""Values against annotations, in the words that the command line has for texts: functions and settings are checked."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Protocol, Union, get_args, get_origin, get_type_hints, runtime_checkable

from fedsim.core.errors import ConfigError
from fedsim.core.names import one_line

_LARGEST = sys.float_info.max
_LARGEST_INT = 2**63 - 1
"""of a tensor"""


@runtime_checkable
class Kind(Protocol):
    """A kind of value: it annotates an argument, as in ``Annotated[int, NumberKind('[1, inf)')]``."""

    def check(self, value: Any, name: str) -> Any:
        """Return the value to use; raise ConfigError or DataError, beginning with ``name``, if it cannot be used."""


def kind_in(hint: Any) -> Kind | None:
    """Return the kind of an annotation, or of a member of a union."""
    return next(_kinds_in(hint), None)


def _kinds_in(hint: Any) -> Iterator[Kind]:
    yield from (kind for kind in getattr(hint, "__metadata__", ()) if isinstance(kind, Kind))
    for member in get_args(hint):
        yield from _kinds_in(member)


def check_value(value: Any, hint: Any, name: str, may_be_infinite: bool = False) -> Any:
    """Return a value to use, as its kind returns it; raise ConfigError, beginning with ``name``, if it is none.

    ``may_be_infinite``: whether an infinite number is valid where the annotation does not say it.

    >>> check_value("GeM", Literal["average", "gem"], "model.neck.pooling")
    Traceback (most recent call last):
    fedsim.core.errors.ConfigError: model.neck.pooling: GeM is not one of 'average', 'gem'
    """
    kind = kind_in(hint)
    if kind is not None and (value is not None or not _fits(None, hint)):
        return kind.check(value, name)
    if kind is None and (problem := problem_of(value, hint, may_be_infinite)):
        raise ConfigError(f"{name}: {problem}")
    return value


def problem_of(value: Any, hint: Any, may_be_infinite: bool = False) -> str:
    """Return why a value is none of an annotation; empty if it is one, or if the annotation does not decide.

    NumPy's numbers count as Python's, an int as a float, paths as texts, and lists and tuples as each other.

    >>> problem_of(1.5, int | None)
    'expected int or null, got 1.5'
    """
    if _fits(value, hint, may_be_infinite):
        return ""
    shown = one_line(f"{value}", 80) or "an empty text"
    if isinstance(value, float) and not abs(value) <= _LARGEST and _fits(0.0, hint):
        return f"{shown} is no finite number"
    if isinstance(value, int) and abs(value) > _LARGEST_INT and _fits(0, hint):
        return f"{shown} is no integer of 64 bits"
    plain = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    if get_origin(plain) is Literal:
        return f"{shown} is not one of {words_of(plain)}"
    return f"expected {words_of(plain)}, got {shown}"


def python_number(value: Any) -> Any:
    """Return Python's own number for one of NumPy's; other values as they are."""
    return value.item() if type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0 else value


def _fits(value: Any, hint: Any, may_be_infinite: bool = False) -> bool:
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        may_be_infinite |= any(getattr(facts, "may_be_infinite", False) for facts in inner[1:])
        return _fits(value, inner[0], may_be_infinite)
    if origin in (Union, UnionType):
        return any(_fits(value, member, may_be_infinite) for member in inner)
    value = python_number(value)
    if origin is Literal:
        return any(type(value) is type(word) and value == word for word in inner)
    if hint is None or hint is NoneType:
        return value is None
    if hint in (int, float):
        is_number = isinstance(value, Integral if hint is int else Real) and not isinstance(value, bool)
        largest = _LARGEST_INT if hint is int else _LARGEST
        return is_number and (abs(value) <= largest or (hint is float and may_be_infinite and value == value))
    if hint is str:
        return isinstance(value, str | os.PathLike)
    return _is_instance(value, origin or hint) and _fit_inside(value, origin, inner)


def _is_instance(value: Any, cls: Any) -> bool:
    if not isinstance(cls, type):
        return True  # which decides nothing
    if cls in (list, tuple):
        return isinstance(value, list | tuple)
    if issubclass(cls, Iterable) and not issubclass(cls, str | bytes) and isinstance(value, str | bytes):
        return False  # a text is no list of letters
    try:
        return isinstance(value, cls)
    except TypeError:  # Any, or a protocol
        return True


def _fit_inside(value: Any, origin: Any, inner: tuple[Any, ...]) -> bool:
    """Return whether the parts of a list, tuple or mapping fit; others are not looked into."""
    if isinstance(value, Mapping) and len(inner) == 2:
        return all(_fits(key, inner[0]) and _fits(part, inner[1]) for key, part in value.items())
    if not inner or not isinstance(value, list | tuple):
        return True
    if origin is tuple and Ellipsis not in inner:
        return len(value) == len(inner) and all(map(_fits, value, inner))
    return all(_fits(part, inner[0]) for part in value)


def words_of(hint: Any) -> str:
    """Return an annotation as the command line names it."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint is None or hint is NoneType:
        return "null"
    if origin is Annotated:
        return words_of(inner[0])
    if origin is Literal:
        return ", ".join(map(repr, inner))
    if origin in (Union, UnionType):
        first, last = ", ".join(map(words_of, inner[:-1])), words_of(inner[-1])
        return f"{first} or {last}"
    if origin in (Callable, type):
        return "a function" if origin is Callable else "a class"
    name = getattr(origin or hint, "__name__", str(hint))
    return name if origin is None else f"{name}[{', '.join(words_of(part) for part in inner if part is not Ellipsis)}]"


def check_arguments(cls: type, option: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Check the arguments of a constructor by its annotations; a default is not checked.

    ``option``: of the objects, for messages. Arguments that the constructor lacks are left to Python.

    Raises:
        ConfigError: naming the option of the first argument that cannot be used.
    """
    names, hints, defaults = _parameters_of(cls)
    is_users = cls.__module__.partition(".")[0] != "fedsim"  # what an infinite number means there, its author knows
    for name, value in [*zip(names, args, strict=False), *kwargs.items()]:
        if name in hints and value is not defaults.get(name, inspect.Parameter.empty):
            check_value(value, hints[name], f"{option}.{name}".lstrip("."), may_be_infinite=is_users)


@cache
def _parameters_of(cls: type) -> tuple[list[str], dict[str, Any], dict[str, Any]]:
    """Return the names of positional arguments, name -> annotation, and name -> default."""
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]  # type: ignore[misc] # of this class
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    hints = hints_of(cls, True) if hasattr(cls, "__dataclass_fields__") else {}
    for base in reversed(cls.__mro__):  # a constructor may pass others on
        if "__init__" in vars(base) and "__dataclass_fields__" not in vars(base):
            hints |= hints_of(vars(base)["__init__"], True)
    several = {p.name for p in parameters if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    return names, {n: hint for n, hint in hints.items() if n not in several}, {p.name: p.default for p in parameters}


def hints_of(described: Any, include_extras: bool = False) -> dict[str, Any]:
    """Return annotations; none of a class of the user's whose names cannot be found."""
    try:
        return get_type_hints(described, include_extras=include_extras)
    except (NameError, TypeError, AttributeError):
        return {}
