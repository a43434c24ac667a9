"""Errors of a user's module as one line, with the place in the user's code."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb

from fedsim.core.errors import ConfigError, FedSimError
from fedsim.core.names import one_line

_NOT_USERS = {
    "fedsim", "lightning", "lightning_fabric", "lightning_utilities", "pytorch_lightning", "torch",
    *sys.stdlib_module_names,
}  # fmt: skip
"""packages whose lines say nothing of a fault in a user's module"""


def named(module: object) -> str:
    """Return the beginning of an error line about a module."""
    return f"model.module: {type(module).__name__}"


@contextmanager
def in_one_line(name: str, activity: str, remedy: Callable[[Exception], str] = lambda _: "") -> Iterator[None]:
    """Report errors of the user's code, and of Lightning about it, as a ConfigError.

    ``name`` is the module's class; ``remedy`` returns the end of the line.
    """
    try:
        yield
    except FedSimError:
        raise
    except Exception as error:
        reason = f": {text}" if (text := one_line(str(error), 200)) else ""
        frames = users_frames(error)
        place = f" at {frames[-1][0]}" if frames else ""
        raise ConfigError(
            f"model.module: {name} failed in {activity} ({type(error).__name__}{reason}{place}){remedy(error)}"
        ) from error


def users_frames(error: Exception) -> list[tuple[str, str]]:
    """Return file with line, and function, of an error's frames in the user's code, the innermost last."""
    frames = [
        (frame.f_code, str(frame.f_globals.get("__name__")), line) for frame, line in walk_tb(error.__traceback__)
    ]
    return [
        (f"{Path(code.co_filename).name}:{line}", code.co_name)
        for code, module, line in frames if module.partition(".")[0] not in _NOT_USERS
    ]  # fmt: skip
