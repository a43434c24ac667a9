"""Translate exceptions into one line with the field or file, the problem and the remedy."""

from __future__ import annotations

import argparse
import errno
import itertools
import os
import re
import signal
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from jsonargparse import ArgumentParser, Namespace

from fedsim.core.errors import (
    ConfigError,
    FedSimError,
    NoResultError,
    NotReadyError,
    RunsFailedError,
    RunStoppedError,
    StopSignal,
)
from fedsim.core.extras import to_install
from fedsim.core.names import check_filled, did_you_mean, one_line
from fedsim.parsing.class_names import missing_class, unknown_argument, without_class
from fedsim.parsing.command_line import options_in
from fedsim.parsing.config_files import shipped_configs
from fedsim.parsing.options import refuse_base_60, where_all
from fedsim.parsing.output import print_text
from fedsim.parsing.short_help import needs_short_help, screen_of
from fedsim.settings.gone import line_of_gone
from fedsim.settings.options import SCORING
from fedsim.settings.table import setting_at

# package that a logger of Lightning requires -> fedsim's extra; TensorBoardLogger accepts either of two packages
_EXTRAS = {"mlflow": "mlflow", "tensorboard": "tensorboard", "tensorboardX": "tensorboard", "wandb": "wandb"}
_BELOW_COMMAND = re.compile(r"\b(fit|validate|test|predict|describe)\.(?=model|data|trainer)")
_MAY_EXIT = "argparse.py", "jsonargparse", "fedsim"
"""files and packages that end the process in order"""
_WITHOUT_FAULT = RunsFailedError, NotReadyError, NoResultError
"""errors of a command that was right, and yet gave no result: exit code 1"""
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_OF_FILES = {
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM),
        "give yourself the right to read it, and to write where results go, or name another place",
    ),
    **dict.fromkeys(
        (errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ELOOP),
        "something of another kind is in the place of a file or folder; move it away",
    ),
    errno.ENOENT: "was it moved or removed meanwhile?",
}
"""errors of a file that has a name"""
_LIMITS = {
    errno.EMFILE: "this process may open no more files; raise the limit, such as with ulimit -n 4096",
    errno.ENFILE: "this machine may open no more files; end other programs",
    errno.EAGAIN: "this user may start no more processes or threads; raise the limit (ulimit -u), or set fewer "
    "trainer.devices and data.workers",
    errno.ENAMETOOLONG: "a name of a file or folder is too long; give a shorter one, or a shorter path",
}
_NEEDS_CONFIG = "give a config with these fields, such as --config quickstart"
_LONGEST = 440
"""characters of a line, in which the names of all methods have room"""
_RESTORES = "checkpoint_connector.py"
"""file of Lightning that gives each part of a checkpoint to its owner"""


class CommandFailure(NamedTuple):
    """The end of a command that failed."""

    message: str
    """for the user"""
    code: int
    """exit code of the process"""


def failure_of(error: BaseException, command: str) -> CommandFailure | None:
    """Return message and exit code for a command's exception; None for a defect of fedsim and for an orderly exit."""
    if isinstance(error, RunStoppedError | StopSignal):
        return CommandFailure(str(error), 128 + error.signum)
    # Lightning raises SystemExit on Ctrl-C
    if isinstance(error, KeyboardInterrupt) or isinstance(error.__context__, KeyboardInterrupt):
        return CommandFailure("interrupted", 128 + signal.SIGINT)
    if isinstance(error, SystemExit) and (location := _foreign_exit(error)) is not None:
        return CommandFailure(
            f"{location}: asked the process to exit (code {error.code}); let it raise an error instead", 2
        )
    if not isinstance(error, Exception):
        return None
    of_lightning = "MisconfigurationException"  # by name: not every command imports Lightning
    if isinstance(error, FedSimError) or of_lightning in [cls.__name__ for cls in type(error).__mro__]:
        return CommandFailure(str(error), 1 if isinstance(error, _WITHOUT_FAULT) else 2)
    if (cause := _user_error_behind(error)) is not None:  # the parser and torch wrap it
        return CommandFailure(str(cause), 2)
    if (message := _library_error(error)) is not None:
        return CommandFailure(message, 2)
    if (message := _not_built(str(error))) is not None:
        return CommandFailure(message, 2)
    if isinstance(error, argparse.ArgumentError):
        return CommandFailure(f"{explain(str(error))}; {where_all(command)}", 2)
    return None


