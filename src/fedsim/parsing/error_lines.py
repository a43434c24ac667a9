"""From exceptions to one line that names a field or file and says what to do."""

from __future__ import annotations

import argparse
import errno
import itertools
import re
import signal
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from jsonargparse import ArgumentParser, Namespace

from fedsim.core.errors import ConfigError, DrawsFailedError, FedSimError, NotReadyError, RunStoppedError
from fedsim.parsing.class_names import did_you_mean, missing_class, unknown_argument
from fedsim.parsing.short_help import screen_of, wants_screen

# where the types that the parser knows say too little; without a section: options of fedsim augment
_WANTED = {
    "seed_everything": f"a number from 0 to {2**32 - 1}",
    "trainer.precision": "32-true or bf16-mixed",
    "model.clients": "the fields of each client, such as {town0: {batch_size: 8}}",
    "model.hardware.clients": "the fields of each client, such as {town0: {up_mbit: 8}}",
    "data.generated": "settings of its own, such as --data.generated.root FOLDER",
    "data.size": "a height and a width, such as [64, 32]",
    "size": "a height and a width, such as [64, 32]",
    "clients": "a list of names, such as '[town0]'",
}
# packages that Lightning's loggers ask for -> our extra of the package's name; TensorBoard's takes either of two
_EXTRAS = {"mlflow": "mlflow", "tensorboard": "tensorboard", "tensorboardX": "tensorboard"}
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
    if (said := _said_by_others(error)) is not None:
        return Verdict(said, 2)
    if (built := _not_built(str(error))) is not None:
        return Verdict(built, 2)
    if isinstance(error, argparse.ArgumentError):
        return Verdict(f"{explain(str(error))}; fedsim {command} --help lists all options", 2)
    return None


@contextmanager
def understood(command: str, known: Iterable[str]) -> Iterator[None]:
    """Turn what the parser raises in a block into one line.

    Args:
        command: whose options are parsed.
        known: names of its options, see :func:`explain`.

    Raises:
        ConfigError: if the parser refuses something, or a module that the config names cannot be imported.
    """
    try:
        yield
    except argparse.ArgumentError as error:
        if _user_error_behind(error) is not None:
            raise
        raise ConfigError(f"{explain(str(error), known)}; fedsim {command} --help lists all options") from error
    except FedSimError:
        raise
    except Exception as error:
        file, line = _place_of(error)
        if not _is_own(file):
            raise
        raise ConfigError(
            f"{file}, line {line}: {type(error).__name__}: {error}; the config names a class of this file"
        ) from error


def parsed(parser: ArgumentParser, args: list[str]) -> Namespace:
    """Parse the options of a command, which has the name ``parser.prog``; raise ConfigError if one is wrong.

    Its help is one screen, unless all of it is asked for.
    """
    if wants_screen(parser, args):
        sys.stdout.write(f"{screen_of(parser)}\n")
        parser.exit()
    with understood(parser.prog.removeprefix("fedsim "), [action.dest for action in parser._actions]):
        return parser.parse_args(args)


def _place_of(error: Exception) -> tuple[str, int | None]:
    """Return file and line where an error was raised; of wrong syntax, where it is."""
    if isinstance(error, SyntaxError):
        return error.filename or "", error.lineno
    last = traceback.extract_tb(error.__traceback__)[-1]
    return last.filename, last.lineno


def _is_own(file: str) -> bool:
    """Return whether a file is of the user: neither of fedsim, nor of Python or an installed package."""
    installed = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
    return file.endswith(".py") and not file.startswith((*installed, str(Path(__file__).parents[1])))


def one_line(message: str, length: int = 400) -> str:
    """Squeeze a message into one line of reasonable length."""
    text = re.sub(r"\s+", " ", message).strip()
    return text if len(text) <= length else text[: length - 3] + "..."


def _not_built(message: str) -> str | None:
    """Say which class cannot be built, often for want of a package; None: it is not that."""
    if refused := re.search(r"^\s*- ((?:model|data|trainer)\.[\w.]+: .*)", message, re.MULTILINE):
        return refused[1]  # our own error, of which the parser keeps the words alone
    found = re.search(r"Problem with given class_path '([\w.]+)':\s*(.*?)(?=\n  - |\Z)", message, re.DOTALL)
    if lacks := re.search(r"Requirement '([^']*)' not met", message):
        name = found[1].rpartition(".")[2] if found else message.partition(" ")[0].strip("`")
        extra = _EXTRAS.get(re.split("[<>=]", lacks[1])[0])
        wanted = f"fedsim[{extra}]" if extra else lacks[1]
        return f"{name} needs {extra or lacks[1]}, which is not installed; run pip install '{wanted}'"
    if not message.startswith("Does not validate"):
        return None
    if found is None:  # a constructor's own words; of our classes' and the user's constructors they may be a defect
        raised = re.search(r"\nErrors:\n  - (.*?)(?=\n  - |\nGiven value)", message, re.DOTALL)
        of = re.search(r"^Given value: Namespace\(class_path='((?:lightning|torch)\.[\w.]+)'", message, re.MULTILINE)
        name, why = (of[1], raised[1]) if of and raised else ("", "")
    else:
        name, why = (found[1], found[2]) if "Option '" not in found[2] else ("", "")
    return f"{name.rpartition('.')[2]} cannot be built ({one_line(why, 240)})" if name else None


