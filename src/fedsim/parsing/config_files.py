"""Config files and arguments before they reach the parser."""

from __future__ import annotations

import ast
import json
import os
import re
from argparse import ArgumentParser
from collections.abc import Sequence
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from fedsim.core.errors import DataError
from fedsim.core.names import one_line
from fedsim.core.paths import FILE, expanded
from fedsim.parsing.documents import as_yaml, parse_json, parse_yaml, read_text
from fedsim.parsing.typed_names import with_quotes
from fedsim.settings.gone import GONE
from fedsim.settings.options import WITH_TRAINER
from fedsim.settings.table import has_fields, sections, walk

_CONFIGS = Path(__file__).parents[1] / "configs"


def shipped_configs() -> dict[str, Path]:
    """Return name -> path of the configs that come with fedsim, such as ``quickstart`` and ``methods/fedavg``."""
    paths = sorted(_CONFIGS.rglob("*.yaml"))
    return {path.relative_to(_CONFIGS).with_suffix("").as_posix(): path for path in paths}


def with_shipped(args: Sequence[str]) -> list[str]:
    """Replace names of configs that come with fedsim after ``--config`` by their paths.

    A name may have the folder ``configs`` and a suffix. A file of the working directory takes precedence.

    >>> [Path(word).name for word in with_shipped(["--config", "none.yaml", "-c", "methods/fedavg"])]
    ['--config', 'none.yaml', '-c', 'fedavg.yaml']
    """
    words = list(args)
    for position, word in enumerate(words):
        option, is_joined, path = word.partition("=")
        if option not in ("--config", "-c"):
            continue
        if is_joined:
            words[position] = f"{option}={_file_of(path)}"
        elif position + 1 < len(words):
            words[position + 1] = _file_of(words[position + 1])
    return words


def _file_of(config: str) -> str:
    if config.startswith("{") or (os.path.exists(config := expanded(config, "--config")) and not os.path.isdir(config)):
        return config
    return str(shipped_configs().get(config.removeprefix("configs/").removesuffix(".yaml"), config))


def read_config(path: str) -> dict[str, Any]:
    """Return the content of a config file, or of the JSON text that replaces ``--paper``.

    Raises:
        DataError: if the file cannot be read, or is not a config.
    """
    if path.startswith("{"):
        try:
            return dict(without_gone(parse_json(with_quotes(path), "--config")))
        except DataError as error:
            if not isinstance(error.__cause__, json.JSONDecodeError):
                raise
            text = one_line(path, 80)
            raise DataError(f"--config: {text} is not a file; write settings into a file, or as options") from error
    path, remedy = _file_of(path), "does the file exist?"
    if os.path.exists(path):
        FILE.check(path, "a config")
    elif close := get_close_matches(path.removeprefix("configs/").removesuffix(".yaml"), shipped_configs(), n=1):
        remedy = f"did you mean {close[0]}, which comes with fedsim?"
    content = parse_yaml(with_quotes(read_text(Path(path), "this config", remedy)), path)
    if not isinstance(content, dict):
        raise DataError(f"{path}: is not a config; expected sections such as trainer, model, data")
    if nested := [key for key in WITH_TRAINER if isinstance(content.get(key), dict)]:
        raise DataError(f"{path}: {nested[0]}: is a command, not a section; write its sections at the top of the file")
    _check_classes(path, content)
    return dict(without_gone(content))


def without_gone(content: Any) -> Any:
    """Return the content of a config without settings that each config of an earlier version has: see :data:`GONE`.

    >>> without_gone({"model": {"client": {"flat_step": "auto", "local_epochs": 1}}})
    {'model': {'client': {'local_epochs': 1}}}
    """
    for name, setting in GONE.items():
        section = content
        for part in setting.place.split("."):
            section = section.get(part) if isinstance(section, dict) else None
        if isinstance(section, dict) and setting.value in (None, section.get(name)):
            section.pop(name, None)
    return content


def read_sections(path: str) -> dict[str, Any]:
    """Return the content of a config of a run, as :func:`read_config`.

    Raises:
        DataError: also if a section has no fields: the parser would use the defaults of all of them for some values.
    """
    content = read_config(path)
    for section in _sections() if not path.startswith("{") else ():
        _check_section(path, content, section)
    return content


@cache
def _sections() -> list[str]:
    """Return the settings that always have fields below them."""
    return [*sections(), *(option for option, setting in walk() if has_fields(setting))]


def _check_classes(path: str, value: Any, field: str = "") -> None:
    """Check that each ``class_path`` is a string and ``init_args`` a mapping; the parser looks the class up."""
    for inner in value if isinstance(value, list) else ():
        _check_classes(path, inner, field)
    if not isinstance(value, dict):
        return
    if "class_path" in value:
        name, arguments = value["class_path"], value.get("init_args", {})
        if not isinstance(name, str) or not name:
            raise DataError(f"{path}: {field}.class_path: expected the name of a class, got {name or 'nothing'}")
        if not isinstance(arguments, dict):
            raise DataError(
                f"{path}: {field}.init_args: expected arguments with their names, got {arguments or 'nothing'}"
            )
        if misplaced := [key for key in value if key not in ("class_path", "init_args", "dict_kwargs")]:
            key = f"{field}.{misplaced[0]}"
            raise DataError(f"{path}: {key}: is not allowed next to class_path; move it below init_args")
    for name, inner in value.items():
        _check_classes(path, inner, field if name == "init_args" else f"{field}.{name}".lstrip("."))


def _check_section(path: str, content: dict[str, Any], section: str) -> None:
    value: Any = content
    for name in section.split("."):
        if not isinstance(value, dict) or name not in value:
            return
        value = value[name]
    if value is None:
        raise DataError(f"{path}: {section}: this section is empty; write its fields below it, or remove it")
    if not isinstance(value, dict | str):  # a string is a file with the section, which the parser reads
        raise DataError(f"{path}: {section}: is a section with fields below it, but got {value}")


def normalise(args: list[str]) -> list[str]:
    """Replace Python's ``None`` by ``null``, also in lists and dicts: W&B's agent writes values in Python's syntax.

    >>> normalise(["--model.client.grad_clip=None", "--model.clients={'a': {'grad_clip': None}}", "--data.val=none"])
    ['--model.client.grad_clip=null', '--model.clients={"a": {"grad_clip": null}}', '--data.val=none']
    """
    return [re.sub(r"=(None|[\[{].*\bNone\b.*[\]}])$", lambda match: "=" + _as_json(match[1]), arg) for arg in args]


def _as_json(literal: str) -> str:
    try:
        return as_yaml(ast.literal_eval(literal))
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):  # not a Python literal: unchanged
        return literal


def join_configs(args: Sequence[str]) -> list[str]:
    """Join several ``--config`` options into one list: the parser would use only the last.

    >>> join_configs(["--config", "a.yaml", "--seed", "1", "--config=b.yaml"])
    ['--seed', '1', '--config=["a.yaml", "b.yaml"]']
    """
    parser = ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config", action="append", default=[])
    options, words = parser.parse_known_args(args)
    return [*words, f"--config={as_yaml(options.config)}"] if len(options.config) > 1 else list(args)
