"""Check the names of options. They are read from the source, so that a typo is reported without importing torch."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from fedsim.core.arguments import texts_of_fields
from fedsim.core.errors import ConfigError

_SECTIONS = {  # package, file and class whose arguments are the options of a section
    "trainer": ("lightning", "pytorch/trainer/trainer.py", "Trainer"),
    "model": ("fedsim", "federation/settings.py", "Settings"),
    "data": ("fedsim", "data/datamodule.py", "FederatedDataModule"),
}


_OF_ALL = (
    "help",
    "config",
    "print_config",
    "seed_everything",
    "run_dir",
    "overwrite",
    "save_ranking",
    "save_maps",
    "paper",
)
"""options of every command that trains or scores, in addition to those of Lightning's method and the sections"""


_OF_SEVERAL_RUNS = ("seeds", "parallel", "left_out")
"""options of ``fit`` that start several runs"""


WITH_TRAINER = ("fit", "validate", "test", "predict", "describe")
"""Commands that have these options."""


def all_options(command: str) -> list[str]:
    """Names of a command's options; of sections only the first level."""
    sections = [f"{section}.{name}" for section in _SECTIONS for name in arguments_of_section(section)]
    several = _OF_SEVERAL_RUNS if command == "fit" else ()
    return [*_OF_ALL, *several, *_arguments_of(command), *sections]


def asks_for_several(words: Sequence[str], command: str) -> bool:
    """Return whether a command line starts several runs."""
    return command == "fit" and any(
        word.partition("=")[0][2:] in _OF_SEVERAL_RUNS for word in words if word[:2] == "--"
    )


def asks_for_rotation(words: Sequence[str]) -> bool:
    """Return whether the words of a fit name data sets that are left out, one in each run."""
    return any(word.partition("=")[0] == "--left_out" for word in words)


def asks_for_help(words: Sequence[str]) -> bool:
    """Return whether a command line requests the help of the command or of a class.

    >>> asks_for_help(["-h"]), asks_for_help(["--model.method.help=FedProx"]), asks_for_help(["--config=help"])
    (True, True, False)
    """
    return any(word in ("-h", "--help") or word.partition("=")[0].endswith(".help") for word in words)


def asks_for_images(words: Sequence[str]) -> bool:
    """Return whether the words of ``fedsim predict`` name a folder of images in place of the run's data sets."""
    return any(word.partition("=")[0] == "--images" for word in words)


def check_options(words: Sequence[str], command: str) -> None:
    """Check the first two parts of each option such as ``--trainer.max_epochs``; the parser checks the whole name.

    Args:
        words: of the command line, without the command.
        command: its name, a command of Lightning or ``describe``.

    Raises:
        ConfigError: if there is no such option.
    """
    for word in words:
        match = re.match(r"--(no_)?(\w+)(?:\.(\w+))?(?=$|[.=+])", word)
        if match is None:
            continue
        _, first, second = match.groups()
        names: Sequence[str] = [*_OF_ALL, *_SECTIONS, *_arguments_of(command)]
        if first in _SECTIONS and second is not None:
            names, prefix, name = _names(first), f"{first}.", second
        else:
            prefix, name = "", first
        if name not in names:
            close = get_close_matches(name, names, n=1)
            guess = f"did you mean --{prefix}{close[0]}? " if close else ""
            raise ConfigError(
                f"--{prefix}{name}: there is no such option; {guess}fedsim {command} --help lists all options"
            )


def _names(section: str) -> list[str]:
    """Names of a section's options: the arguments of its class, whose module is not imported."""
    package, file, cls = _SECTIONS[section]
    return [*_read_arguments(package, file, cls, "__init__"), "help"]


def _arguments_of(command: str) -> list[str]:
    """Names of the options that a command takes from Lightning's method of the same name; ``describe`` has none."""
    if command == "describe":
        return []
    names = _read_arguments(*_SECTIONS["trainer"], command)
    return [name for name in names if name not in ("model", "datamodule") and not name.endswith("dataloaders")]


def arguments_of_section(section: str) -> list[str]:
    """Names of a section's options."""
    return _names(section)[:-1]


def texts_of_section(section: str) -> dict[str, str]:
    """Return option of a section -> its description in the docstring of the section's class."""
    node = _class_of(*_SECTIONS[section])
    text = ast.get_docstring(node) or ""
    texts = dict(re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", text.partition("Args:\n")[2], re.MULTILINE))
    return {name: " ".join(text.split()) for name, text in (texts | texts_of_fields(node)).items()}


def _read_arguments(package: str, file: str, cls: str, method: str) -> list[str]:
    """Names of a method's arguments, read from its source; of a dataclass, those of its fields."""
    body = _class_of(package, file, cls).body
    if fields := [
        node.target.id for node in body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    ]:
        return fields
    [function] = [node.args for node in body if isinstance(node, ast.FunctionDef) and node.name == method]
    return [argument.arg for argument in (*function.args, *function.kwonlyargs) if argument.arg != "self"]


@cache
def _class_of(package: str, file: str, cls: str) -> ast.ClassDef:
    """Parse the source of a class."""
    spec = find_spec(package)
    assert spec is not None, f"{package} is installed"
    [folder] = spec.submodule_search_locations or []
    tree = ast.parse((Path(folder) / file).read_text(encoding="utf-8"))
    [definition] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == cls]
    return definition
