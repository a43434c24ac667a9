"""Config files and arguments as they come, before the parser sees them."""

from __future__ import annotations

import ast
import itertools
import json
import re
from argparse import ArgumentParser
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from fedsim.core.errors import DataError
from fedsim.parsing.error_lines import one_line

_CONFIGS = Path(__file__).parents[1] / "configs"
SafeLoader: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's, where it is: eight times as fast"""


def check_config_files(args: list[str], sections: Iterable[str] = ()) -> None:
    """Read a command line's config files by :func:`read_config`: the parser does not say which one is broken."""
    for here, following in itertools.zip_longest(args, args[1:], fillvalue=""):
        if path := config_at(here, following):
            read_config(path, sections)


def config_at(here: str, following: str) -> str | None:
    """Return the config file that a word of a command line, with the one after it, names."""
    if here in ("--config", "-c"):
        return following
    return here.removeprefix("--config=") if here.startswith("--config=") else None


def shipped_configs() -> dict[str, Path]:
    """Return name -> path of the configs that come with fedsim, such as ``quickstart`` and ``methods/fedavg``."""
    paths = sorted(_CONFIGS.rglob("*.yaml"))
    return {path.relative_to(_CONFIGS).with_suffix("").as_posix(): path for path in paths}


def with_shipped(args: Sequence[str]) -> list[str]:
    """Let ``--config`` name configs that come with fedsim, with or without folder and suffix, wherever it is called.

    A file of the working directory has precedence.

    >>> [Path(word).name for word in with_shipped(["--config", "none.yaml", "-c", "methods/fedavg"])]
    ['--config', 'none.yaml', '-c', 'fedavg.yaml']
    """
    found = list(args)
    for place, (here, following) in enumerate(itertools.zip_longest(args, args[1:], fillvalue="")):
        path = config_at(here, following)
        if path is None or path.startswith("{") or Path(path).exists():
            continue
        own = shipped_configs().get(path.removeprefix("configs/").removesuffix(".yaml"))
        if own is not None and here.startswith("--config="):
            found[place] = f"--config={own}"
        elif own is not None:
            found[place + 1] = str(own)
    return found


def with_clients(args: list[str]) -> list[str]:
    """Let settings of single clients stand where no config names a client: the parser adds fields to none but those.

    >>> with_clients(["--model.clients.viper.batch_size=8"])
    ['--model.clients={}', '--model.clients.viper.batch_size=8']
    """
    named: Any = None
    for position, (here, following) in enumerate(itertools.zip_longest(args, args[1:], fillvalue="")):
        if here.startswith("--model.clients."):
            return args if named else [*args[:position], "--model.clients={}", *args[position:]]
        if path := config_at(here, following):
            model = read_config(path).get("model")
            named = model.get("clients", named) if isinstance(model, dict) else named
        elif here.partition("=")[0] == "--model.clients":
            named = (here.partition("=")[2] or following) not in ("null", "None")
    return args


def read_config(path: str, sections: Iterable[str] = ()) -> dict[str, Any]:
    """Return the content of a file, or of the text that ``--paper`` stands for.

    ``sections`` are fields that must have fields below them if they are there, such as ``model.client``. Of some of
    them the parser would take anything else for a section whose fields are all left out.

    Raises:
        DataError: if it cannot be read, or a section is none.
    """
    if path.startswith("{"):
        try:
            return dict(json.loads(path))
        except json.JSONDecodeError as error:
            text = one_line(path, 80)
            raise DataError(f"--config: {text} is no file; write settings in one, or as options") from error
    if Path(path).is_dir():
        raise DataError(f"{path}: is a folder; give a config file")
    try:
        loader = SafeLoader(Path(path).read_text())
        node = loader.get_single_node()
        _check_keys(path, node)
        content = None if node is None else loader.construct_document(node)
    except (OSError, UnicodeDecodeError) as error:
        close = get_close_matches(path.removeprefix("configs/").removesuffix(".yaml"), shipped_configs(), n=1)
        remedy = f"did you mean {close[0]}, which comes with fedsim?" if close else "does the file exist?"
        raise DataError(f"{path}: cannot read this config ({error}); {remedy}") from error
    except yaml.YAMLError as error:
        raise DataError(f"{path}: is not valid YAML ({one_line(str(error))})") from error
    if not isinstance(content, dict):
        raise DataError(f"{path}: is no config; expected sections such as trainer, model, data")
    for section in sections:
        _check_section(path, content, section)
    _check_classes(path, content)
    return content