def _said_by_others(error: Exception) -> str | None:
    """Say what torch, the disk, W&B and MLflow mean; None: it is none of what they say."""
    if isinstance(error, RuntimeError) and (lost := _lost_process(str(error))) is not None:
        return lost
    if isinstance(error, OSError) and error.errno in _OF_THE_DISK:
        where = error.filename or "a file of the run"
        return f"{where}: cannot be written ({error.strerror}); make room or write to another folder"
    if type(error).__module__.startswith("wandb."):  # by name: to import it takes a second
        return f"trainer.logger: W&B says {error}; run wandb login, or set WANDB_MODE=offline"
    if type(error).__module__.startswith("mlflow."):
        said = one_line(str(error), 200)
        return f"trainer.logger: MLflow says {said}; tracking_uri names its server, or a file: sqlite:///mlflow.db"
    return None


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


def explain(message: str, known: Iterable[str] = ()) -> str:
    r"""Turn a message of the parser into one line that names the field and what it may be.

    ``known`` are names of options that there are, such as ``model.client.batch_size``.

    >>> explain('Parser key "model.threads": Expected a <class \'int\'>. Got value: many')
    'model.threads: expected int, got many'
    """
    key, what = _innermost(message)
    if not key:
        text = re.sub(r"^Subcommand '\w+' does not accept option '([^']*)'", r"\1: there is no such option", what)
        text = re.sub(r"^Value not boolean: (.*)\.$", r"save_ranking, save_maps: expected true or false, got \1", text)
        text = re.sub(r"^unrecognized arguments: (--[\w.-]+)([= ].*)?$", r"\1: there is no such option", text)
        if named := re.match(r"(-*)([\w.-]+): there is no such option$", text):
            guess = did_you_mean(_BELOW_COMMAND.sub("", named[2]), known)
            text += f"; {guess.replace('mean ', f'mean {named[1]}')}" if guess else ""
        if re.search(r"arguments are required: .*\bmodel\.", text):
            text = f"{text}; give a config that has them, such as --config quickstart"
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
    given = given or re.search(r"Got value: (\S+?)\.?(?: Got value: .*)?$", what, re.MULTILINE)
    value = given[1] if given and given[1] else "an empty text" if re.search(r"Got value: *(\.|$)", what) else "this"
    what = re.sub(r"\s+", " ", what).strip()
    if unknown := unknown_argument(what):
        return unknown
    if lacking := re.search(r"class_path '([\w.]+)': the following arguments are required: ([\w, ]+)", what):
        first = lacking[2].partition(",")[0]
        return f"{lacking[1].rpartition('.')[2]} needs {lacking[2].strip()}; give it as --{key}.{first}"
    if "Unable to load config" in what:
        return "is a section; give its fields, or a file that holds them"
    if key in _WANTED:
        if "Namespace(" in value and (inner := re.search(r"Got value: (.*?) Subclass types", what)):
            value = inner[1]  # the entry that is wrong, and not those beside it, which the parser has read
        return f"expected {_WANTED[key]}, got {value}"
    # behind it, the parser repeats the section around the value
    what = re.sub(r"\.? Got value: Namespace\(.*$", "", what)
    types = re.search(r"Subtypes: \[(.*)\] Errors: - (.*?)(?: Given value type|$)", what)
    is_number = types is not None and re.search("<class '(int|float)'>", types[1])
    if not is_number and (missing := missing_class(key, what, value)):
        return missing
    if types is not None:
        telling = [error for error in types[2].split(" - ") if not error.startswith("Expected a")]
        return f"cannot use {value} ({telling[0]})" if telling else f"expected {_readable(types[1])}, got {value}"
    if what.endswith("Got value:"):
        what += f" {value}"
    what = re.sub(r"Expected a typing\.Literal\[([^\]]*)\]\. Got value: (.*)$", r"\2 is not one of \1", what)
    what = re.sub(r"Expected a tuple with (\d+) elements\. Got value: (.*)$", r"expected \1 values, got \2", what)
    return re.sub(r"Expected a <class '([^']*)'>\. Got value: (.*)$", r"expected \1, got \2", what)


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
