"""``fedsim list``: the classes that a config can name, each with a line, read off the source without torch."""

from __future__ import annotations

import ast
import re
import shutil
import textwrap
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path

from fedsim.cli.config_files import shipped_configs
from fedsim.core.errors import ConfigError

_PACKAGE = Path(__file__).parents[1]
_STATEMENT = re.compile(r"^class (\w+)([^:]*):", re.MULTILINE)
_WORD = re.compile(r"\w+")
KINDS = {  # kind -> base class, setting
    "methods": ("Method", "model.method"),
    "backbones": ("Backbone", "model.backbone"),
    "data-sets": ("ReIDSource", "data.source"),
    "selections": ("Selection", "model.selection"),
    "privacy": ("Privacy", "model.privacy"),
    "aggregations": ("Aggregation", "model.aggregation"),
    "server-optimizers": ("Optimizer", "model.server_optimizer"),
}


@dataclass(frozen=True)
class Entry:
    """A class of fedsim."""

    name: str
    bases: tuple[str, ...]
    line: str
    """the first sentence of its docstring"""
    is_abstract: bool


def run(args: list[str]) -> str:
    """Run ``fedsim list [KIND ...]``, and return what is to be printed."""
    if args[:1] in (["-h"], ["--help"]):
        return f"usage: fedsim list [{' | '.join(KINDS)}] ...: what a config can name; without a word: all of it"
    for kind in args:
        if kind not in (*KINDS, "configs"):
            close = get_close_matches(kind, (*KINDS, "configs"), n=1)
            guess = f"did you mean {close[0]}? " if close else ""
            raise ConfigError(
                f"fedsim list: there is no list of {kind}; {guess}choose from {', '.join(KINDS)}, configs"
            )
    return "\n\n".join(_configs() if kind == "configs" else _table(kind) for kind in args or (*KINDS, "configs"))


def _configs() -> str:
    """List the configs that come with fedsim, by the comment that each begins with."""
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


def classes_of(base: str) -> list[Entry]:
    """Return the classes derived from ``base`` that can be named, by name."""
    roots = {base, "SGD"} if base == "Optimizer" else {base}  # SGD is torch's, whose source is not read here
    statements = _statements()
    near = _derived(roots, [one for of_file in statements.values() for one in of_file])
    paths = [path for path, of_file in statements.items() if any(name in near for name, _ in of_file)]
    entries = [entry for path in paths for entry in _classes_in(path)]
    names = _derived(roots, [(entry.name, {*entry.bases}) for entry in entries]) - roots
    found = [entry for entry in entries if entry.name in names and not entry.is_abstract]
    return sorted(found, key=lambda entry: entry.name.lower())


def _derived(roots: set[str], classes: list[tuple[str, set[str]]]) -> set[str]:
    """Return the names of ``roots`` and of classes derived from them; ``classes``: name and bases of each."""
    names = set(roots)
    for _ in range(4):  # generations
        names |= {name for name, bases in classes if names & bases}
    return names


@cache
def _statements() -> dict[Path, list[tuple[str, set[str]]]]:
    """Return the classes of each file, with the words behind their names: among them are the bases.

    To parse all files would take more than a quarter of a sweep's dry run.
    """
    return {
        path: [(name, {*_WORD.findall(rest)}) for name, rest in _STATEMENT.findall(path.read_text(encoding="utf-8"))]
        for path in sorted(_PACKAGE.rglob("*.py"))
    }


@cache
def _classes_in(path: Path) -> tuple[Entry, ...]:
    """Return the classes of a file; one with an underscore, or with abstract hooks, is not to be named."""
    entries = []
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.ClassDef):
            continue
        bases = tuple(ast.unparse(base).rpartition(".")[2] for base in node.bases)
        hooks = [item for item in node.body if isinstance(item, ast.FunctionDef)]
        abstract = any("abstract" in ast.unparse(mark) for hook in hooks for mark in hook.decorator_list)
        line = " ".join((ast.get_docstring(node) or "").partition("\n\n")[0].split())
        entries.append(Entry(node.name, bases, line, abstract or "ABC" in bases or node.name.startswith("_")))
    return tuple(entries)
