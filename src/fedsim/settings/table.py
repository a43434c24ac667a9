"""The table of all settings, read without importing torch: classes, their arguments, and the facts of each."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from importlib import resources
from typing import Any

from fedsim.settings.facts import Facts

MISSING = object()
"""stands for a default that an argument lacks, and for a setting that a configuration lacks"""
_LIBRARIES = ("torch", "lightning", "pytorch_lightning")
_FACTS = [fact.name for fact in fields(Facts)]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A setting: an argument of a class."""

    facts: Facts = field(default_factory=Facts)
    text: str = ""
    """its description, in one line"""
    default: Any = MISSING
    """as a config has it"""
    base: str = ""
    """path of the class of which it is an object: a section, or a base class; empty: a plain value"""
    form: str = ""
    """``text``; ``texts``: a list of them; ``names``: a mapping whose keys are names; empty: another one"""


@dataclass(frozen=True, kw_only=True)
class KnownClass:
    """A class that a config can name, or that is a section of it."""

    path: str
    """the module that defines it, and its name"""
    bases: tuple[str, ...] = ()
    """paths of all classes from which it is derived"""
    line: str = ""
    """the first sentence of its docstring"""
    abstract: bool = False
    """whether a config cannot name it"""
    arguments: Mapping[str, Setting] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Its name without the module."""
        return self.path.rpartition(".")[2]


UNKNOWN = Setting()
"""a setting that nothing is known about: it changes results"""


@cache
def _content() -> Mapping[str, Any]:
    return dict(json.loads((resources.files("fedsim") / "settings" / "table.json").read_text(encoding="utf-8")))


@cache
def _paths() -> dict[str, str]:
    """Return name -> path of fedsim's classes, and of the libraries' classes that the table has."""
    paths = {short_of(path): path for path in _content()["classes"]}
    assert len(paths) == len(_content()["classes"]), "no two classes share a name"
    return paths


@cache
def short_of(path: str) -> str:
    """Return the name by which two paths of one class are equal.

    Of fedsim's class it is its last name; of a library's, package and last name, as libraries give their classes
    several paths. Another class counts by its whole path.

    >>> short_of("fedsim.methods.FedPav"), short_of("torch.optim.sgd.SGD"), short_of("mine.FedPav")
    ('FedPav', 'torch.optim.SGD', 'mine.FedPav')
    """
    package, *modules, name = path.split(".") if "." in path else ("", path)
    if package == "fedsim":
        return name
    return ".".join([package, *modules[:1], name]) if package in _LIBRARIES else path


@cache
def class_at(path: str) -> KnownClass | None:
    """Return a class by its name, its path, or another path of it; None for one that the table lacks."""
    full = path if path in _content()["classes"] else _paths().get(short_of(path))
    if full is None:
        return None
    entry = _content()["classes"][full]
    arguments = {name: _setting(content) for name, content in entry["arguments"].items()}
    known = {"bases": tuple(entry["bases"]), "line": entry.get("line", ""), "abstract": entry.get("abstract", False)}
    return KnownClass(path=full, arguments=arguments, **known)


def _setting(content: Mapping[str, Any]) -> Setting:
    facts = {name: content[name] for name in _FACTS if name in content and name != "base"}
    return Setting(facts=Facts(**facts), **{name: v for name, v in content.items() if name not in facts})


def section(name: str) -> KnownClass:
    """Return the class whose arguments are the fields of a section: ``trainer``, ``model``, ``data``; ``""``: none."""
    found = class_at(_content()["sections"][name])
    assert found is not None, "the sections are in the table"
    return found


def sections() -> list[str]:
    """Return the names of the sections."""
    return [name for name in _content()["sections"] if name]


@cache
def classes_below(base: str) -> tuple[KnownClass, ...]:
    """Return the classes that a config can name where it takes those derived from ``base``, a path, sorted by name."""
    below = (class_at(path) for path, entry in _content()["classes"].items() if base in (path, *entry["bases"]))
    named = [cls for cls in below if cls is not None and not cls.abstract]
    return tuple(sorted(named, key=lambda cls: cls.name.lower()))


def only_watches(path: str) -> bool:
    """Return whether a callback changes no number."""
    return short_of(path) in _watchers()


@cache
def _watchers() -> frozenset[str]:
    return frozenset(map(short_of, _content()["watchers"]))


def walk(name: str = "", above: tuple[str, ...] = ()) -> Iterator[tuple[str, Setting]]:
    """Yield each setting that does not depend on the choice of a class, by its option, section by section."""
    for first in (name,) if name else ("", *sections()):
        yield from _walk(first, section(first) if first in _content()["sections"] else None, above)


def _walk(prefix: str, cls: KnownClass | None, above: tuple[str, ...]) -> Iterator[tuple[str, Setting]]:
    for name, argument in cls.arguments.items() if cls is not None else ():
        option = f"{prefix}.{name}".lstrip(".")
        yield option, argument
        inner = class_at(argument.base) if argument.base and argument.base not in above else None
        if inner is not None and len(classes_below(inner.path)) <= 1:
            yield from _walk(option, inner, (*above, inner.path))


def setting_at(option: str, classes: Mapping[str, str] | None = None) -> Setting:
    """Return a setting by its option, such as ``model.client.optimizer.lr``.

    ``classes``: option -> the class that it names, where there is a choice.
    """
    chosen, first, *parts = classes or {}, *option.split(".")
    if not parts:
        return section("").arguments.get(first, UNKNOWN)
    cls: KnownClass | None = section(first) if first in _content()["sections"] else None
    found, place = UNKNOWN, first
    for part in (part for part in parts if part != "init_args"):
        if cls is None:
            return UNKNOWN
        found, place = cls.arguments.get(part, UNKNOWN), f"{place}.{part}"
        cls = class_at(chosen.get(place) or found.base) if found.base or place in chosen else None
    return found
