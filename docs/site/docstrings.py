"""Docstrings as Markdown: roles become cross references or code, doctests blocks of code, formulas MathML.

Browsers draw MathML themselves: no script is loaded for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import griffe
from latex2mathml.converter import convert

ROLE = re.compile(r":(?:class|meth|func|attr|mod|data|exc):`(~?)([\w.]+)`")
FORMULA = re.compile(r"(?<![\w$`{])\$(?![\s{])([^$`\n]+?)(?<!\s)\$(?!\w)")
DOCTEST = re.compile(r"^( *)>>> .*(?:\n\1\S.*)*", re.MULTILINE)
BARS = re.compile(r"^(\|.*\S) \|\| (?=\S)", re.MULTILINE)  # of a divergence in a cell of a table: no empty cell
WITHOUT_PAGES = "fedsim.cli"


class Docstrings(griffe.Extension):
    """Rewrites all docstrings of a package when it has been read."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Rewrite them before any page shows one."""
        for item in _walk(pkg):
            if item.docstring is not None:
                item.docstring.value = as_markdown(item.docstring.value, item, pkg)


def as_markdown(text: str, scope: griffe.Object, package: griffe.Module) -> str:
    """Return a docstring's text as Markdown; ``scope`` is the object that it describes."""

    def reference(match: re.Match[str]) -> str:
        short, name = match[1], match[2]
        shown = name.rpartition(".")[2] if short else name
        found = _find(name, scope, package)
        return f"`{shown}`" if found is None else f"[`{shown}`][{found}]"

    def markdown(prose: str) -> str:
        return FORMULA.sub(lambda match: convert(match[1]), BARS.sub(r"\1 \\|\\| ", ROLE.sub(reference, prose)))

    parts, end = [], 0
    for match in DOCTEST.finditer(text):
        indent = match[1]
        parts += [markdown(text[end : match.start()]), f"{indent}```pycon\n{match[0]}\n{indent}```"]
        end = match.end()
    return "".join([*parts, markdown(text[end:])])


def _walk(item: griffe.Object) -> Iterator[griffe.Object]:
    """Yield an object and all that is defined in it."""
    yield item
    for member in item.members.values():
        if isinstance(member, griffe.Object):
            yield from _walk(member)


def _find(name: str, scope: griffe.Object, package: griffe.Module) -> str | None:
    """Return the full name of a mentioned object if a page shows it."""
    for path in _candidates(name, scope):
        try:
            found = package[path.removeprefix(f"{package.name}.")]
            found = found.final_target if isinstance(found, griffe.Alias) else found
        except (KeyError, griffe.AliasResolutionError, griffe.CyclicAliasError):
            continue
        hidden = any(part.startswith("_") for part in found.path.split("."))
        if found.docstring is None or hidden or found.path.startswith(WITHOUT_PAGES):
            return None
        return str(found.path)
    return None


def _candidates(name: str, scope: griffe.Object) -> Iterator[str]:
    """Yield full names that a name may stand for, seen from ``scope``: its members, then those of what it is in."""
    if name.startswith("fedsim."):
        yield name
        return
    around: griffe.Object | None = scope
    while around is not None:
        yield f"{around.path}.{name.lstrip('.')}"
        around = around.parent if isinstance(around.parent, griffe.Object) else None
