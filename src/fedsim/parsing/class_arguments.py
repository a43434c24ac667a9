"""Arguments of fedsim's classes and their defaults, read off the source without torch."""

from __future__ import annotations

import ast
from functools import cache
from typing import Any, NamedTuple

from fedsim.parsing.class_files import class_files, parsed_classes

_WITHOUT_ARGUMENTS = ("ABC", "object")
_UNKNOWN = object()
"""In the place of a default that is missing, or that only Python can work out."""


class Argument(NamedTuple):
    """An argument of a class, as its source has it."""

    default: Any
    """a value, or something that no value is equal to"""
    annotation: ast.expr | None


def arguments_of_class(path: str) -> dict[str, Argument] | None:
    """Return the arguments of a class by their names, or None: the class is not fedsim's, or its source is not enough.

    Args:
        path: the class's name, alone or behind that of its module, as a ``class_path`` has it.

    >>> list(arguments_of_class("fedsim.methods.Ditto"))[-1], arguments_of_class("torch.optim.SGD")
    ('lam', None)
    """
    module, _, name = path.rpartition(".")
    return _arguments_of(name) if module.partition(".")[0] in ("", "fedsim") else None


def defaults_of_class(path: str) -> dict[str, Any]:
    """Return those defaults of a class that stand in its source as values; ``path`` as in :func:`arguments_of_class`.

    >>> defaults_of_class("SKA")["unseen"]
    'dual'
    """
    arguments = arguments_of_class(path) or {}
    return {name: argument.default for name, argument in arguments.items() if argument.default is not _UNKNOWN}


def class_in(annotation: ast.expr | None) -> str | None:
    """Return the one class that an annotation names beside None; None where it names another thing.

    >>> class_in(ast.parse("Evaluation | None", mode="eval").body), class_in(ast.parse("list[int]", mode="eval").body)
    ('Evaluation', None)
    """
    match annotation:
        case ast.Name(id=name):
            return name
        case ast.BinOp(left=ast.Name(id=name), op=ast.BitOr(), right=ast.Constant(value=None)):
            return name
    return None


@cache
def _arguments_of(name: str) -> dict[str, Argument] | None:
    node = _class_called(name)
    if node is None:
        return {} if name in _WITHOUT_ARGUMENTS else None
    if any("dataclass" in ast.unparse(mark) for mark in node.decorator_list):
        return _with_inherited(node, _fields(node))
    own = [item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"]
    return _parameters(own[0].args) if own else _with_inherited(node, {})


def _class_called(name: str) -> ast.ClassDef | None:
    """Parse the one class of this name."""
    paths = [found.path for found in class_files() if found.name == name]
    return parsed_classes(paths[0])[name] if len(paths) == 1 else None


def _with_inherited(node: ast.ClassDef, own: dict[str, Argument]) -> dict[str, Argument] | None:
    """Add the arguments of a class's bases; of several bases the first wins."""
    found: dict[str, Argument] = {}
    for base in reversed(node.bases):
        inherited = _arguments_of(ast.unparse(base).rpartition(".")[2])
        if inherited is None:
            return None
        found |= inherited
    return found | own


def _fields(node: ast.ClassDef) -> dict[str, Argument]:
    """Return the fields of a dataclass that can be given."""
    found = {}
    for item in node.body:
        if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name):
            continue
        options = item.value.keywords if isinstance(item.value, ast.Call) and _is_field(item.value) else None
        given = {option.arg: option.value for option in options or ()}
        is_own = "ClassVar" in ast.unparse(item.annotation) or _value(given.get("init")) is False
        if not is_own:
            default = item.value if options is None else given.get("default")
            found[item.target.id] = Argument(_value(default), item.annotation)
    return found


def _is_field(call: ast.Call) -> bool:
    return ast.unparse(call.func).rpartition(".")[2] == "field"


def _parameters(of: ast.arguments) -> dict[str, Argument] | None:
    """Return the arguments of a constructor; None where it takes any."""
    if of.kwarg is not None:
        return None
    names = [*of.posonlyargs, *of.args][1:]  # without self
    defaults: list[ast.expr | None] = [None] * (len(names) - len(of.defaults)) + [*of.defaults]
    pairs = [*zip(names, defaults, strict=True), *zip(of.kwonlyargs, of.kw_defaults, strict=True)]
    return {name.arg: Argument(_value(default), name.annotation) for name, default in pairs}


def _value(node: ast.expr | None) -> Any:
    """Return the value that an expression spells out."""
    try:
        return _UNKNOWN if node is None else ast.literal_eval(node)
    except ValueError:
        return _UNKNOWN
