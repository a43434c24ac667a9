"""Check options of classes, such as ``model.method.mu``, before a sweep starts: refuse those that a class lacks.

``fit`` refuses them too, but only after it has imported the classes. Here their source is read. An option is not
checked if its class cannot be determined.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

from fedsim.core.errors import ConfigError, DataError
from fedsim.papers.files import with_paper
from fedsim.parsing.class_arguments import arguments_of_class, class_in
from fedsim.parsing.class_names import did_you_mean
from fedsim.parsing.config_files import read_config, with_shipped
from fedsim.parsing.documents import parse_yaml
from fedsim.parsing.listing import classes_of

_SECTIONS = {"model": "Settings", "data": "FederatedDataModule"}
_WITHIN = ("init_args", "dict_kwargs")
"""Parts of a setting's name that may come between a class and its arguments."""

Classes = dict[str, str]
"""Setting -> the class that it names, or another text; empty for other values."""


def check_deep_names(words: Sequence[str]) -> None:
    """Refuse options that their class does not have.

    The order of words matters, as for the parser: an option belongs to the class that was named last before it.

    Args:
        words: the command line of ``fedsim fit``, without the command.

    Raises:
        ConfigError: if a class has no such option, or ``--paper`` names no row.
    """
    classes: Classes = {}
    for name, value in _settings(with_shipped(with_paper(words))):
        if name == "config":
            try:
                _note(classes, _content(value))
            except DataError:  # the file may exist when the run starts
                return
        elif name.partition(".")[0] in _SECTIONS:
            _check(name, classes)
            _note(classes, _read(value), name.removesuffix(".class_path"))


def _settings(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield name and value of each option; the value is empty if there is none."""
    for position, word in enumerate(words):
        name, is_joined, value = word.partition("=")
        next_word = words[position + 1] if position + 1 < len(words) else ""
        if not is_joined:
            value = "" if next_word.startswith("--") else next_word
        if name.startswith("--") or name == "-c":
            yield "config" if name == "-c" else name[2:].removesuffix("+"), value


@cache
def _content(path: str) -> dict[str, Any]:
    return read_config(path)  # the same files for each run of the sweep


def _read(value: str) -> Any:
    """Return a value as the parser reads it; invalid YAML stays a text."""
    with suppress(DataError):
        return parse_yaml(value, "a value")[0]
    return value


def _note(classes: Classes, content: Any, setting: str = "") -> None:
    """Record the classes that a setting and the settings below it name."""
    if isinstance(content, Mapping):
        if "class_path" in content:
            classes[setting] = str(content["class_path"])
        for name, inner in content.items():
            _note(classes, inner, setting if name in _WITHIN else f"{setting}.{name}".lstrip("."))
    elif not setting.endswith(".class_path"):
        classes[setting] = content if isinstance(content, str) else ""


def _check(option: str, classes: Classes) -> None:
    """Follow an option's name from class to class; stop at a class whose arguments are unknown."""
    section, *parts = option.split(".")
    cls, path = classes.get(section) or _SECTIONS[section], section
    for part in (part for part in parts if part not in _WITHIN):
        arguments = arguments_of_class(cls)
        if arguments is None or part in ("class_path", "help"):
            return
        if part not in arguments:
            guess = did_you_mean(part, arguments)
            problem = f"{path}: {cls.rpartition('.')[2]} has no option {part}"
            remedy = guess or f"choose from {', '.join(arguments) or 'none'}"
            raise ConfigError(f"{problem}; {remedy}")
        path = f"{path}.{part}"
        cls = classes.get(path) or _only_class(class_in(arguments[part].annotation))


def _only_class(name: str | None) -> str:
    """Return ``name`` if no other class is derived from it; otherwise an empty text."""
    return name if name and not classes_of(name) else ""