def _check_keys(path: str, node: yaml.Node | None, where: str = "") -> None:
    """Refuse a key that stands twice in one section: YAML itself would take the last value without a word."""
    lines: dict[str, int] = {}
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        if not isinstance(key, yaml.ScalarNode):
            continue
        field, line = f"{where}.{key.value}".lstrip("."), key.start_mark.line + 1
        if key.value in lines:
            twice = f"stands twice, in lines {lines[key.value]} and {line}"
            raise DataError(f"{path}: {field}: {twice}; remove one of them")
        lines[key.value] = line
        _check_keys(path, value, field)
    for value in node.value if isinstance(node, yaml.SequenceNode) else ():
        _check_keys(path, value, where)


def _check_classes(path: str, value: Any, where: str = "") -> None:
    """Refuse what is no class where there is a ``class_path``; whether the class exists is for the parser to say."""
    for inner in value if isinstance(value, list) else ():
        _check_classes(path, inner, where)
    if not isinstance(value, dict):
        return
    if "class_path" in value:
        name, arguments = value["class_path"], value.get("init_args", {})
        if not isinstance(name, str) or not name:
            raise DataError(f"{path}: {where}.class_path: expected the name of a class, got {name or 'nothing'}")
        if not isinstance(arguments, dict):
            raise DataError(
                f"{path}: {where}.init_args: expected arguments with their names, got {arguments or 'nothing'}"
            )
        if others := [key for key in value if key not in ("class_path", "init_args", "dict_kwargs")]:
            raise DataError(f"{path}: {where}.{others[0]}: does not stand beside class_path; move it below init_args")
    for name, inner in value.items():
        _check_classes(path, inner, where if name == "init_args" else f"{where}.{name}".lstrip("."))


def _check_section(path: str, content: dict[str, Any], section: str) -> None:
    value: Any = content
    for name in section.split("."):
        if not isinstance(value, dict) or name not in value:
            return
        value = value[name]
    if value is None:
        raise DataError(f"{path}: {section}: this section is empty; write its fields below it, or remove it")
    if not isinstance(value, dict | str):  # the parser reads a section of its own file
        raise DataError(f"{path}: {section}: is a section, with fields below it, and not {value}")


def normalise(args: list[str]) -> list[str]:
    """W&B's agent writes values as Python does; the parser wants null for ``None``, also within lists and dicts.

    >>> normalise(["--model.client.grad_clip=None", "--model.clients={'a': {'grad_clip': None}}", "--data.val=none"])
    ['--model.client.grad_clip=null', '--model.clients={"a": {"grad_clip": null}}', '--data.val=none']
    """
    return [re.sub(r"=(None|[\[{].*\bNone\b.*[\]}])$", lambda found: "=" + _as_json(found[1]), arg) for arg in args]


def _as_json(text: str) -> str:
    try:
        return json.dumps(ast.literal_eval(text))
    except (ValueError, SyntaxError, TypeError):  # not Python's: as it is
        return text


def join_configs(args: Sequence[str]) -> list[str]:
    """Join config files that are given one by one: of other options the parser takes the last.

    >>> join_configs(["--config", "a.yaml", "--seed", "1", "--config=b.yaml"])
    ['--seed', '1', '--config=["a.yaml", "b.yaml"]']
    """
    parser = ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config", action="append", default=[])
    found, rest = parser.parse_known_args(args)
    return [*rest, f"--config={json.dumps(found.config)}"] if len(found.config) > 1 else list(args)
