"""From exceptions to one line that names a field or file and says what to do."""

from __future__ import annotations

import argparse
import errno
import itertools
import re
import signal
from importlib import import_module
from typing import NamedTuple

from fedsim.core.errors import DrawsFailedError, FedSimError, NotReadyError, RunStoppedError

# settings that are classes -> module and name of their base; for the list in the message about a wrong name
_CLASSES = {
    "model.method": ("fedsim.methods.base", "Method"),
    "model.backbone": ("fedsim.models.backbones", "Backbone"),
    "model.selection": ("fedsim.federation.selection", "Selection"),
    "model.privacy": ("fedsim.federation.privacy", "Privacy"),
    "model.aggregation": ("fedsim.federation.robust", "Aggregation"),
    "data.source": ("fedsim.data.images", "ReIDSource"),
}
# where the types that the parser knows say too little; without a section: options of fedsim augment
_WANTED = {
    "seed_everything": f"a number from 0 to {2**32 - 1}",
    "trainer.precision": "32-true or bf16-mixed",
    "model.clients": "the fields of each client, such as {town0: {batch_size: 8}}",
    "data.generated": "settings of its own, such as --data.generated.root FOLDER",
    "data.size": "a height and a width, such as [64, 32]",
    "size": "a height and a width, such as [64, 32]",
    "clients": "a list of names, such as '[town0]'",
}
_BELOW_COMMAND = re.compile(r"\b(fit|validate|test|predict|describe)\.(?=model|data|trainer)")
_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)


class Verdict(NamedTuple):
    """How a command ends that did not do what it should."""

    message: str
    code: int
    """of the process"""


def verdict_on(error: BaseException, command: str) -> Verdict | None:
    """Say what people should read about a command's exception; None: it is a defect of fedsim, or an orderly exit."""
    if isinstance(error, RunStoppedError):
        return Verdict(str(error), 128 + error.signum)
    if isinstance(error, KeyboardInterrupt) or isinstance(error.__context__, KeyboardInterrupt):  # Lightning exits
        return Verdict("interrupted", 128 + signal.SIGINT)
    if not isinstance(error, Exception):
        return None
    if isinstance(error, FedSimError) or _is_of_lightning(error):
        return Verdict(str(error), 1 if isinstance(error, DrawsFailedError | NotReadyError) else 2)
    if (cause := _user_error_behind(error)) is not None:  # behind what the parser and torch make of it
        return Verdict(str(cause), 2)
    if isinstance(error, RuntimeError) and (lost := _lost_process(str(error))) is not None:
        return Verdict(lost, 2)
    if isinstance(error, OSError) and error.errno in _OF_THE_DISK:
        where = error.filename or "a file of the run"
        return Verdict(f"{where}: cannot be written ({error.strerror}); make room or write to another folder", 2)
    if type(error).__module__.startswith("wandb."):  # by name: to import it takes a second
        return Verdict(f"trainer.logger: W&B says {error}; run wandb login, or set WANDB_MODE=offline", 2)
    if isinstance(error, argparse.ArgumentError):
        return Verdict(f"{explain(str(error))}; fedsim {command} --help lists all options", 2)
    return None


def one_line(message: str, length: int = 400) -> str:
    """Squeeze a message into one line of reasonable length."""
    text = re.sub(r"\s+", " ", message).strip()
    return text if len(text) <= length else text[: length - 3] + "..."


def _lost_process(message: str) -> str | None:
    """Say what gloo, NCCL and the DataLoader mean when another process is gone; None for other errors."""
    signs = "connection (closed|reset) by peer|broken pipe|remote process exited|ncclRemoteError|Timed out waiting"
    if re.search(signs, message, re.IGNORECASE):
        return f"another rank ended without a word, or did not answer in time ({message[:120]})"
    if message.startswith("DataLoader worker (pid"):
        return (
            f"data.workers: a process that reads images was ended from outside ({message.partition('. ')[0]}); "
            "if memory ran out, be it that of /dev/shm, set fewer"
        )
    return None


