"""``fedsim list``: the classes that a config can name, with one line each, read from the source without torch."""

from __future__ import annotations

import ast
import shutil
import textwrap
from dataclasses import dataclass
from difflib import get_close_matches

from fedsim.core.errors import ConfigError
from fedsim.parsing.class_files import class_files, parsed_classes
from fedsim.parsing.config_files import shipped_configs

KINDS = {  # kind -> base class, setting
    "methods": ("Method", "model.method"),
    "backbones": ("Backbone", "model.backbone"),
    "data-sets": ("ReIDSource", "data.source"),
    "selections": ("Selection", "model.selection"),
    "timings": ("Timing", "model.timing"),
    "privacy": ("Privacy", "model.privacy"),
    "attacks": ("Attack", "model.attack"),
    "aggregations": ("Aggregation", "model.aggregation"),
    "server-optimizers": ("Optimizer", "model.server_optimizer"),
}


@dataclass(frozen=True)
class ListedClass:
    """A class of fedsim."""

    name: str
    line: str
    """the first sentence of its docstring"""


def run(args: list[str]) -> str:
    """Run ``fedsim list [KIND ...]``, and return the text to print."""
    if args[:1] in (["-h"], ["--help"]):
        kinds = " | ".join(KINDS)
        return f"usage: fedsim list [{kinds}] ...: what a config can name; without a kind, all of it"
    for kind in args:
        if kind not in (*KINDS, "configs"):
            close = get_close_matches(kind, (*KINDS, "configs"), n=1)
            guess = f"did you mean {close[0]}? " if close else ""
            raise ConfigError(
                f"fedsim list: there is no list of {kind}; {guess}choose from {', '.join(KINDS)}, configs"
            )
    return "\n\n".join(_configs() if kind == "configs" else _table(kind) for kind in args or (*KINDS, "configs"))


def _configs() -> str:
    """List the configs that come with fedsim, each with the comment in its first line."""
    paths = shipped_configs()
    width, room = max(map(len, paths)), shutil.get_terminal_size((100, 24)).columns
    lines = ["configs (--config NAME; later ones win)"]
    for name, path in paths.items():
        first = path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
        lines.append(f"  {name:<{width}}  {textwrap.shorten(first, max(room - width - 4, 40), placeholder=' ...')}")
    return "\n".join(lines)


def _table(kind: str) -> str:
    base, setting = KINDS[kind]
    entries = classes_of(base)
    width, room = max(len(entry.name) for entry in entries), shutil.get_terminal_size((100, 24)).columns
    lines = [f"{kind} (--{setting}; --{setting}.help NAME explains the options)"]
    for entry in entries:
        text = textwrap.shorten(entry.line, max(room - width - 4, 40), placeholder=" ...")
        lines.append(f"  {entry.name:<{width}}  {text}")
    return "\n".join(lines)


def classes_of(base: str) -> list[ListedClass]:
    """Return the concrete classes derived from ``base``, sorted by name."""
    roots = {base, "SGD"} if base == "Optimizer" else {base}  # SGD is torch's, whose source is not read
    names = set(roots)
    for _ in range(4):  # generations
        names |= {file.name for file in class_files() if names & {*file.bases}}
    derived = [file for file in class_files() if file.name in names - roots]
    nodes = [parsed_classes(file.path)[file.name] for file in derived if "ABC" not in file.bases]
    entries = [ListedClass(node.name, _line_of(node)) for node in nodes if not _is_abstract(node)]
    return sorted(entries, key=lambda entry: entry.name.lower())


def _line_of(node: ast.ClassDef) -> str:
    return " ".join((ast.get_docstring(node) or "").partition("\n\n")[0].split())


def _is_abstract(node: ast.ClassDef) -> bool:
    """Return whether a config cannot name a class: its name begins with an underscore, or it has abstract methods."""
    hooks = [item for item in node.body if isinstance(item, ast.FunctionDef)]
    marked = any("abstract" in ast.unparse(mark) for hook in hooks for mark in hook.decorator_list)
    return marked or node.name.startswith("_")
