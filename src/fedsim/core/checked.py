"""Functions whose annotated arguments are checked by their kinds: one check for each kind of value."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ParamSpec, Protocol, TypeVar, get_args, get_type_hints, runtime_checkable

from fedsim.core.errors import ConfigError, DataError
from fedsim.core.names import check_filled
from fedsim.core.paths import PathKind

P = ParamSpec("P")
R = TypeVar("R")


@runtime_checkable
class Kind(Protocol):
    """A kind of value: it annotates an argument, as in ``Annotated[int, NumberKind('[1, inf)')]``."""

    def check(self, value: Any, name: str) -> Any:
        """Return the value to use; raise ConfigError or DataError, beginning with ``name``, if it cannot be used."""


def checked(prefix: str = "", positional: str = "") -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let a function check those of its arguments that have a kind; an output never replaces an input.

    No text may be empty. None is not checked where the argument may be None.

    Args:
        prefix: before an argument's name in messages, also in those of the function: hyphens for an option.
        positional: the argument that is no option.

    >>> from fedsim.core.checks import Count
    >>> @checked("--")
    ... def images(batch_size: Count = 64) -> int:
    ...     return batch_size
    >>> images(batch_size=0)
    Traceback (most recent call last):
    fedsim.core.errors.ConfigError: --batch_size: 0 is less than 1
    """

    def with_checks(function: Callable[P, R]) -> Callable[P, R]:
        signature, kinds, plain = inspect.signature(function), kinds_of(function), get_type_hints(function)
        words = {name: name if name == positional else f"{prefix}{name}" for name in signature.parameters}
        optional = {name for name, hint in plain.items() if type(None) in get_args(hint)}

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            values = bound.arguments
            for name, value in values.items():
                if name not in kinds or not isinstance(kinds[name], PathKind):  # which has a remedy of its own
                    check_filled(value, words[name])
            for name, kind in kinds.items():
                if values[name] is not None or name not in optional:
                    values[name] = kind.check(values[name], words[name])
            _check_outputs(values, kinds, words)
            with _naming(words):
                return function(*bound.args, **bound.kwargs)

        parameters = [p.replace(annotation=plain.get(name, p.annotation)) for name, p in signature.parameters.items()]
        call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined] # for the parser
        return call

    return with_checks


@contextmanager
def _naming(words: Mapping[str, str]) -> Iterator[None]:
    """Let errors that begin with an argument's name begin with its word: functions below know no options."""
    try:
        yield
    except (ConfigError, DataError) as error:
        name = str(error).partition(":")[0]
        if words.get(name, name) == name:
            raise
        raise type(error)(str(error).replace(name, words[name], 1)) from error


def kinds_of(function: Callable[..., Any]) -> dict[str, Kind]:
    """Return argument -> its kind, of those that have one."""
    hints = get_type_hints(function, include_extras=True).items()
    kinds = {name: kind for name, hint in hints if (kind := next(_kinds_in(hint), None)) is not None}
    return dict(sorted(kinds.items(), key=lambda item: isinstance(item[1], PathKind)))  # no disk is read for a typo


def _kinds_in(hint: Any) -> Iterator[Kind]:
    """Yield the kinds of a type, or of a member of a union."""
    yield from (kind for kind in getattr(hint, "__metadata__", ()) if isinstance(kind, Kind))
    for member in get_args(hint):
        yield from _kinds_in(member)


def _check_outputs(values: Mapping[str, Any], kinds: Mapping[str, Kind], words: Mapping[str, str]) -> None:
    """Refuse a file to write that is also another argument."""
    files: dict[str, str] = {}
    of_paths = {name: kind for name, kind in kinds.items() if isinstance(kind, PathKind) and values[name] is not None}
    for name, kind in sorted(of_paths.items(), key=lambda item: item[1].is_written):
        for path in values[name] if isinstance(values[name], list) else [values[name]]:
            first_name = files.setdefault(os.path.realpath(path), name)
            if kind.is_written and first_name != name:
                raise ConfigError(f"{words[name]}: {path} is the file of {words[first_name]}, too; name another")
