"""Settings with their values, and the effects that they have beside each other."""

from __future__ import annotations

from functools import cache
from types import CodeType
from typing import Any, NamedTuple

from fedsim.settings.facts import Effect, Group
from fedsim.settings.table import Setting, class_at, paths_below, sections, walk

STRONGER: dict[Effect, int] = {"nothing": 0, "rounding": 1, "seconds": 2, "results": 3}
"""how much an effect is"""
COUNTED: tuple[Effect, ...] = ("seconds", "results")
"""effects that make two experiments of two values"""


class SettingValue(NamedTuple):
    """A setting of a configuration."""

    value: Any
    """plain; of a class, and of a section, its name; of several classes, their names in order"""
    effect: Effect
    """on numbers, beside the other settings of the configuration"""
    group: Group
    setting: Setting
    is_given: bool = True
    """false: the configuration leaves it out, and it has its default"""
    is_null: bool = False
    """whether it is null, which stands for the value of another setting"""
    is_idle: bool = False
    """whether other settings take its effect away, or that of the section around it"""


Flat = dict[str, SettingValue]
"""option, such as ``model.client.optimizer.lr`` -> its value; a section or class before its fields"""


def with_effects(entries: Flat) -> Flat:
    """Return settings with the effects that they have beside each other."""
    effective: Flat = {}
    for option, entry in entries.items():
        facts, prefix = entry.setting.facts, option.rpartition(".")[0]
        is_null = entry.value is None and bool(facts.null_is)
        value = _null_of(facts.null_is, entries, prefix) if is_null else entry.value
        value = _spelled(value, facts.spelled_as, entries) if facts.spelled_as else value
        above = _above(option, effective)
        effect = entry.effect if not facts.needs or _holds(facts.needs, entries, prefix) else facts.otherwise
        is_idle = (above is not None and above.is_idle) or (effect == "nothing" and effect != entry.effect)
        if above is not None and STRONGER[above.effect] < STRONGER[effect]:
            effect = above.effect
        is_changed = is_null or is_idle or effect != entry.effect or value is not entry.value
        effective[option] = SettingValue(value, effect, *entry[2:5], is_null, is_idle) if is_changed else entry
    return effective


def _null_of(name: str, entries: Flat, prefix: str) -> Any:
    """Return the value that null stands for: that of a setting, if it is the same for all clients."""
    option = name if name.partition(".")[0] in sections() else f"{prefix}.{name}"
    return None if option not in entries or is_overridden(entries, option) else entries[option].value


def _spelled(value: Any, option: str, entries: Flat) -> Any:
    """Return a name, or a sorted list of names, in the one spelling that the classes of a setting give them."""
    if isinstance(value, list):
        return sorted(str(_spelled(name, option, entries)) for name in value)
    below = (entry.setting.facts.spellings for name, entry in entries.items() if name.startswith(f"{option}."))
    return next((spellings[value] for spellings in below if value in spellings), value)


def is_overridden(entries: Flat, option: str) -> bool:
    """Return whether a client has another value of a common setting."""
    common, _, name = option.rpartition(".")
    return any(
        of_client.startswith(prefix) and of_client.count(".", len(prefix)) == 1 and of_client.endswith(f".{name}")
        for prefix in _overriding(common)
        for of_client, entry in entries.items()
        if entry.value is not None
    )


@cache
def _overriding(common: str) -> tuple[str, ...]:
    """Return the mappings of clients whose fields replace those of a section, with a dot behind them."""
    return tuple(f"{option}." for option, setting in walk() if setting.facts.overrides == common)


def _above(option: str, entries: Flat) -> SettingValue | None:
    """Return the nearest section or class around a setting."""
    while option := option.rpartition(".")[0]:
        if option in entries:
            return entries[option]
    return None


@cache
def _compiled(needs: str) -> CodeType:
    return compile(needs, "needs", "eval")


def _holds(needs: str, entries: Flat, prefix: str) -> bool:
    """Return whether a condition holds, or cannot be decided. It is a text of the table, and can only read settings."""
    try:
        return bool(eval(_compiled(needs), {"__builtins__": {}}, _Names(entries, prefix)))
    except (AttributeError, TypeError):  # another class stands there, or a value of another type
        return True


class _Names(dict[str, Any]):
    """The names of a condition: settings of a section, and the sections of the configuration."""

    def __init__(self, entries: Flat, prefix: str) -> None:
        self._entries, self._prefix = entries, prefix

    def __missing__(self, name: str) -> Any:
        return _value_at(self._entries, f"{self._prefix}.{name}" if name not in sections() else name)


class _Below:
    """A section in a condition: true, and its fields are attributes."""

    def __init__(self, entries: Flat, option: str) -> None:
        self._entries, self._option = entries, option

    def __getattr__(self, name: str) -> Any:
        return _value_at(self._entries, f"{self._option}.{name}")


class _Chosen(str, _Below):
    """A class in a condition: its name, and its fields are attributes."""

    def __new__(cls, entries: Flat, option: str) -> Any:
        """Return the name."""
        return str.__new__(cls, entries[option].value)

    def __getattr__(self, name: str) -> Any:
        if name != "shares":
            return super().__getattr__(name)
        if (method := class_at(self)) is None:  # only its author knows
            raise AttributeError(name)
        return method.shares


def _value_at(entries: Flat, option: str) -> Any:
    """Return a value, an object for what has fields (section, class, settings by name), None for what is not there."""
    entry = entries.get(option)
    if entry is None:  # of a mapping of names, the fields alone are entered
        below = (entry.value for name, entry in entries.items() if name.startswith(f"{option}."))
        has_fields = option in sections() or any(value is not None for value in below)
        return _Below(entries, option) if has_fields else None
    if not isinstance(entry.value, str) or not entry.setting.base:
        return entry.value
    return _Below(entries, option) if is_section(entry.setting) else _Chosen(entries, option)


def is_section(setting: Setting) -> bool:
    """Return whether no class has to be chosen for a setting with fields."""
    return bool(setting.base) and len(paths_below(setting.base)) <= 1
