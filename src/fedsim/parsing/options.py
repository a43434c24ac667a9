"""The options of the commands that train or score, checked by the table of settings: typos need no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from fedsim.core.errors import ConfigError
from fedsim.core.names import did_you_mean
from fedsim.parsing.command_line import Given
from fedsim.settings.table import (
    MISSING,
    KnownClass,
    Setting,
    class_at,
    classes_below,
    paths_below,
    section,
    sections,
    setting_at,
)

_OPTION = re.compile(r"--(?:no_)?(\w+(?:\.[\w.]+)?)(?=$|[=+])")


def own_options(command: str) -> dict[str, Setting]:
    """Return the options of a command outside of all sections."""
    return {
        name: setting
        for name, setting in section("").arguments.items()
        if command in (setting.facts.commands or (command,)) or setting.default is not MISSING
    }


def all_options(command: str) -> dict[str, Setting]:
    """Return a command's options; of sections only the first level."""
    inner = {f"{name}.{field}": setting for name in sections() for field, setting in section(name).arguments.items()}
    return own_options(command) | inner


def asks_for_help(words: Sequence[str]) -> bool:
    """Return whether a command line requests the help of the command or of a class.

    >>> asks_for_help(["-h"]), asks_for_help(["--model.method.help=FedProx"]), asks_for_help(["--config=help"])
    (True, True, False)
    """
    return any(word in ("-h", "--help") or word.partition("=")[0].endswith(".help") for word in words)


def check_options(words: Sequence[str], command: str) -> None:
    """Check the first two parts of each option such as ``--trainer.max_epochs``.

    Args:
        words: of the command line, without the command.
        command: its name, of those with a trainer.

    Raises:
        ConfigError: if there is no such option.
    """
    for name in (match[1] for word in words if (match := _OPTION.match(word))):
        first, *parts = name.split(".")
        if first in sections():
            _check([first, *parts[:1]], {}, command)
        elif first not in (options := own_options(command)):
            raise _no_option("", first, [*options, *sections()], command)


def check_arguments(settings: Iterable[Given], command: str) -> None:
    """Check the whole name of each option, from class to class; that of a class that is not fedsim's is not checked.

    The order matters, as for the parser: an option belongs to the class that was named last before it.

    Raises:
        ConfigError: if a class has no such argument.
    """
    classes: dict[str, str] = {}
    """setting -> the class that it names, or another text; empty for other values"""
    for option, value, is_option in settings:
        if is_option and option.partition(".")[0] in sections():
            _check(option.split("."), classes, command)
        if not isinstance(value, dict):
            classes[option] = value if isinstance(value, str) else ""


def _check(parts: Sequence[str], classes: dict[str, str], command: str) -> None:
    cls: KnownClass | None = section(parts[0])
    place = parts[0]
    for part in parts[1:]:
        if cls is None or part in ("class_path", "help") or (cls.takes_others and part not in cls.arguments):
            return
        if part not in cls.arguments:
            raise _lacking(place, part, cls, command, is_chosen=bool(classes.get(place)))
        setting, place = cls.arguments[part], f"{place}.{part}"
        if setting.form == "names":  # below it are names of clients
            return
        cls = class_at(classes.get(place) or _only_class(setting.base))


def _only_class(base: str) -> str:
    """Return ``base`` if no other class is derived from it; otherwise an empty text."""
    return base if paths_below(base) == (base,) else ""


def _lacking(place: str, part: str, cls: KnownClass, command: str, is_chosen: bool) -> ConfigError:
    """Error for an option that the class at a place lacks; ``is_chosen``: another class could stand there."""
    if is_chosen:
        remedy = did_you_mean(part, cls.arguments) or f"choose from {', '.join(cls.arguments) or 'none'}"
        return ConfigError(f"{place}: {cls.name} has no option {part}; {remedy}")
    return _no_option(f"{place}.", part, cls.arguments, command)


def _no_option(prefix: str, name: str, names: Iterable[str], command: str) -> ConfigError:
    """Error for a name that is not one of those after ``prefix``, but maybe an argument of a class that one takes."""
    remedy = f"fedsim {command} --help lists all options"
    guess = did_you_mean(name, names, prefix=f"--{prefix}")
    if prefix and not guess:
        bases = ((field, setting_at(f"{prefix}{field}").base) for field in names)
        within = (field for field, base in bases if base and any(name in cls.arguments for cls in classes_below(base)))
        guess = next((f"did you mean --{prefix}{field}.{name}?" for field in within), "")
    return ConfigError(f"--{prefix}{name}: there is no such option; {guess} {remedy}".replace("  ", " "))
