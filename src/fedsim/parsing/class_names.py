"""What to say of a setting that is a class, if no class is there or a wrong one."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from difflib import get_close_matches
from importlib import import_module

# settings that are classes -> module and name of their base
_BASES = {
    "model.method": ("fedsim.methods.base", "Method"),
    "model.backbone": ("fedsim.models.backbones", "Backbone"),
    "model.selection": ("fedsim.federation.components.selection", "Selection"),
    "model.privacy": ("fedsim.federation.components.privacy", "Privacy"),
    "model.aggregation": ("fedsim.federation.components.robust", "Aggregation"),
    "model.client.optimizer": ("torch.optim", "Optimizer"),
    "model.clients.optimizer": ("torch.optim", "Optimizer"),
    "model.server_optimizer": ("torch.optim", "Optimizer"),
    "data.source": ("fedsim.data.images", "ReIDSource"),
    "trainer.callbacks": ("lightning.pytorch.callbacks", "Callback"),
    "trainer.logger": ("lightning.pytorch.loggers", "Logger"),
}
_PROBLEM = r"(?:Problem with given class_path '([^']*)':\s*|callable class: )"
# Python's words, which modules with an attribute lookup of their own begin with a capital
_IMPORT = r"((?i:no module named '[^']*'|module '[^']*' has no attribute '[^']*'|cannot import name '[^']*'))"
_WRONG_BASE = r"(?:Import path |Expected ')([\w.]+)'? (?:does not correspond to|to be) a subclass of (?:<class ')?(\w+)"
_OTHER = r"(.*?)\.?(?: Got value:| Given value| - (?:Expected|Problem)|$)"  # whatever else the lookup raises


def missing_class(key: str, what: str, value: str) -> str | None:
    """Return what to say where a class was expected and something else given; None: that is not what is wrong.

    Args:
        key: the setting.
        what: the parser's message about it, without line breaks.
        value: what was given, in the words of the parser.
    """
    if inside := re.match(r"(?:Namespace\(class_path=|\{'class_path': )'([^']*)'", value):
        value = inside[1]
    if found := re.search(_PROBLEM + _IMPORT, what):
        return _not_imported(key, found[1] or (_path_in(found[2]) if value == "this" else value), found[2])
    if found := re.search(_WRONG_BASE, what):
        return f"{found[1]} is no {found[2]}; derive it from {found[2]}, or name another class"
    if (found := re.search(_PROBLEM + _OTHER, what)) and re.fullmatch(r"\w+(\.\w+)+", found[1] or value):
        return _not_usable(found[1] or value, found[2])
    if value.startswith(("{", "[{")) or re.search(r"import path (?:string|format):(?= -|$)", what):
        return _not_named(key, value)
    named = re.search(r"import path (?:string|format): (\S+)", what)
    base = re.search(r"Not a valid subclass of (\w+)", what)
    if base and not named and value == "this":  # a mapping, with which the parser's message is long
        return _not_named(key, what)
    if named or base or re.search("import path|has no attribute '|No module named '", what):
        return _not_known(key, named and named[1], base and base[1], value)
    return None


def _not_known(key: str, name: str | None, base: str | None, value: str) -> str:
    """Return what to say of a ``name``, or of another ``value``, that leads to no class derived from ``base``."""
    if name and (guess := did_you_mean(name, _names(key))):
        return f"there is no class {name}; {guess}"
    if choices := _names(key, only_own=True):
        own = ", or give the class_path of your own"
        return f"there is no class {name or value}; choose from {', '.join(choices)}{own}"
    if base and not name:
        return f"{value} is no {base}; give its fields, or a class_path with init_args"
    return f"there is no class {name or value}; give the class_path of one"


def _not_named(key: str, value: str) -> str:
    """Return what to say where a class should be, and ``value`` names none: a mapping of other things, or nothing."""
    keys = set(re.findall(r"'(\w+)': ", value)) - {"class_path"}
    if slip := get_close_matches("class_path", sorted(keys), n=1):
        return f"{slip[0]} means nothing here; did you mean class_path?"
    choices = _names(key, only_own=True)
    some = f"choose from {', '.join(choices)}, or " if choices else ""
    return f"name a class; {some}give the class_path of {'your own' if choices else 'one'}"


def _path_in(why: str) -> str:
    """Return the path that Python's message is about, for a parser's message that leaves it out.

    >>> _path_in("No module named 'nowhere'"), _path_in("module 'torch.optim' has no attribute 'SDG'")
    ('nowhere', 'torch.optim.SDG')
    """
    return ".".join(re.findall(r"'([^']*)'", why))


def _not_imported(key: str, path: str, why: str) -> str:
    """Return what to say of a class that Python does not find, and ``why``."""
    why = why[0].lower() + why[1:]
    said = f"there is no class {path} ({why})"
    if why.startswith("no module"):
        module = re.findall(r"'([^']*)'", why)[0]
        if module.partition(".")[0] == path.partition(".")[0]:  # not one that the class's module wants
            return f"{said}; is {module.partition('.')[0]} installed, in the working directory or on PYTHONPATH?"
        return f"{said}; {path.rpartition('.')[0]} imports it: install it"
    guess = did_you_mean(path.rpartition(".")[2], _names(key))
    return f"{said}; {guess or 'is the name right?'}"


def _not_usable(path: str, why: str) -> str:
    """Return what to say of a class of which the parser says ``why``, in no words that we know."""
    why = re.sub(r"<class '([\w.]+)'>", r"\1", why).rstrip(".")
    if _is_there(path):
        return f"{path} cannot be used ({why})"
    return f"there is no class {path} ({why or 'its module does not say why'}); is the name right?"


def _is_there(path: str) -> bool:
    """Return whether a dotted path leads to something; the parser has imported its module by now."""
    module, _, name = path.rpartition(".")
    try:
        getattr(import_module(module), name)
    except Exception:  # whatever a module's own lookup raises
        return False
    return True


def unknown_argument(what: str) -> str | None:
    """Return what to say of an argument that a class lacks; None: that is not what is wrong."""
    unknown = re.search(r"Option '([^']*)' is not accepted", what)
    if unknown is None:
        return None
    path = re.search(r"class_path[=' ]+([\w.]+)'", what)
    module, _, name = path[1].rpartition(".") if path else ("", "", "")
    try:
        known: Iterable[str] = inspect.signature(getattr(import_module(module), name)).parameters
    except (ImportError, AttributeError, ValueError, TypeError):
        known = ()
    of = f"{name} has no option {unknown[1]}" if known else f"there is no option {unknown[1]} here"
    return f"{of}; {guess}" if (guess := did_you_mean(unknown[1], [*known, "class_path"])) else of


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a guess at what was meant; empty if nothing is like it.

    >>> did_you_mean("max_epocs", ["max_steps", "max_epochs"])
    'did you mean max_epochs?'
    """
    close = get_close_matches(name, list(known), n=1)
    return f"did you mean {close[0]}?" if close else ""


def _names(key: str, only_own: bool = False) -> list[str]:
    """Names of the classes that a setting can have; ``only_own``: those that fedsim brings."""
    where = next((base for field, base in _BASES.items() if key.startswith(field)), None)
    if where is None:
        return []
    module, name = where
    base = getattr(import_module(module), name)
    found = [base]
    for cls in found:
        found += cls.__subclasses__()
    own = ("fedsim.",) if only_own else ("fedsim.", "torch.", "lightning.")
    if only_own and not module.startswith("fedsim."):
        return []
    names = {cls.__name__ for cls in found if cls.__module__.startswith(own) and not cls.__name__.startswith("_")}
    return sorted(names - {base.__name__})
