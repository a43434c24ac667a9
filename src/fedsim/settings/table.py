"""The table of all settings, read without importing torch: classes, their arguments, and the facts of each."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

from fedsim.settings.facts import Facts

MISSING = object()
"""stands for a default that an argument lacks, and for a setting that a configuration lacks"""
LIBRARIES = ("torch", "lightning", "pytorch_lightning")
_FACTS = {fact.name for fact in fields(Facts)} - {"base"}
_NONE = Facts()


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A setting: an argument of a class."""

    facts: Facts = field(default_factory=Facts)
    text: str = ""
    """its description, in one line"""
    default: Any = MISSING
    """as a config has it"""
    default_from: str = ""
    """path of the function that makes the default, by which a config may name it"""
    base: str = ""
    """path of the class of which it is an object: a section, or a base class; empty: a plain value"""
    has_counts: bool = False
    """whether 1 is not 1.0, but a count beside shares: numbers of both types are valid"""
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
    takes_others: bool = False
    """whether it takes arguments beside these, which it passes on"""
    shares: tuple[str, ...] = ()
    """of a method: the groups of tensors that clients send with some choice of its arguments"""
    arguments: Mapping[str, Setting] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Its name without the module."""
        return self.path.rpartition(".")[2]


UNKNOWN = Setting(has_counts=True)
"""a setting that nothing is known about: it changes results"""


_FILE = Path(__file__).with_name("table.json")


@cache
def _content() -> Mapping[str, Any]:
    return dict(json.loads(_FILE.read_bytes()))


def digest_of_table() -> str:
    """Return a hash of the table: of another one, a fingerprint may be of other settings."""
    return hashlib.sha256(_FILE.read_bytes()).hexdigest()[:12]


@cache
def _paths() -> dict[str, str]:
    """Return name -> path of fedsim's classes, and of the libraries' classes that the table has."""
    paths = {short_of(path): path for path in _content()["classes"]}
    assert len(paths) == len(_content()["classes"]), "no two classes share a name"
    return {path.rpartition(".")[2]: path for path in paths.values()} | paths


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
    return ".".join([package, *modules[:1], name]) if package in LIBRARIES else path


def is_foreign(path: str) -> bool:
    """Return whether a class is neither fedsim's nor of a library that it uses: only its author knows what it does."""
    return class_at(path) is None and path.partition(".")[0] not in (*sys.stdlib_module_names, "fedsim", *LIBRARIES)


@cache
def class_at(path: str) -> KnownClass | None:
    """Return a class by its name, its path, or another path of it; None for one that the table lacks."""
    full = path if path in _content()["classes"] else _paths().get(short_of(path)) if path else None
    if full is None:
        return None
    entry = _content()["classes"][full]
    arguments = {name: _setting(content) for name, content in entry["arguments"].items()}
    read = {"bases": tuple(entry["bases"]), "arguments": arguments, "shares": (*entry.get("shares", "").split(),)}
    return KnownClass(path=full, **entry | read)


def _setting(content: Mapping[str, Any]) -> Setting:
    facts = {name: value for name, value in content.items() if name in _FACTS}
    fields = {name: value for name, value in content.items() if name not in _FACTS}
    return Setting(facts=Facts(**facts) if facts else _NONE, **fields)


def section(name: str) -> KnownClass:
    """Return the class whose arguments are the fields of a section: ``trainer``, ``model``, ``data``; ``""``: none."""
    cls = class_at(_content()["sections"][name])
    assert cls is not None, "the sections are in the table"
    return cls


def has_fields(setting: Setting) -> bool:
    """Return whether a setting always has fields below it, and takes no choice of a class, nor null."""
    return isinstance(setting.default, dict) and "class_path" not in setting.default


@cache
def sections() -> tuple[str, ...]:
    """Return the names of the sections."""
    return tuple(name for name in _content()["sections"] if name)


@cache
def paths_below(base: str) -> tuple[str, ...]:
    """Return the classes that a config can name where it takes those derived from ``base``, a path, sorted by name."""
    below = [path for path, entry in _content()["classes"].items() if base in (path, *entry["bases"])]
    named = [path for path in below if "abstract" not in _content()["classes"][path]]
    return tuple(sorted(named, key=lambda path: path.rpartition(".")[2].lower()))


def classes_below(base: str) -> list[KnownClass]:
    """Return the classes of :func:`paths_below`."""
    return [cls for path in paths_below(base) if (cls := class_at(path)) is not None]


def only_watches(path: str) -> bool:
    """Return whether a callback changes no number."""
    return short_of(path) in _watchers()


@cache
def _watchers() -> frozenset[str]:
    return frozenset(map(short_of, _content()["watchers"]))


def walk() -> Iterator[tuple[str, Setting]]:
    """Yield each setting that does not depend on the choice of a class, by its option, section by section."""
    for name in ("", *sections()):
        yield from _walk(name, section(name))


def _walk(prefix: str, cls: KnownClass) -> Iterator[tuple[str, Setting]]:
    for name, setting in cls.arguments.items():
        option = f"{prefix}.{name}".lstrip(".")
        yield option, setting
        inner = class_at(setting.base) if setting.base else None
        if inner is not None and len(paths_below(inner.path)) <= 1:
            yield from _walk(option, inner)


def setting_at(option: str, classes: Mapping[str, str] | None = None) -> Setting:
    """Return a setting by its option, such as ``model.client.optimizer.lr``.

    ``classes``: option -> the class that it names, where there is a choice; of another one, the first that has such an
    argument counts.
    """
    chosen, first, *parts = classes or {}, *option.split(".")
    is_section = first in _content()["sections"]
    if not parts:
        return Setting(base=section(first).path) if is_section else section("").arguments.get(first, UNKNOWN)
    cls = section(first) if is_section else None
    setting, prefix = UNKNOWN, first
    for part in (part for part in parts if part != "init_args"):
        prefix = f"{prefix}.{part}"
        if setting.form == "names" and prefix not in chosen:  # the key of a mapping
            setting = Setting(base=setting.base)
            continue
        base = cls.path if cls is not None else ""
        setting = argument_of(base, part) if base else UNKNOWN
        cls = class_at(chosen.get(prefix) or setting.base) if setting.base or prefix in chosen else None
    return setting


def argument_of(path: str, name: str) -> Setting:
    """Return an argument of a class; of a base class that lacks it, that of the first class derived from it."""
    settings = (cls.arguments.get(name) for cls in (class_at(path), *classes_below(path)) if cls is not None)
    return next((setting for setting in settings if setting is not None), UNKNOWN)
