"""Error lines for settings that must be a class: the class is missing, unknown or of the wrong type."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from difflib import get_close_matches
from importlib import import_module

from fedsim.core.names import did_you_mean
from fedsim.settings.gone import line_of_gone
from fedsim.settings.table import paths_below, setting_at

_OPTIMIZER = "torch.optim.optimizer.Optimizer"
_PROBLEM = r"(?:Problem with given class_path '([^']*)':\s*|callable class: )"
# Python's messages; modules with their own __getattr__ may begin them with a capital letter
_IMPORT = r"((?i:no module named '[^']*'|module '[^']*' has no attribute '[^']*'|cannot import name '[^']*'))"
_WRONG_BASE = r"(?:Import path |Expected ')([\w.]+)'? (?:does not correspond to|to be) a subclass of (?:<class ')?(\w+)"
_OTHER = r"(.*?)\.?(?: Got value:| Given value| - (?:Expected|Problem)|$)"  # any other error of the lookup


def missing_class(key: str, message: str, value: str) -> str | None:
    """Error line for a setting that expects a class and got another value; None if the message reports another error.

    Args:
        key: the setting.
        message: the parser's message about the setting, without line breaks.
        value: the rejected value, as the parser prints it.
    """
    if inside := re.match(r"(?:Namespace\(class_path=|\{'class_path': )'([^']*)'", value):
        value = inside[1]
    if failure := re.search(_PROBLEM + _IMPORT, message):
        return _not_imported(key, failure[1] or (_path_in(failure[2]) if value == "this" else value), failure[2])
    if wrong := re.search(_WRONG_BASE, message):
        return f"{wrong[1]} is not a subclass of {wrong[2]}; derive it from {wrong[2]}, or name another class"
    if (failure := re.search(_PROBLEM + _OTHER, message)) and re.fullmatch(r"\w+(\.\w+)+", failure[1] or value):
        return _not_usable(failure[1] or value, failure[2])
    if value.startswith(("{", "[{")) or re.search(r"import path (?:string|format):(?= -|$)", message):
        return _not_named(key, value)
    named = re.search(r"import path (?:string|format): (\S+)", message)
    base = re.search(r"Not a valid subclass of (\w+)", message)
    if base and not named and value == "this":  # a mapping, which makes the parser's message long
        return _not_named(key, message)
    if named or base or re.search("import path|has no attribute '|No module named '", message):
        return _not_known(key, named and named[1], base and base[1], value)
    return None


def _not_known(key: str, name: str | None, base: str | None, value: str) -> str:
    """Error line for a ``name``, or another ``value``, that is not a class derived from ``base``."""
    if name and (guess := did_you_mean(name, _names(key))):
        return f"there is no class {name}; {guess}"
    if choices := _names(key, only_fedsim=True):
        listed = ", ".join(choices)
        return f"there is no class {name or value}; choose from {listed}, or give the class_path of your own"
    if base and not name:
        return f"{value} is not of type {base}; give its fields, or a class_path with init_args"
    return f"there is no class {name or value}; give the class_path of one"


def _not_named(key: str, value: str) -> str:
    """Error line for a ``value`` that should be a class but names none: another mapping, or an empty value."""
    keys = set(re.findall(r"'(\w+)': ", value)) - {"class_path"}
    if typos := get_close_matches("class_path", sorted(keys), n=1):
        return f"there is no field {typos[0]}; did you mean class_path?"
    choices = _names(key, only_fedsim=True)
    suggestion = f"choose from {', '.join(choices)}, or " if choices else ""
    return f"name a class; {suggestion}give the class_path of {'your own' if choices else 'one'}"


def _path_in(reason: str) -> str:
    """Return the dotted path in Python's message; used if the parser's message does not contain it.

    >>> _path_in("No module named 'nowhere'"), _path_in("module 'torch.optim' has no attribute 'SDG'")
    ('nowhere', 'torch.optim.SDG')
    """
    return ".".join(re.findall(r"'([^']*)'", reason))


def _not_imported(key: str, path: str, reason: str) -> str:
    """Error line for a class that cannot be imported; ``reason`` is Python's message."""
    reason = reason[0].lower() + reason[1:]
    problem = f"there is no class {path} ({reason})"
    if reason.startswith("no module"):
        module = re.findall(r"'([^']*)'", reason)[0]
        if module.partition(".")[0] == path.partition(".")[0]:  # not a module that the class's module imports
            return f"{problem}; is {module.partition('.')[0]} installed, in the working directory or on PYTHONPATH?"
        return f"{problem}; {path.rpartition('.')[0]} imports it: install it"
    guess = did_you_mean(path.rpartition(".")[2], _names(key))
    return f"{problem}; {guess or 'is the name right?'}"


def _not_usable(path: str, reason: str) -> str:
    """Error line for a class that the parser rejected for an unrecognised ``reason``."""
    reason = re.sub(r"<class '([\w.]+)'>", r"\1", reason).rstrip(".")
    if _exists(path):
        return f"{path} cannot be used ({reason})"
    return f"there is no class {path} ({reason or 'its module gives no reason'}); is the name right?"


def _exists(path: str) -> bool:
    """Return whether a dotted path names an attribute of a module; the parser has already imported the module."""
    module, _, name = path.rpartition(".")
    try:
        getattr(import_module(module), name)
    except Exception:  # a module's own lookup may raise any error
        return False
    return True


def without_class(key: str, argument: str) -> str:
    """Error line for an argument of a class that no option has named yet."""
    setting = setting_at(key)
    name = setting.facts.usage or ("torch.optim.SGD" if setting.base == _OPTIMIZER else "CLASS")
    return f"names no class that has {argument}; name it before, such as --{key} {name}"


def unknown_argument(key: str, message: str) -> str | None:
    """Error line for an argument that a class does not have; None if the message reports another error."""
    unknown = re.search(r"Option '([^']*)' is not accepted", message)
    if unknown is None:
        return None
    if gone := line_of_gone(unknown[1].rpartition(".")[2]):
        return gone
    path = re.search(r"class_path[=' ]+([\w.]+)'", message)
    module, _, name = path[1].rpartition(".") if path else ("", "", "")
    if path and setting_at(key).base == _OPTIMIZER and name == _OPTIMIZER.rpartition(".")[2]:
        return without_class(key, unknown[1])  # the parser takes the base where no class is named
    try:
        names: Iterable[str] = inspect.signature(getattr(import_module(module), name)).parameters
    except (ImportError, AttributeError, ValueError, TypeError):
        names = ()
    if guess := did_you_mean(unknown[1], [*names, "class_path"]):
        guess = f"; {guess}"
    elif path and key.count(".") > 1 and not setting_at(key).base:  # a mapping for an argument of a class of the user
        remedy = "annotate it as dict, or give a function that makes it"
        return f"it is of type {name}, which has no option {unknown[1]}; {remedy}"
    return f"{name} has no option {unknown[1]}{guess}" if names else f"there is no option {unknown[1]} here{guess}"


def _names(key: str, only_fedsim: bool = False) -> list[str]:
    """Names of the classes that a setting can have; ``only_fedsim``: only the classes that fedsim provides."""
    base = setting_at(key).base
    if not base or (only_fedsim and not base.startswith("fedsim.")):
        return []
    return [path.rpartition(".")[2] for path in paths_below(base) if path != base]
