"""Functions whose arguments are checked by their annotations: one check for each kind of value."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar, get_type_hints

from fedsim.core.annotations import Kind, check_value, kind_in
from fedsim.core.errors import ConfigError, DataError
from fedsim.core.names import check_filled
from fedsim.core.paths import PathKind

P = ParamSpec("P")
R = TypeVar("R")


def checked(prefix: str = "", positional: str = "") -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let a function check its arguments by their kinds and types; an output never replaces an input.

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
        signature, plain = inspect.signature(function), get_type_hints(function)
        words = {name: name if name == positional else f"{prefix}{name}" for name in signature.parameters}
        hints, kinds = get_type_hints(function, include_extras=True), kinds_of(function)
        several = {p.name for p in signature.parameters.values() if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
        # no disk is read for a typo
        in_order = sorted(hints.keys() - several - {"return"}, key=lambda name: isinstance(kinds.get(name), PathKind))

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            values = bound.arguments
            for name, value in values.items():
                if name not in kinds or not isinstance(kinds[name], PathKind):  # which has a remedy of its own
                    check_filled(value, words[name])
            for name in in_order:
                values[name] = check_value(values[name], hints[name], words[name])
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
    return {name: kind for name, hint in hints if (kind := kind_in(hint)) is not None}


def _check_outputs(values: Mapping[str, Any], kinds: Mapping[str, Kind], words: Mapping[str, str]) -> None:
    """Refuse a file to write that is also another argument."""
    files: dict[str, str] = {}
    of_paths = {name: kind for name, kind in kinds.items() if isinstance(kind, PathKind) and values[name] is not None}
    for name, kind in sorted(of_paths.items(), key=lambda item: item[1].is_written):
        for path in values[name] if isinstance(values[name], list) else [values[name]]:
            first_name = files.setdefault(os.path.realpath(path), name)
            if kind.is_written and first_name != name:
                raise ConfigError(f"{words[name]}: {path} is the file of {words[first_name]}, too; name another")
