"""The table of all settings: ``make rows`` calls this file, and it writes ``src/fedsim/settings/table.json``."""

import ast
import contextlib
import dataclasses
import importlib
import inspect
import itertools
import json
import pkgutil
import re
import sys
import textwrap
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, ForwardRef, Literal, get_args, get_origin, get_type_hints

import lightning
import torch

import fedsim
from fedsim.core.arguments import texts_of_fields
from fedsim.core.errors import ConfigError
from fedsim.core.written import NotInConfigError, written
from fedsim.data.datamodule import FederatedDataModule
from fedsim.federation.settings import Settings
from fedsim.methods.base import Method
from fedsim.settings.facts import Facts, facts_of
from fedsim.settings.options import OF_LIBRARIES, WATCHERS, StartOptions, TrainerOptions

TABLE = Path(fedsim.__file__).parent / "settings" / "table.json"
ROOTS = {"": StartOptions, "trainer": lightning.Trainer, "model": Settings, "data": FederatedDataModule}
ROOMS = ("fedsim.", "torch.optim.", "lightning.pytorch.loggers.", "lightning.pytorch.callbacks.")
"""packages whose classes are in the table with their arguments"""
OTHER_ROOMS = ("fedsim.testing.", "fedsim.inference.", "fedsim.generation.", "torch.optim.lr_scheduler.")
"""packages whose classes stand in no config, but for callbacks"""


def path_of(cls):
    """Return the dotted path at which a class is defined."""
    return f"{cls.__module__}.{cls.__qualname__}"


@cache
def fedsims_modules():
    """Import all modules of fedsim, so that all of its classes exist."""
    names = [info.name for info in pkgutil.walk_packages(fedsim.__path__, "fedsim.") if "__main__" not in info.name]
    return [importlib.import_module(name) for name in names]


def classes_below(base):
    """Yield a class and those derived from it, of the packages of the table."""
    for cls in (base, *base.__subclasses__()):
        if is_in_table(cls):
            yield cls
        if cls is not base:
            yield from classes_below(cls)


def is_in_table(cls):
    """Whether a config can name a class whose arguments fedsim knows, or the class is a section."""
    place, home = path_of(cls), sys.modules.get(cls.__module__)
    # a run makes classes of two others, and a test forgets modules
    if getattr(home, cls.__name__, None) is not cls or cls.__name__.startswith("_"):
        return False
    return place.startswith(ROOMS) and (not place.startswith(OTHER_ROOMS) or issubclass(cls, lightning.Callback))


def hints_of(cls):
    """Return name -> annotation of what a class takes, with its facts."""
    made_of = cls if dataclasses.is_dataclass(cls) or cls in (StartOptions, TrainerOptions) else cls.__init__
    try:
        return get_type_hints(made_of, include_extras=True)
    except NameError:  # a library names a type that it imports for type checkers only: of the others it is known
        hints = inspect.get_annotations(made_of)
        return {name: object if names_in(hint) else hint for name, hint in hints.items()}
    except (TypeError, AttributeError):
        return {}


def names_in(hint):
    """Return the types of an annotation that are known by name only."""
    return [part for part in parts_of(hint) if isinstance(part, str | ForwardRef)]


def parameters_of(cls):
    """Return name -> default of what a class takes; ``inspect.Parameter.empty`` without one."""
    if cls is StartOptions:
        return {name: vars(cls).get(name, inspect.Parameter.empty) for name in cls.__annotations__}
    if dataclasses.is_dataclass(cls):
        return {field.name: default_of(field) for field in dataclasses.fields(cls) if field.init}
    try:
        parameters = inspect.signature(cls).parameters.values()
    except (TypeError, ValueError):
        return {}
    # the command line gives loggers defaults of its own, which are not those of the library
    keeps = not cls.__module__.startswith("lightning.pytorch.loggers.")
    named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    return {p.name: p.default if keeps else inspect.Parameter.empty for p in named}


def constructor_of(cls):
    """Return the parameters of a class's constructor; empty without one of its own."""
    return () if cls.__init__ is object.__init__ else inspect.signature(cls.__init__).parameters.values()


def default_of(field):
    """Return the default of a dataclass's field."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default


def types_in(hint):
    """Yield the types of a union, of a list and of a dictionary's values."""
    if get_origin(hint) is Annotated:
        yield from types_in(get_args(hint)[0])
    elif get_origin(hint) in (list, tuple, dict):
        yield from types_in(get_args(hint)[0 if get_origin(hint) is not dict else 1])
    elif get_origin(hint) is not None and get_origin(hint) is not Literal:
        for inner in get_args(hint):
            if not isinstance(inner, list):
                yield from types_in(inner)
    elif isinstance(hint, type) and hint is not NoneType:
        yield hint


def form_of(hint):
    """Return the form of a type's values in a config: text, texts, names (keys of a mapping), classes, or another."""
    kinds = {get_origin(part) or part for part in parts_of(hint)}
    if any(get_origin(part) is dict and get_args(part)[0] is str for part in parts_of(hint)):
        return "names"
    if kinds & {list, tuple} and str in types_in(hint):
        return "texts"
    if list in kinds and not set(types_in(hint)) & {int, float, bool}:
        return "classes"
    return "text" if str in kinds and not kinds & {bool, int, float} else ""


def parts_of(hint):
    """Return the types of a union, or the type itself."""
    if get_origin(hint) is Annotated:
        return parts_of(get_args(hint)[0])
    if "Union" in str(get_origin(hint)):
        return [part for inner in get_args(hint) for part in parts_of(inner)]
    return [hint]


