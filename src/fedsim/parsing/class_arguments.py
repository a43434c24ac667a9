"""Arguments of fedsim's classes and their defaults, read from the source without importing torch."""

from __future__ import annotations

import ast
from functools import cache
from typing import Any, NamedTuple

from fedsim.parsing.class_files import class_files, parsed_classes

_WITHOUT_ARGUMENTS = ("ABC", "object")
_UNKNOWN = object()
"""Stands for a default that is missing, or that the source does not give as a literal."""


class Argument(NamedTuple):
    """An argument of a class, as its source declares it."""

    default: Any
    """a value, or a placeholder that equals no value"""
    annotation: ast.expr | None


def arguments_of_class(path: str) -> dict[str, Argument] | None:
    """Return the arguments of a class by name; None if the class is not fedsim's, or its source does not list them.

    Args:
        path: the class's name, with or without its module, as in a ``class_path``.

    >>> list(arguments_of_class("fedsim.methods.Ditto"))[-1], arguments_of_class("torch.optim.SGD")
    ('lam', None)
    """
    module, _, name = path.rpartition(".")
    return _arguments_of(name) if module.partition(".")[0] in ("", "fedsim") else None


def defaults_of_class(path: str) -> dict[str, Any]:
    """Return the defaults of a class that are literals in its source; ``path`` as in :func:`arguments_of_class`.

    >>> defaults_of_class("SKA")["unseen"]
    'dual'
    """
    arguments = arguments_of_class(path) or {}
    return {name: argument.default for name, argument in arguments.items() if argument.default is not _UNKNOWN}


def class_in(annotation: ast.expr | None) -> str | None:
    """Return the class of the annotations ``Name`` and ``Name | None``; None for all other annotations.

    >>> class_in(ast.parse("Evaluation | None", mode="eval").body), class_in(ast.parse("list[int]", mode="eval").body)
    ('Evaluation', None)
    """
    match annotation:
        case ast.Subscript(value=ast.Name(id="Annotated"), slice=ast.Tuple(elts=[first, *_])):
            return class_in(first)
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
    constructors = [item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"]
    return _parameters(constructors[0].args) if constructors else _with_inherited(node, {})


def _class_called(name: str) -> ast.ClassDef | None:
    """Parse the class of this name; None if there is none, or more than one."""
    paths = [class_file.path for class_file in class_files() if class_file.name == name]
    return parsed_classes(paths[0])[name] if len(paths) == 1 else None


def _with_inherited(node: ast.ClassDef, class_arguments: dict[str, Argument]) -> dict[str, Argument] | None:
    """Add the arguments of a class's bases to those of the class; the first of several bases wins."""
    arguments: dict[str, Argument] = {}
    for base in reversed(node.bases):
        inherited = _arguments_of(ast.unparse(base).rpartition(".")[2])
        if inherited is None:
            return None
        arguments |= inherited
    return arguments | class_arguments


def _fields(node: ast.ClassDef) -> dict[str, Argument]:
    """Return the fields of a dataclass that its constructor takes."""
    fields = {}
    for item in node.body:
        if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name):
            continue
        options = item.value.keywords if isinstance(item.value, ast.Call) and _is_field(item.value) else None
        field_options = {option.arg: option.value for option in options or ()}
        is_internal = "ClassVar" in ast.unparse(item.annotation) or _value(field_options.get("init")) is False
        if not is_internal:
            default = item.value if options is None else field_options.get("default")
            fields[item.target.id] = Argument(_value(default), item.annotation)
    return fields


def _is_field(call: ast.Call) -> bool:
    return ast.unparse(call.func).rpartition(".")[2] == "field"


def _parameters(signature: ast.arguments) -> dict[str, Argument] | None:
    """Return the arguments of a constructor; None if it takes ``**kwargs``."""
    if signature.kwarg is not None:
        return None
    names = [*signature.posonlyargs, *signature.args][1:]  # without self
    defaults: list[ast.expr | None] = [None] * (len(names) - len(signature.defaults)) + [*signature.defaults]
    pairs = [*zip(names, defaults, strict=True), *zip(signature.kwonlyargs, signature.kw_defaults, strict=True)]
    return {name.arg: Argument(_value(default), name.annotation) for name, default in pairs}


def _value(node: ast.expr | None) -> Any:
    """Return the value of a literal expression."""
    try:
        return _UNKNOWN if node is None else ast.literal_eval(node)
    except ValueError:
        return _UNKNOWN
