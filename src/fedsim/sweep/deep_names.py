"""Options of a draw below its classes, such as ``model.method.mu``: those that a class lacks are refused before a draw.

``fit`` refuses them, too, but only once it has imported the classes. Here their source is read. Where it is not known
which class is meant, nothing is said.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import yaml

from fedsim.core.errors import ConfigError, DataError
from fedsim.papers.files import with_paper
from fedsim.parsing.class_arguments import arguments_of_class, class_in
from fedsim.parsing.class_names import did_you_mean
from fedsim.parsing.config_files import SafeLoader, read_config, with_shipped
from fedsim.parsing.listing import classes_of

_SECTIONS = {"model": "Settings", "data": "FederatedDataModule"}
_WITHIN = ("init_args", "dict_kwargs")
"""Parts of a setting's name that a config may have between a class and its arguments."""

Classes = dict[str, str]
"""Setting -> the class that it names, or another text; empty where it names none."""


def check_deep_names(words: Sequence[str]) -> None:
    """Refuse options that the class above them lacks.

    Words count in their order, as for the parser: an option is one of the class that was named last before it.

    Args:
        words: of ``fedsim fit``, without the command.

    Raises:
        ConfigError: if a class has no such option, or there is no row ``--paper``.
    """
    classes: Classes = {}
    for name, value in _settings(with_shipped(with_paper(words))):
        if name == "config":
            try:
                _note(classes, _content(value))
            except DataError:  # it may be there when the draw starts
                return
        elif name.partition(".")[0] in _SECTIONS:
            _check(name, classes)
            _note(classes, _read(value), name.removesuffix(".class_path"))


def _settings(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield name and value of each option; of one without a value it is empty."""
    for position, word in enumerate(words):
        name, is_joined, value = word.partition("=")
        following = words[position + 1] if position + 1 < len(words) else ""
        if not is_joined:
            value = "" if following.startswith("--") else following
        if name.startswith("--") or name == "-c":
            yield "config" if name == "-c" else name[2:].removesuffix("+"), value


@cache
def _content(path: str) -> dict[str, Any]:
    return read_config(path)  # of each draw the same ones


def _read(value: str) -> Any:
    """Return what the parser makes of a value; a text that it does not read either is one."""
    with suppress(yaml.YAMLError):
        return yaml.load(value, SafeLoader)
    return value


def _note(classes: Classes, content: Any, setting: str = "") -> None:
    """Note the classes that a setting and those below it name."""
    if isinstance(content, Mapping):
        if "class_path" in content:
            classes[setting] = str(content["class_path"])
        for name, inner in content.items():
            _note(classes, inner, setting if name in _WITHIN else f"{setting}.{name}".lstrip("."))
    elif not setting.endswith(".class_path"):
        classes[setting] = content if isinstance(content, str) else ""


def _check(option: str, classes: Classes) -> None:
    """Follow an option's name from class to class; end where one is not known."""
    section, *parts = option.split(".")
    cls, path = classes.get(section) or _SECTIONS[section], section
    for part in (part for part in parts if part not in _WITHIN):
        arguments = arguments_of_class(cls)
        if arguments is None or part in ("class_path", "help"):
            return
        if part not in arguments:
            guess = did_you_mean(part, arguments)
            said = f"{path}: {cls.rpartition('.')[2]} has no option {part}"
            raise ConfigError(f"{said}; {guess}" if guess else f"{said}; choose from {', '.join(arguments) or 'none'}")
        path = f"{path}.{part}"
        cls = classes.get(path) or _only_class(class_in(arguments[part].annotation))


def _only_class(name: str | None) -> str:
    """Return the class of a setting that can be of no other; empty where it can."""
    return name if name and not classes_of(name) else ""