def _foreign_exit(error: SystemExit) -> str | None:
    """Return file and line of the code that asked for an exit; None for the parser's own exit, after its help."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).name not in ("_sitebuiltins.py", "exit_hooks.py")  # the second is W&B's around sys.exit
    ]
    if not frames or any(name in Path(frames[-1].filename).parts for name in _MAY_EXIT):
        return None
    return f"{frames[-1].filename}, line {frames[-1].lineno}"


@contextmanager
def parser_errors_explained(command: str, option_names: Iterable[str]) -> Iterator[None]:
    """Translate the parser's exceptions in a ``with`` block into errors of one line.

    Args:
        command: the command whose options are parsed.
        option_names: names of its options, see :func:`explain`.

    Raises:
        ConfigError: if the parser rejects a value, or a module that the config names cannot be imported.
    """
    try:
        yield
    except argparse.ArgumentError as error:
        if _user_error_behind(error) is not None:
            raise
        message = explain(str(error), option_names)
        if command in SCORING:
            message = message.replace(_NEEDS_CONFIG, "give the run to score, such as --ckpt_path runs/fedpav-seed0")
        raise ConfigError(f"{message}; {where_all(command)}") from error
    except FedSimError:
        raise
    except Exception as error:
        file, line_number = _place_of(error)
        installed = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
        if not file.endswith(".py") or file.startswith((*installed, str(Path(__file__).parents[1]))):
            raise  # not the user's: part of fedsim, Python or an installed package
        raise ConfigError(
            f"{file}, line {line_number}: {type(error).__name__}: {error}; the config names a class of this file"
        ) from error


def parsed(parser: ArgumentParser, args: list[str], start: Namespace | None = None) -> Namespace:
    """Parse the options of the command ``parser.prog``, over those of ``start``; raise ConfigError if one is wrong.

    ``--help`` prints one screen, ``--help all`` everything.
    """
    if needs_short_help(parser, args):
        print_text(screen_of(parser))
        parser.exit()
    for before, word in itertools.pairwise(["", *args]):  # before the parser, which names no empty text
        option, sign, value_text = word.partition("=") if word.startswith("--") else (before, "=", word)
        if sign and option.startswith("--"):
            check_filled(value_text, option)
    assert parser.prog.startswith("fedsim "), f"{parser.prog} is no command of a message"
    with parser_errors_explained(parser.prog.removeprefix("fedsim "), [action.dest for action in parser._actions]):
        values = parser.parse_args(args, start)
    for action in parser._actions:
        if (value := values.get(action.dest)) != action.default:  # also of a list, and without an option
            check_filled(value, f"--{action.dest}" if action.option_strings else action.dest)
    for option, value_text in options_in(args):
        if isinstance(values.get(option), int | float):
            refuse_base_60(value_text, f"--{option}")
    return values


def _place_of(error: Exception) -> tuple[str, int | None]:
    """Return the file and line that raised an error; for a SyntaxError, the place of the wrong syntax."""
    if isinstance(error, SyntaxError):
        return error.filename or "", error.lineno
    last = traceback.extract_tb(error.__traceback__)[-1]
    return last.filename, last.lineno


def _not_built(message: str) -> str | None:
    """Error line for a class that cannot be built, often because of a missing package; None for other errors."""
    if refused := re.search(r"^\s*- ((?:model|data|trainer)\.[\w.]+: .*)", message, re.MULTILINE):
        return refused[1]  # an error of fedsim, of which the parser keeps only the message
    problem = re.search(r"Problem with given class_path '([\w.]+)':\s*(.*?)(?=\n  - |\Z)", message, re.DOTALL)
    if requirement := re.search(r"Requirement '([^']*)' not met", message):
        name = problem[1].rpartition(".")[2] if problem else message.partition(" ")[0].strip("`")
        extra = _EXTRAS.get(re.split("[<>=]", requirement[1])[0])
        command = to_install(extra) if extra else f"pip install '{requirement[1]}'"
        return f"{name} needs {extra or requirement[1]}, which is not installed; run {command}"
    if not message.startswith("Does not validate"):
        return None
    if problem is None:  # a constructor's message; one of fedsim's or the user's classes may be a defect
        raised = re.search(r"\nErrors:\n  - (.*?)(?=\n  - |\nGiven value)", message, re.DOTALL)
        path = re.search(r"^Given value: Namespace\(class_path='((?:lightning|torch)\.[\w.]+)'", message, re.MULTILINE)
        name, reason = (path[1], raised[1]) if path and raised else ("", "")
    else:
        name, reason = (problem[1], problem[2]) if "Option '" not in problem[2] else ("", "")
    return f"{name.rpartition('.')[2]} cannot be built ({one_line(reason, 240)})" if name else None


def _library_error(error: Exception) -> str | None:
    """Translate errors of torch, the OS, W&B and MLflow into one line; None for others."""
    if isinstance(error, RuntimeError) and (lost := _lost_process(str(error))) is not None:
        return lost
    if isinstance(error, RuntimeError) and str(error).startswith("Could not determine home directory"):
        return "HOME: is not set, and this user has no account on this machine; export HOME=FOLDER"
    if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
        path = error.filename or "a file of the run"
        return f"{path}: cannot be written ({error.strerror}); make room or write to another folder"
    if isinstance(error, OSError) and error.errno in _OF_FILES and isinstance(error.filename, str | bytes):
        return f"{os.fsdecode(error.filename2 or error.filename)}: {error.strerror}; {_OF_FILES[error.errno]}"
    if isinstance(error, OSError) and error.errno in _LIMITS:
        return f"{error.strerror}: {_LIMITS[error.errno]}"
    if any(frame.filename.endswith(_RESTORES) for frame in traceback.extract_tb(error.__traceback__)):
        reason = f"{type(error).__name__}: {one_line(str(error), 160)}"
        return f"ckpt_path: the checkpoint cannot be restored ({reason}); copy it again, or give another one"
    if type(error).__module__.startswith("wandb."):  # by name: importing W&B takes a second
        return f"trainer.logger: W&B failed ({error}); run wandb login, or set WANDB_MODE=offline"
    if type(error).__module__.startswith("mlflow."):
        reason = one_line(str(error), 200)
        return f"trainer.logger: MLflow failed ({reason}); set tracking_uri to its server, or to sqlite:///mlflow.db"
    return None


def _lost_process(message: str) -> str | None:
    """Error line for messages of gloo, NCCL and the DataLoader about a lost process; None for other messages."""
    signs = "connection (closed|reset) by peer|broken pipe|remote process exited|ncclRemoteError|Timed out waiting"
    if re.search(signs, message, re.IGNORECASE):
        return f"another rank ended without an error message, or did not answer in time ({message[:120]})"
    if message.startswith("DataLoader worker (pid"):
        return (
            f"data.workers: a worker process was killed ({message.partition('. ')[0]}); "
            "if memory or /dev/shm is full, set fewer workers"
        )
    return None


def _user_error_behind(error: BaseException | None) -> FedSimError | None:
    """Find fedsim's error among those that the parser wraps around an error of a constructor."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, FedSimError):
            return error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None