def of_argument(hint, default, text):
    """Return a setting as the table has it: text, default, form and facts, without the usual ones."""
    facts = facts_of(hint)
    entry = {name: value for name, value in vars(facts).items() if value != getattr(Facts(), name)}
    entry = {name: dict(v) if isinstance(v, Mapping) else v for name, v in entry.items()}
    if base := base_of(hint, facts):
        entry["base"] = path_of(base)
    if text:
        entry["text"] = text
    if strip(hint) is Any or {int, float} <= {*types_in(hint)}:
        entry["has_counts"] = True
    if form := form_of(hint):
        entry["form"] = form
    if default is not inspect.Parameter.empty:
        try:
            entry["default"] = written(default, strip(hint))
        except NotInConfigError:
            entry["default"] = None
    if inspect.isfunction(default):
        entry["default_from"] = path_of(default)
    return entry


def strip(hint):
    """Return an annotation without facts."""
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def base_of(hint, facts):
    """Return the class of which a setting is an object: a section, or a base class; None of plain values."""
    if facts.base:
        module, _, name = facts.base.rpartition(".")
        return getattr(importlib.import_module(module), name)
    if "OptimizerCallable" in str(hint) or "torch.optim" in str(hint):
        return torch.optim.Optimizer
    found = [t for t in types_in(hint) if t.__module__.startswith(("fedsim", "torch.nn")) or is_in_table(t)]
    ours = [t for t in found if is_in_table(t)]
    return next(iter(ours or found), None)


def groups_shared_by(cls):
    """Return the groups of tensors that clients of a method send with some choice of its arguments."""
    hints = {name: strip(hint) for name, hint in hints_of(cls).items()}
    choices = {name: (False, True) if hint is bool else get_args(hint) for name, hint in hints.items()
               if hint is bool or get_origin(hint) is Literal}  # fmt: skip
    groups = set()
    for chosen in itertools.product(*choices.values()):
        method = object.__new__(cls)  # unchecked: other arguments may be required
        vars(method).update(zip(choices, chosen, strict=True))
        with contextlib.suppress(ConfigError):  # arguments that do not fit together
            groups |= method.shared_groups
    return sorted(groups)


def texts_of_class(cls):
    """Return, for each argument of a class, its text in one line: below a field, or in the class's docstring."""
    doc = inspect.getdoc(cls) or ""
    texts = dict(re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", doc.partition("Args:\n")[2], re.MULTILINE))
    try:
        [node] = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    except (OSError, TypeError):  # typed into a shell, or not written in Python
        return {}
    assert isinstance(node, ast.ClassDef)
    return {name: " ".join(text.split()) for name, text in (texts | texts_of_fields(node)).items()}


def entry_of(cls):
    """Return a class as the table has it."""
    known = next((vars_ for path, vars_ in OF_LIBRARIES.items() if path in map(path_of, cls.__mro__)), None)
    facts_of = get_type_hints(known, include_extras=True) if known else {}
    of_library = {} if known is None else vars(known)
    ours = [base for base in reversed(cls.__mro__) if base.__module__.startswith("fedsim.")]
    hints, texts = hints_of(cls), {}
    for described in [*ours, known or cls]:
        texts |= texts_of_class(described)
    arguments = {
        name: of_argument(facts_of.get(name, hints.get(name, Any)), of_library.get(name, default), texts.get(name, ""))
        for name, default in parameters_of(cls).items()
    }
    above = [c for c in cls.__mro__[1:-1] if c.__module__.startswith(("fedsim", "torch.optim", "lightning"))]
    entry = {"bases": [path_of(c) for c in above if c.__module__ != "fedsim.core.arguments"]}
    if cls.__module__.startswith("fedsim"):
        entry["line"] = " ".join((inspect.getdoc(cls) or "").partition("\n\n")[0].split())
    if inspect.isabstract(cls) or cls.__name__.startswith("_") or "ABC" in [b.__name__ for b in cls.__bases__]:
        entry["abstract"] = True
    if any(p.kind is p.VAR_KEYWORD for p in constructor_of(cls)):
        entry["takes_others"] = True
    if issubclass(cls, Method) and "abstract" not in entry:
        entry["shares"] = " ".join(groups_shared_by(cls))
    return entry | {"arguments": arguments}


def table():
    """Return all settings: the classes of the sections, and every class that can stand below them."""
    fedsims_modules()
    waiting, classes = list(ROOTS.values()), {}
    while waiting:
        cls = waiting.pop(0)
        if path_of(cls) in classes:
            continue
        classes[path_of(cls)] = entry_of(cls)
        for path in {a["base"] for a in classes[path_of(cls)]["arguments"].values() if "base" in a}:
            module, _, name = path.rpartition(".")
            if path.startswith(ROOMS):
                waiting += classes_below(getattr(importlib.import_module(module), name))
    own_watchers = [place for place in map(path_of, classes_below(lightning.Callback)) if place.startswith("fedsim.")]
    watchers = [f"{package}.{name}" for package, names in WATCHERS.items() for name in names]
    return {
        "sections": {name: path_of(cls) for name, cls in ROOTS.items()},
        "watchers": sorted({*watchers, *own_watchers}),
        "classes": {path: classes[path] for path in sorted(classes)},
    }


def text_of(content):
    """Return the file: a line per argument."""
    text = json.dumps(content, indent=1)
    flat = r'\{\n\s{5,}((?:"(?:[^"\\]|\\.)*"|[^{}"])*)\n\s*\}'  # a mapping without mappings, on several lines
    return re.sub(flat, lambda m: "{" + re.sub(r"\n\s*", " ", m[1]) + "}", text) + "\n"


if __name__ == "__main__":
    TABLE.write_text(text_of(table()))
