"""From exceptions to one line that names a field or file and says what to do."""

from __future__ import annotations

import argparse
import errno
import re
import signal
from typing import NamedTuple

from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedsim.core.errors import DrawsFailedError, FedSimError, RunStoppedError
from fedsim.data.images import ReIDSource
from fedsim.method import Method
from fedsim.models.backbones import Backbone
from fedsim.privacy import Privacy
from fedsim.selection import Selection

__all__ = ["Verdict", "explain", "lost_peer", "lost_reader", "one_line", "user_error_behind", "verdict_on"]

# settings that are classes -> their base; for the list in the message about a wrong name
_CLASSES = {
    "model.method": Method,
    "model.backbone": Backbone,
    "model.selection": Selection,
    "model.privacy": Privacy,
    "data.source": ReIDSource,
}


_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)


class Verdict(NamedTuple):
    """How a command ends that did not do what it should."""

    message: str
    code: int
    """of the process"""


def verdict_on(error: BaseException, command: str) -> Verdict | None:
    """Say what people should read about an exception; None: it is a defect of fedsim, or an orderly exit.

    Args:
        error: what came out of a command.
        command: its name.
    """
    if isinstance(error, RunStoppedError):
        return Verdict(str(error), 128 + error.signum)
    if isinstance(error, KeyboardInterrupt) or isinstance(error.__context__, KeyboardInterrupt):  # Lightning exits
        return Verdict("interrupted", 128 + signal.SIGINT)
    if not isinstance(error, Exception):
        return None
    if isinstance(error, FedSimError | MisconfigurationException):
        return Verdict(str(error), 1 if isinstance(error, DrawsFailedError) else 2)
    if (cause := user_error_behind(error)) is not None:  # behind what the parser and torch make of it
        return Verdict(str(cause), 2)
    if (lost := lost_peer(error) or lost_reader(error)) is not None:
        return Verdict(lost, 2)
    if isinstance(error, OSError) and error.errno in _OF_THE_DISK:
        where = error.filename or "a file of the run"
        return Verdict(f"{where}: cannot be written ({error.strerror}); make room or write to another folder", 2)
    if type(error).__module__.startswith("wandb."):  # by name: to import it takes a second
        return Verdict(f"trainer.logger: W&B says {error}; run wandb login, or set WANDB_MODE=offline", 2)
    if isinstance(error, argparse.ArgumentError):
        return Verdict(f"{explain(str(error))}; fedsim {command} --help lists all options", 2)
    return None


def one_line(message: str) -> str:
    """Squeeze a message into one line of reasonable length."""
    text = re.sub(r"\s+", " ", message).strip()
    return text if len(text) <= 400 else text[:397] + "..."


def lost_peer(error: BaseException) -> str | None:
    """Say what gloo and NCCL mean when a collective breaks because a process is gone; None for other errors."""
    signs = "connection (closed|reset) by peer|broken pipe|remote process exited|ncclRemoteError|Timed out waiting"
    if isinstance(error, RuntimeError) and re.search(signs, str(error), re.IGNORECASE):
        return f"another rank ended without a word, or did not answer in time ({str(error)[:120]})"
    return None


def lost_reader(error: BaseException) -> str | None:
    """Say what the DataLoader means when one of its processes is gone; None for other errors."""
    if not (isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker (pid")):
        return None
    what = str(error).partition(". ")[0]
    return (
        f"data.workers: a process that reads images was ended from outside ({what}); "
        "if memory ran out, be it that of /dev/shm, set fewer"
    )


def user_error_behind(error: BaseException | None) -> FedSimError | None:
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
    text = one_line(message)
    text = re.sub(r"^Parser key [\"']([^\"']*)[\"']:\s*", r"\1: ", text)
    text = re.sub(r"\b(fit|validate|test|predict|describe)\.(?=model|data|trainer)", "", text)
    text = re.sub(r"^Subcommand '\w+' does not accept option '([^']*)'", r"\1: there is no such option", text)
    key = text.partition(":")[0]
    if re.search(r"arguments are required: .*\bmodel\.", text):
        return f"{text}; give a config that has them, such as --config configs/quickstart.yaml"
    if key == "data.generated" and "import path" in text:
        return f"{key}: expected settings of its own; for a folder of images give --data.generated.root FOLDER"
    for field, base in _CLASSES.items():
        if key.startswith(field) and "import path" in text:
            wrong = re.search(r"path string: (\S+)", text)
            name = f"there is no class {wrong[1]}" if wrong else "not a known class"
            return f"{key}: {name}; choose from {', '.join(_names(base))}, or give the class_path of your own"
    if union := re.search(r"Union subtypes.*?Errors: - (.*?) (?:- |Given value type).*Given value: (.*)$", text):
        text = f"{key}: cannot use {union[2]} ({union[1]})"
    if unknown := re.search(r"Option '([^']*)' is not accepted", message):
        text = f"{key}: there is no option {unknown[1]} here"
    text = re.sub(r"Expected a typing\.Literal\[([^\]]*)\]\. Got value: (\S+)", r"\2 is not one of \1", text)
    return re.sub(r"Expected a <class '([^']*)'>\. Got value: (.*)$", r"expected \1, got \2", text)


def _names(base: type) -> list[str]:
    """Names of fedsim's own classes for a setting."""
    found = [base]
    for cls in found:
        found += cls.__subclasses__()
    own = {cls.__name__ for cls in found if cls.__module__.startswith("fedsim.") and not cls.__name__.startswith("_")}
    return sorted(own - {base.__name__})
