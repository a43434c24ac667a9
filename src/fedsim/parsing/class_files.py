"""The files of fedsim's classes, without importing torch.

Only the first line of each class is parsed: parsing all files takes half a second.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

_PACKAGE = Path(__file__).parents[1]
_FIRST_LINES = re.compile(r"^class \w+(?:\([^:]*\))?:", re.MULTILINE)


class ClassFile(NamedTuple):
    """A class of fedsim, and its file."""

    name: str
    bases: tuple[str, ...]
    """without their modules"""
    path: Path


@cache
def class_files() -> tuple[ClassFile, ...]:
    """Return all classes that are not nested in other classes, by file.

    >>> [class_file.bases for class_file in class_files() if class_file.name == "Ditto"]
    [('BodySharing', 'WeightingChoice', 'KeepsModels', 'Method')]
    """
    files = []
    for path in sorted(_PACKAGE.rglob("*.py")):
        for lines in _FIRST_LINES.findall(path.read_text(encoding="utf-8")):
            (node,) = ast.parse(f"{lines} ...").body
            assert isinstance(node, ast.ClassDef)
            bases = tuple(ast.unparse(base).rpartition(".")[2] for base in node.bases)
            files.append(ClassFile(node.name, bases, path))
    return tuple(files)


@cache
def parsed_classes(path: Path) -> dict[str, ast.ClassDef]:
    """Return the classes of a file by their names."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    return {node.name: node for node in body if isinstance(node, ast.ClassDef)}