def _user_error_behind(error: BaseException | None) -> FedSimError | None:
    """Find our own error under those that the parser wraps around what a constructor raises."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, FedSimError):
            return error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None


def explain(message: str) -> str:
    r"""Turn a message of the parser into one line that names the field and what it may be.

    >>> explain('Parser key "model.threads": Expected a <class \'int\'>. Got value: many')
    'model.threads: expected int, got many'
    """
    key, what = _innermost(message)
    if not key:
        text = re.sub(r"^Subcommand '\w+' does not accept option '([^']*)'", r"\1: there is no such option", what)
        if re.search(r"arguments are required: .*\bmodel\.", text):
            text = f"{text}; give a config that has them, such as --config configs/quickstart.yaml"
        return one_line(_BELOW_COMMAND.sub("", text), 340)
    return one_line(f"{key}: {_said(key, what)}", 340)


def _innermost(message: str) -> tuple[str, str]:
    r"""Return the field that a message of the parser is about, within others if need be, and what it says of it.

    >>> _innermost('Parser key "a": Type A expects: Parser key "b":\n  - Expected a path')
    ('a.b', '\n  - Expected a path')
    """
    key, start, line, column = "", 0, 0, -1
    for found in re.finditer(r"Parser key [\"']([^\"']*)[\"']:", message):
        begin = message.rfind("\n", 0, found.start()) + 1
        if found.start() - begin <= column:  # of another type that the value was tried as
            break
        start, line, column = found.end(), begin, found.start() - begin
        key = found[1] if not key or found[1].startswith(key) else f"{key}.{found[1]}"
    first, *rest = message[start:].split("\n")
    if line > 0:  # what is said of the fields around it comes after it, less indented
        indent = _indent(message[line:])
        rest = list(itertools.takewhile(lambda text: not text or _indent(text) > indent, rest))
    return _BELOW_COMMAND.sub("", key), "\n".join([first, *rest])


def _indent(text: str) -> int:
    return len(text) - len(text.lstrip(" "))


def _said(key: str, what: str) -> str:
    """Return what to say of a field, from what the parser says of it."""
    given = re.search(r"Given value: (.*?)(?:\. Got value: .*)?$", what, re.MULTILINE)
    given = given or re.search(r"Got value: (\S+)", what)
    value, what = given[1] if given else "this", re.sub(r"\s+", " ", what).strip()
    if unknown := re.search(r"Option '([^']*)' is not accepted", what):
        return f"there is no option {unknown[1]} here"
    if "Unable to load config" in what:
        return "is a section; give its fields, or a file that holds them"
    if key in _WANTED:
        return f"expected {_WANTED[key]}, got {value}"
    types = re.search(r"Subtypes: \[(.*)\] Errors: - (.*?)(?: Given value type|$)", what)
    is_number = types is not None and re.search("<class '(int|float)'>", types[1])
    if not is_number and (missing := _missing_class(key, what, value)):
        return missing
    if types is not None:
        telling = [error for error in types[2].split(" - ") if not error.startswith("Expected a")]
        return f"cannot use {value} ({telling[0]})" if telling else f"expected {_readable(types[1])}, got {value}"
    what = re.sub(r"Expected a typing\.Literal\[([^\]]*)\]\. Got value: (\S+)", r"\2 is not one of \1", what)
    return re.sub(r"Expected a <class '([^']*)'>\. Got value: (.*)$", r"expected \1, got \2", what)


def _missing_class(key: str, what: str, value: str) -> str | None:
    """Return what to say where a class was expected, and something else given; None: that is not what is wrong."""
    named = re.search(r"import path string: (\S+)", what)
    base = re.search(r"Not a valid subclass of (\w+)", what)
    if not (named or base or re.search("import path|has no attribute '|No module named '", what)):
        return None
    name = named[1] if named else value
    choices = next((_names(*base) for field, base in _CLASSES.items() if key.startswith(field)), [])
    if choices:
        return f"there is no class {name}; choose from {', '.join(choices)}, or give the class_path of your own"
    if base and not named:
        return f"{name} is no {base[1]}; give its fields, or a class_path with init_args"
    return f"there is no class {name}; give the class_path of one"


def _readable(types: str) -> str:
    """Return Python's list of types as people write them.

    >>> _readable("<class 'int'>, typing.Literal['a', 'b'], list[torch.nn.Module], <class 'NoneType'>")
    "int, 'a', 'b', list[Module] or null"
    """
    types = re.sub(r"<class '([^']*)'>", r"\1", types)
    types = re.sub(r"typing\.Literal\[([^\]]*)\]", r"\1", types)
    types = re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", types).replace("NoneType", "null")
    return re.sub(r", ([^,\[\]]*)$", r" or \1", types)


def _is_of_lightning(error: Exception) -> bool:
    """Whether Lightning refuses a setting: by name, as not every command imports Lightning."""
    return any(cls.__name__ == "MisconfigurationException" for cls in type(error).__mro__)


def _names(module: str, name: str) -> list[str]:
    """Names of fedsim's own classes for a setting, by module and name of their base."""
    base = getattr(import_module(module), name)
    found = [base]
    for cls in found:
        found += cls.__subclasses__()
    own = {cls.__name__ for cls in found if cls.__module__.startswith("fedsim.") and not cls.__name__.startswith("_")}
    return sorted(own - {base.__name__})
