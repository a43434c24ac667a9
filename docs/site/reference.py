"""The reference: a page of all settings, read from the source, and a page for each command, with its help."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache

from fedsim.core.arguments import texts_of_fields
from fedsim.parsing.short_help import classes_of, kinds
from fedsim.settings.table import setting_at
from links import ROOT

SECTIONS = {"model": "Settings", "data": "FederatedDataModule"}

Row = tuple[str, str, str, str]
"""Key, type, default and description"""
Page = tuple[str, str]
"""Place on the site, and Markdown"""


def settings_page() -> Page:
    """Return the page of all settings of the sections model and data, and of the classes that they can name."""
    parts = [
        "# All settings\n",
        "Each setting is a line of a config, and an option: `model.client.batch_size: 64` is "
        "`--model.client.batch_size 64`. `trainer` has the settings of Lightning's Trainer; "
        "[docs/commands.md](../commands.md) has the options of commands. This page is made from the code.\n",
    ]
    for section, name in SECTIONS.items():
        parts += [f"## {section}\n", table(rows_of(name, section))]
    for kind, setting in kinds().items():
        parts.append(f"## {kind}\n\nOf `{setting}`: a class by its name, or by its class_path with `init_args`.\n")
        for entry in classes_of(setting):
            rows = rows_of(entry.name, f"{setting}.init_args")
            parts += [f"### {entry.name}\n", f"{entry.line}\n"] + ([table(rows)] if rows else [])
    return "reference/settings.md", "\n".join(parts)


def table(rows: list[Row]) -> str:
    """Return rows as a table of Markdown."""
    cells = [[f"`{key}`", f"`{kind}`", f"`{default}`" if default else "", text] for key, kind, default, text in rows]
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells]
    return "\n".join(["| key | type | default | |", "|---|---|---|---|", *lines, ""])


def rows_of(name: str, prefix: str, above: tuple[str, ...] = ()) -> list[Row]:
    """Return a row for each argument of a class, and for those of the settings that it holds."""
    rows = []
    for argument, (annotation, default, text) in arguments_of(name).items():
        key = f"{prefix}.{argument}"
        if argument == "params":  # of optimizers, which are given by fedsim
            continue
        rows.append((key, _kind(annotation), _default(default), _sentence(text)))
        for inner in _settings_in(annotation):
            if inner not in above:
                holder = f"{key}.NAME" if annotation.startswith("dict") else key
                rows += rows_of(inner, holder, (*above, inner))
    return rows


def _settings_in(annotation: str) -> list[str]:
    """Return the groups of settings, frozen dataclasses of fedsim that are no choice of a class, in an annotation."""
    bases = {setting_at(option).base.rpartition(".")[2] for option in kinds().values()}
    names = [name for name in re.findall(r"\b[A-Z]\w+", annotation) if name not in bases]
    return [name for name in names if name in _classes() and _is_settings(_classes()[name])]


def _is_settings(node: ast.ClassDef) -> bool:
    marks = [ast.unparse(mark) for mark in node.decorator_list]
    return any("dataclass" in mark and "frozen=True" in mark for mark in marks)


@cache
def _classes() -> dict[str, ast.ClassDef]:
    """Return the classes of the package by their names."""
    bodies = [ast.parse(path.read_text()).body for path in sorted((ROOT / "src" / "fedsim").rglob("*.py"))]
    return {node.name: node for body in bodies for node in body if isinstance(node, ast.ClassDef)}


def arguments_of(name: str) -> dict[str, tuple[str, str, str]]:
    """Return argument of a class -> annotation, default and description, with those of its bases."""
    node, found = _classes().get(name), dict[str, tuple[str, str, str]]()
    if node is None:
        return found
    constructors = [item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"]
    if constructors and not _takes_fields(constructors[0]):
        return _parameters(node, constructors[0])
    for base in reversed(node.bases):
        found |= arguments_of(ast.unparse(base).rpartition(".")[2])
    found |= {name: (*found[name][:2], text) for name, text in _texts(node).items() if name in found}
    texts = texts_of_fields(node)
    if any("dataclass" in ast.unparse(mark) for mark in node.decorator_list):
        for item in node.body:
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                annotation = _type(item.annotation)
                if "ClassVar" not in annotation:
                    default = "" if item.value is None else ast.unparse(item.value)
                    found[item.target.id] = (annotation, default, texts.get(item.target.id, ""))
    return found


def _takes_fields(constructor: ast.FunctionDef) -> bool:
    return any("takes_fields" in ast.unparse(mark) for mark in constructor.decorator_list)


def _parameters(node: ast.ClassDef, constructor: ast.FunctionDef) -> dict[str, tuple[str, str, str]]:
    texts, given = _texts(node), constructor.args
    names = [*given.posonlyargs, *given.args][1:]
    defaults: list[ast.expr | None] = [None] * (len(names) - len(given.defaults)) + [*given.defaults]
    pairs = [*zip(names, defaults, strict=True), *zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    return {
        name.arg: (
            "" if name.annotation is None else _type(name.annotation),
            "" if default is None else ast.unparse(default),
            texts.get(name.arg, ""),
        )
        for name, default in pairs
    }


def _texts(node: ast.ClassDef) -> dict[str, str]:
    """Return argument -> its description in the docstring of a class."""
    text = ast.get_docstring(node) or ""
    return dict(re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", text.partition("Args:\n")[2], re.MULTILINE))


def _type(annotation: ast.expr) -> str:
    """Return an annotation without the facts of a setting."""
    match annotation:
        case ast.Subscript(value=ast.Name(id="Annotated"), slice=ast.Tuple(elts=[first, *_])):
            return ast.unparse(first)
    return ast.unparse(annotation)


def _kind(annotation: str) -> str:
    """Return a type as a config writes it: null for None, choices for Literal."""
    text = re.sub(r"Literal\[([^\]]*)\]", lambda match: match[1].replace("'", "").replace(", ", " or "), annotation)
    return text.replace("None", "null").replace("nn.Module", "class_path").replace("OptimizerCallable", "class_path")


def _default(default: str) -> str:
    """Return a default as a config writes it; those of other classes are their own rows."""
    if default.startswith(("field(", "_")) or re.fullmatch(r"[A-Z]\w*\(.*\)", default, re.DOTALL):
        return ""
    return {"None": "null", "True": "true", "False": "false"}.get(default, default.strip("'"))


def _sentence(text: str) -> str:
    """Return the first sentence of a description, in one line and without roles of docstrings."""
    line = re.sub(r":\w+:`~?([^`]*)`", r"`\1`", " ".join(text.split())).replace("``", "`")
    line = re.sub(r"\$([^$]*)\$", r"`\1`", line)
    return re.split(r"(?<=[a-z)\]`])\. (?=[A-Z])", line)[0]


# -- commands ----------------------------------------------------------------------------------------------------------


def command_pages() -> Iterator[Page]:
    """Yield a page for each command, with its help, and those of the commands below it."""
    listed = []
    for command, entry in _helps().items():
        listed.append(f"| [`fedsim {command}`]({command}.md) | {entry['line'].replace('|', '/')} |")
        blocks = [f"```\n$ fedsim {words} --help\n{text.rstrip()}\n```\n" for words, text in entry["texts"].items()]
        yield f"reference/{command}.md", "\n".join([f"# fedsim {command}\n", f"{entry['line']}\n", *blocks])
    head = "# Commands and their options\n\nWhat each is for: [commands](../commands.md).\n"
    yield "reference/index.md", "\n".join([head, "| command | |", "|---|---|", *listed, ""])


def _helps() -> dict[str, dict[str, object]]:
    """Return the line and the help texts of each command, of a process that has the documentation's own width."""
    script = [sys.executable, str(ROOT / "docs" / "site" / "reference.py")]
    done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "COLUMNS": "110"})
    if done.returncode:
        raise SystemExit(f"the help of commands failed; is fedsim installed beside MkDocs?\n{done.stderr}")
    return json.loads(done.stdout)


def _write_helps() -> None:
    """Print the help of all commands as JSON."""
    from fedsim.__main__ import COMMANDS, main
    from fedsim.cli.commands import GROUPS

    found: dict[str, dict[str, object]] = {}
    for command, line in COMMANDS.items():
        below = [[command, name] for name in GROUPS.get(command, ())]
        texts = {}
        for words in [[command], *below]:
            output = io.StringIO()
            with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
                main([*words, "--help"])
            texts[" ".join(words)] = output.getvalue()
        found[command] = {"line": line, "texts": texts}
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    _write_helps()