def explain(message: str, option_names: Iterable[str] = ()) -> str:
    r"""Rewrite a message of the parser as one line with the field and its valid values.

    ``option_names`` are the command's options, such as ``model.client.batch_size``, for a suggestion.

    >>> explain('Parser key "model.threads": Expected a <class \'int\'>. Got value: many')
    'model.threads: expected int, got many'
    """
    key, problem = _innermost(message)
    if not key:
        unknown = r"^(?:Subcommand '\w+' does not accept option|Option) '([^']*)'(?: is not accepted)?"
        text = re.sub(unknown, r"\1: there is no such option", problem)
        text = re.sub(r'^Linked "(.+)" must be given via "(.+)"\.$', r"\1: is no option; give \2", text)
        text = re.sub(r"^argument \w+\((.+)\) --> (.+?): invalid .*$", r"\2: is no option; give \1", text)
        text = re.sub(r"^Value not boolean: (.*)\.$", r"save_ranking, save_maps: expected true or false, got \1", text)
        text = re.sub(r"^unrecognized arguments: (--[\w.-]+)([= ].*)?$", r"\1: there is no such option", text)
        if named := re.match(r"(-*)([\w.-]+): there is no such option$", text):
            name = _BELOW_COMMAND.sub("", named[2])
            section, _, last = name.rpartition(".")
            if gone := line_of_gone(last):
                return f"{section}: {gone}"
            guess = did_you_mean(name, option_names, prefix=named[1])
            text += f"; {guess}" if guess else ""
        if re.search(r"arguments are required: .*\bmodel\.", text):
            text = f"{text}; {_NEEDS_CONFIG}"
        if (extra := re.match(r"unrecognized arguments: (\S+)", text)) and extra[1] in shipped_configs():
            text = f"{extra[1]}: is no option; did you mean --config {extra[1]}?"
        return one_line(_BELOW_COMMAND.sub("", text), _LONGEST)
    return one_line(f"{key}: {_field_problem(key, problem)}", _LONGEST)


