"""Checks of settings: each refuses a number with one line that names its field, and refuses NaN."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from operator import ge, gt, le, lt

from fedsim.core.errors import ConfigError

Number = float | int | None
"""None is a setting that was left out: it passes."""


def at_least(where: str, least: float, hint: str = "", **fields: Number) -> None:
    """Refuse values of ``fields`` below ``least``: raise ConfigError that names the first of them.

    ``where`` is the section of the config, such as ``model.client``; ``hint``, the remedy, is added to the message.

    >>> at_least("model.client", 1, local_epochs=2, local_steps=None)
    >>> at_least("model.client", 1, local_epochs=0)
    Traceback (most recent call last):
    fedsim.core.errors.ConfigError: model.client.local_epochs: 0 is less than 1
    """
    _refuse(where, fields, lambda value: value >= least, f"is less than {least}{hint}")


def positive(where: str, hint: str = "", **fields: Number) -> None:
    """Refuse values of 0 and below; see :func:`at_least`."""
    _refuse(where, fields, lambda value: value > 0, f"is not positive{hint}")


def not_negative(where: str, hint: str = "", **fields: Number) -> None:
    """Refuse values below 0; see :func:`at_least`."""
    _refuse(where, fields, lambda value: value >= 0, f"is negative{hint}")


def within(where: str, interval: str, **fields: Number) -> None:
    """Refuse values outside an interval in mathematical notation: a round bracket excludes its end.

    See :func:`at_least` for the other arguments.

    >>> within("model.selection", "(0, 1]", fraction=1.0)
    >>> within("model.selection", "(0, 1]", fraction=0.0)
    Traceback (most recent call last):
    fedsim.core.errors.ConfigError: model.selection.fraction: 0.0 is not in (0, 1]
    """
    low, high = map(float, interval[1:-1].split(","))
    above, below = (ge if interval[0] == "[" else gt), (le if interval[-1] == "]" else lt)
    _refuse(where, fields, lambda value: above(value, low) and below(value, high), f"is not in {interval}")


def _refuse(where: str, fields: Mapping[str, Number], passes: Callable[[float], bool], why: str) -> None:
    for name, value in fields.items():
        if value is not None and not passes(value):
            raise ConfigError(f"{where}.{name}: {value} {why}")


def known(where: str, names: Iterable[str], among: Collection[str], kind: str = "client") -> None:
    """Refuse unknown names, and list the known ones.

    >>> known("model.clients", ["town9"], ["town0", "town1"])
    Traceback (most recent call last):
    fedsim.core.errors.ConfigError: model.clients: there is no client town9; choose from town0, town1
    """
    for name in names:
        if name not in among:
            raise ConfigError(f"{where}: there is no {kind} {name}; choose from {', '.join(among)}")
