"""Checks of settings: each refuses a number with one line that names the field; NaN is always refused."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from operator import ge, gt, le, lt
from typing import Annotated, Any

from fedsim.core.annotations import problem_of, python_number
from fedsim.core.errors import ConfigError

Number = float | int | None
"""None: the setting was left out, which every check accepts."""


def at_least(section: str, least: float, hint: str = "", **fields: Number) -> None:
    """Refuse values of ``fields`` below ``least``: raise ConfigError that names the first of them.

    ``section`` is a section of the config, such as ``model.client``; ``hint``, the remedy, is added to the message.

    >>> at_least("model.client", 1, local_epochs=2, local_steps=None)
    >>> at_least("model.client", 1, local_epochs=0)
    Traceback (most recent call last):
    fedsim.core.errors.ConfigError: model.client.local_epochs: 0 is less than 1
    """
    _refuse(section, fields, lambda value: value >= least, f"is less than {least}{hint}")


def positive(section: str, hint: str = "", **fields: Number) -> None:
    """Refuse values of 0 and below; see :func:`at_least`."""
    _refuse(section, fields, lambda value: value > 0, f"is not positive{hint}")


def not_negative(section: str, hint: str = "", **fields: Number) -> None:
    """Refuse values below 0; see :func:`at_least`."""
    _refuse(section, fields, lambda value: value >= 0, f"is negative{hint}")


def within(section: str, interval: str, hint: str = "", **fields: Number) -> None:
    """Refuse values outside an interval in mathematical notation: a round bracket excludes its end.

    See :func:`at_least` for the other arguments.

    >>> within("model.selection", "(0, 1]", fraction=1.0)
    >>> within("model.selection", "(0, 1]", fraction=0.0)
    Traceback (most recent call last):
    fedsim.core.errors.ConfigError: model.selection.fraction: 0.0 is not in (0, 1]
    """
    _refuse(section, fields, _inside(interval), f"is not in {interval}{hint}")


def _inside(interval: str) -> Callable[[float], bool]:
    low, high = map(float, interval[1:-1].split(","))
    above, below = (ge if interval[0] == "[" else gt), (le if interval[-1] == "]" else lt)
    return lambda value: above(value, low) and below(value, high)


def _refuse(section: str, fields: Mapping[str, Number], passes: Callable[[float], bool], problem: str) -> None:
    for name, value in fields.items():
        if value is not None and not passes(value):
            raise ConfigError(f"{section}.{name}: {value} {problem}")


def known(field: str, names: Iterable[str], among: Collection[str], noun: str = "client") -> None:
    """Refuse unknown ``names`` in a field: raise ConfigError, which lists the names to choose from.

    >>> known("model.clients", ["town9"], ["town0", "town1"])
    Traceback (most recent call last):
    fedsim.core.errors.ConfigError: model.clients: there is no client town9; choose from town0, town1
    """
    for name in names:
        if name not in among:
            raise ConfigError(f"{field}: there is no {noun} {name}; choose from {', '.join(among)}")


@dataclass(frozen=True)
class NumberKind:
    """A kind of number by its interval; it annotates arguments of :func:`fedsim.core.checked.checked`."""

    interval: str
    """as in :func:`within`; infinite numbers are never valid"""
    number_class: type[int] | type[float] = int
    """class of the number"""

    def check(self, value: Any, name: str) -> Any:
        """Return the number; raise ConfigError, beginning with ``name``, if it is none of the interval.

        >>> NumberKind("[1, inf)").check(3, "workers")
        3
        """
        value = python_number(value)
        if problem_of(value, self.number_class):
            noun = "integer" if self.number_class is int else "finite number"
            raise ConfigError(f"{name}: {value} is no {noun}{' of 64 bits' if type(value) is int else ''}")
        if not _inside(self.interval)(value):
            in_words = {"[1, inf)": "is less than 1", "[0, inf)": "is negative", "(0, inf)": "is not positive"}
            raise ConfigError(f"{name}: {value} {in_words.get(self.interval, f'is not in {self.interval}')}")
        return value


MAX_SIDE = 100_000
"""most pixels of a height or width; more are a mistake"""


@dataclass(frozen=True)
class SizeKind:
    """A height and a width in pixels; it annotates arguments of :func:`fedsim.core.checked.checked`."""

    def check(self, value: Any, name: str) -> Any:
        """Return the pair; raise ConfigError, beginning with ``name``, if it is none.

        >>> SizeKind().check((256, 128), "data.size")
        (256, 128)
        """
        if problem_of(value, tuple[int, int]) or not 1 <= min(value) <= max(value) <= MAX_SIDE:
            shown = list(value) if value and isinstance(value, tuple) else value
            raise ConfigError(f"{name}: {shown} is not a height and a width in pixels")
        return value


Count = Annotated[int, NumberKind("[1, inf)")]
Natural = Annotated[int, NumberKind("[0, inf)")]
SEED = NumberKind(f"[0, {2**32 - 1}]")
Seed = Annotated[int, SEED]
SIZE = SizeKind()
Pixels = Annotated[tuple[int, int], SIZE]
THREADS = NumberKind("[1, 1024]")
"""more let torch fail by a message of a page, or end the process"""
Threads = Annotated[int, THREADS]
Weight = Annotated[float, NumberKind("[0, inf)", float)]
Part = Annotated[float, NumberKind("(0, 1]", float)]
Share = Annotated[float, NumberKind("[0, 1]", float)]