def _innermost(message: str) -> tuple[str, str]:
    r"""Return the innermost field that a message of the parser names, and the part of the message about it.

    >>> _innermost('Parser key "a": Type A expects: Parser key "b":\n  - Expected a path')
    ('a.b', '\n  - Expected a path')
    """
    key, start, line_start, column = "", 0, 0, -1
    for match in re.finditer(r"Parser key [\"']([^\"']*)[\"']:", message):
        begin = message.rfind("\n", 0, match.start()) + 1
        if match.start() - begin <= column:  # about another type that the parser tried for the value
            break
        start, line_start, column = match.end(), begin, match.start() - begin
        key = match[1] if not key or match[1].startswith(key) else f"{key}.{match[1]}"
    first, *lines = message[start:].split("\n")
    if line_start > 0:  # lines about the enclosing fields follow, less indented
        indent = _indent(message[line_start:])
        lines = list(itertools.takewhile(lambda text: not text or _indent(text) > indent, lines))
    return _BELOW_COMMAND.sub("", key), "\n".join([first, *lines])


def _indent(text: str) -> int:
    return len(text) - len(text.lstrip(" "))


def _field_problem(key: str, message: str) -> str:
    match = re.search(r"Given value: (.*?)(?:\. Got value: .*)?$", message, re.MULTILINE)
    match = match or re.search(r"Got value: (\S+?)\.?(?: Got value: .*)?$", message, re.MULTILINE)
    match = match or re.search(r"Expected a <class '\w+'>\. Got value: ([^\n]{1,80})$", message)
    is_empty = re.search(r"Got value: *(\.|$)", message) is not None
    value = match[1] if match and match[1] else "an empty text" if is_empty else "this"
    message = re.sub(r"\s+", " ", message).strip()
    if unknown := unknown_argument(key, message) or _not_finite(message, value):
        return unknown
    if lacking := re.search(r"class_path '([\w.]+)': the following arguments are required: ([\w, ]+)", message):
        first = lacking[2].partition(",")[0]
        return f"{lacking[1].rpartition('.')[2]} needs {lacking[2].strip()}; give it as --{key}.{first}"
    if argument := re.search(r"Dict must include a class_path .* but got NestedArg\(key='(.*?)',", message):
        return without_class(key, argument[1])
    if "Unable to load config" in message:
        return "is a section; give its fields, or a file that contains them"
    if expected := setting_at(key).facts.expected:
        if "Namespace(" in value and (inner := re.search(r"Got value: (.*?) Subclass types", message)):
            value = inner[1]  # only the wrong entry, without the valid ones next to it
        value = re.sub(r"NestedArg\(key='(.*?)', val='?(.*?)'?\)$", r"{\1: \2}", value)
        return f"expected {expected}, got {value}"
    # at the end, the parser repeats the section around the value
    message = re.sub(r"\.? Got value: Namespace\(.*$", "", message)
    types = re.search(r"Subtypes: \[(.*)\] Errors: - (.*?)(?: Given value type|$)", message)
    is_number = types is not None and re.search("<class '(int|float)'>", types[1])
    takes_class = re.search("valid subclass|import path", message)
    is_number = is_number or (not takes_class and re.search("Expected a <class '(int|float|bool)'>", message))
    if not is_number and (missing := missing_class(key, message, value)):
        return missing
    if types is not None:
        reasons = [error for error in types[2].split(" - ") if not error.startswith("Expected a")]
        return f"cannot use {value} ({reasons[0]})" if reasons else f"expected {_readable(types[1])}, got {value}"
    if message.endswith("Got value:"):
        message += f" {value}"
    message = re.sub(r"Expected a typing\.Literal\[([^\]]*)\]\. Got value: (.*)$", r"\2 is not one of \1", message)
    message = re.sub(r"Expected a tuple with (\d+) elements\. Got value: (.*)$", r"expected \1 values, got \2", message)
    return re.sub(r"Expected a <class '([^']*)'>\. Got value: (.*)$", r"expected \1, got \2", message)


def _not_finite(message: str, value: str) -> str:
    """Return the problem of a value that the parser does not take for a number, as it is not finite; else nothing."""
    is_one = "float" in message and value.lower().lstrip("+-.") in ("nan", "inf", "infinity")
    return f"{value} is no finite number" if is_one else ""


def _readable(types: str) -> str:
    """Return a list of Python types in a readable form.

    >>> _readable("<class 'int'>, typing.Literal['a', 'b'], list[torch.nn.Module], <class 'NoneType'>")
    "int, 'a', 'b', list[Module] or null"
    """
    types = re.sub(r"<class '([^']*)'>", r"\1", types)
    types = re.sub(r"typing\.Literal\[([^\]]*)\]", r"\1", types)
    types = re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", types).replace("NoneType", "null")
    return re.sub(r", ([^,\[\]]*)$", r" or \1", types)
