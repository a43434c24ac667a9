"""Options that cannot be meant. Their names are read off the source, so a slip is answered without importing torch."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path

from fedsim.core.errors import ConfigError

_SECTIONS = {  # package, file and class whose arguments are the options of a section
    "trainer": ("lightning", "pytorch/trainer/trainer.py", "Trainer"),
    "model": ("fedsim", "federation/federation.py", "Federation"),
    "data": ("fedsim", "data/datamodule.py", "FederatedDataModule"),
}


def check_options(words: Sequence[str], command: str) -> None:
    """Look at the first two parts of each option such as ``--trainer.max_epochs``; the parser looks at all of it.

    Args:
        words: of the command line, without the command.
        command: its name, for the message.

    Raises:
        ConfigError: if a section has no option of this name, or none that begins like it.
    """
    for word in words:
        found = re.match(r"--(trainer|model|data)\.(\w+)", word)
        if found is None:
            continue
        section, name = found.groups()
        known = _names(section)
        if not any(other.startswith(name) for other in known):  # the parser takes the beginning of a name, too
            close = get_close_matches(name, known, n=1)
            guess = f"did you mean --{section}.{close[0]}? " if close else ""
            raise ConfigError(
                f"--{section}.{name}: there is no such option; {guess}fedsim {command} --help lists all options"
            )


def _names(section: str) -> list[str]:
    """Names of a section's options: the arguments of its class, whose module stays unread by Python."""
    package, file, cls = _SECTIONS[section]
    spec = find_spec(package)
    assert spec is not None, f"{package} is installed"
    [folder] = spec.submodule_search_locations or []
    tree = ast.parse((Path(folder) / file).read_text(encoding="utf-8"))
    [body] = [node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == cls]
    [init] = [node.args for node in body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    return [argument.arg for argument in (*init.args, *init.kwonlyargs) if argument.arg != "self"] + ["help"]
