"""The options of the commands that train or score, checked by the table of settings: typos need no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from fedsim.core.errors import ConfigError, DataError
from fedsim.core.names import did_you_mean
from fedsim.parsing.command_line import Given, given, options_in
from fedsim.settings.gone import line_of_gone
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
    walk,
)

_OPTION = re.compile(r"--(?:no_)?(\w+(?:\.[\w.]+)?)(?=$|[=+])")
_IN_BASE_60 = re.compile(r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?")
"""what YAML 1.1 takes for a number: 1:30 is 90"""


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
            _check([first, *parts[:1]], {}, command, "--")
        elif first not in (options := own_options(command)):
            raise _no_option("--", first, [*options, *sections()], command)


def check_configs(words: Sequence[str]) -> None:
    """Check the settings in the configs of a command without a trainer, as a fit checks them; raise ConfigError."""
    configs = [f"--config={value_text}" for name, value_text in options_in(words) if name == "config"]
    with suppress(DataError):  # the command names a file that it cannot read
        check_arguments(given(configs), "fit")


def check_arguments(settings: Iterable[Given], command: str) -> None:
    """Check the whole name of each setting, from class to class; that of a class that is not fedsim's is not checked.

    The order matters, as for the parser: a setting belongs to the class that was named last before it.

    Raises:
        ConfigError: if a class has no such argument.
    """
    classes: dict[str, str] = {}
    """setting -> the class that it names, or another text; empty for other values"""
    for name, value, is_option, file in settings:
        option = name.replace("+", "")  # of a config that adds to a list
        first = option.partition(".")[0]
        if _holds_number(setting_at(option, classes), first) and isinstance(value, str):
            refuse_base_60(value, f"{f'{file}: ' * bool(file)}{option}")
        if first in sections():
            _check(option.split("."), classes, command, "--" if is_option else f"{file}: " if file else "")
        elif file and first not in (*section("").arguments, ""):
            raise _no_option(f"{file}: ", first, [*own_options(command), *sections()], command)
        if not isinstance(value, dict):
            classes[option] = value if isinstance(value, str) else ""


def refuse_base_60(value_text: str, option: str) -> None:
    """Refuse a text such as 1:30 where a number is expected: YAML takes it for 90."""
    if _IN_BASE_60.fullmatch(value_text):
        raise ConfigError(f"{option}: {value_text} is not a number; write it without colons")


def _holds_number(setting: Setting, first: str) -> bool:
    """Return whether a setting holds a number; of the trainer's, some that are null hold a duration."""
    may_hold = setting.default is None and not setting.form and not setting.base and first != "trainer"
    return isinstance(setting.default, int | float) or may_hold


def kept_arguments(settings: Iterable[Given]) -> list[str]:
    """Return a line for each argument of a replaced class that the parser gives to the class in its place.

    Rows of papers, whose settings are neither options nor in a file, name their classes on purpose.
    """
    classes, owners, by_user = dict[str, str](), dict[str, tuple[str, Any]](), dict[str, bool]()
    for option, value, is_option, file in settings:
        if isinstance(value, str):
            classes[option], by_user[option] = value, is_option or file != ""
        if not isinstance(value, dict) and (owner := classes.get(option.rpartition(".")[0])):
            owners[option] = owner, value
    lines = []
    for option, (owner, value) in owners.items():
        prefix, _, name = option.rpartition(".")
        cls, before = class_at(classes[prefix]), class_at(owner)
        is_one = by_user[prefix] and setting_at(prefix).form != "classes"
        if is_one and cls is not None and before is not None and cls.path != before.path and name in cls.arguments:
            lines.append(f"{option}: {cls.name} keeps {value}, which was given for {before.name}")
    return lines


def _check(parts: Sequence[str], classes: dict[str, str], command: str, mark: str) -> None:
    """Check a setting of a section; ``mark``: what precedes its name in messages, ``--`` or the config."""
    cls: KnownClass | None = section(parts[0])
    prefix = parts[0]
    for part in parts[1:]:
        if cls is None or part in ("class_path", "help") or (cls.takes_others and part not in cls.arguments):
            return
        if part not in cls.arguments:
            if gone := line_of_gone(part):
                raise ConfigError(f"{mark}{prefix}: {gone}")
            if not classes.get(prefix):
                raise _no_option(f"{mark}{prefix}.", part, cls.arguments, command)
            choices = f"choose from {', '.join(cls.arguments) or 'none'}"
            remedy = did_you_mean(part, [*cls.arguments, "class_path"]) or choices
            raise ConfigError(f"{mark.strip('-')}{prefix}: {cls.name} has no option {part}; {remedy}")
        setting, prefix = cls.arguments[part], f"{prefix}.{part}"
        if setting.form == "names":  # below it are names of clients
            return
        cls = class_at(classes.get(prefix) or (setting.base if paths_below(setting.base) == (setting.base,) else ""))


def where_all(command: str) -> str:
    """Return the sentence that ends a message about an option."""
    return f"fedsim {command} --help all lists all options"


def _no_option(before: str, name: str, names: Iterable[str], command: str) -> ConfigError:
    """Error for a name that is not one of those allowed after ``before``: a mark (``--``, or a file) and a section."""
    sign = "--" if before.startswith("--") else ""
    prefix = before.removeprefix(sign).rpartition(": ")[2]
    meant = _meant(name, prefix, command)
    guess = f"did you mean {' or '.join(f'{sign}{option}' for option in meant)}?" if meant else ""
    guess = guess or did_you_mean(name, names, prefix=f"{sign}{prefix}")
    return ConfigError(f"{before}{name}: there is no such option; {guess} {where_all(command)}".replace("  ", " "))


def _meant(name: str, prefix: str, command: str) -> list[str]:
    """Return the options for which users take a name: all with this synonym, else one that is so called.

    Those below a place come before others, and there those of any config before those of some classes.
    """
    allowed = own_options(command)
    options = [(o, s) for o, s in walk() if ("." in o or o in allowed) and not o.startswith("model.clients.")]
    places = [[(o, s) for o, s in options if o.startswith(prefix)], options]
    for place in places:
        if synonyms := [option for option, setting in place if name in setting.facts.synonyms]:
            return synonyms
    for place in places:
        if called := [pair for o, s in place for pair in _called(name, o, s)]:
            option, owner = min(called, key=lambda pair: pair[1] != "")
            return [option + owner]
    return []


def _called(name: str, option: str, setting: Setting) -> Iterator[tuple[str, str]]:
    """Yield an option so called, or that of an argument of a class that it takes; and a class, if most lack it."""
    if option.rpartition(".")[2] == name:
        yield option, ""
    classes = [cls for cls in classes_below(setting.base) if cls.path != setting.base] if setting.base else []
    default = setting.default.get("class_path") if isinstance(setting.default, dict) else None
    owners: dict[str, list[KnownClass]] = {}
    for cls in classes:
        for argument, its_setting in cls.arguments.items():
            if name in (argument, *its_setting.facts.synonyms):
                owners.setdefault(argument, []).append(cls)
    for argument, having in owners.items():
        is_usual = 2 * len(having) > len(classes) or default in [cls.path for cls in having]
        yield f"{option}.{argument}", "" if is_usual else f" of {having[0].name}"
