"""Output to the terminal; each rank of a run is a separate process."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress

from fedsim.core.errors import DataError
from fedsim.core.names import one_line

_RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")


def rank_of_this_process() -> int:
    """This process's rank, also before process groups exist or Lightning is imported."""
    lightning = sys.modules.get("lightning.fabric.utilities.rank_zero")
    if lightning is not None:  # initialised from the same variables, and kept up to date
        return int(lightning.rank_zero_only.rank)
    texts = (os.environ.get(name, "").strip() for name in _RANKS)
    return next((int(value_text) for value_text in texts if value_text.isascii() and value_text.isdecimal()), 0)


def print_error(message: str) -> None:
    """Write the line of an error, whatever the message holds: users' words, paths and values may have line ends."""
    sys.stderr.write(f"fedsim: error: {one_line(message)}\n")


def print_text(text: str) -> None:
    """Print a command's output immediately.

    Without a reader the rest is lost, as it is meant (``fedsim report ... | head``), and the command goes on.

    Raises:
        DataError: if it cannot be written, as on a full disk.
    """
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        _discard()
    except OSError as error:
        _discard()
        raise DataError(f"the output: cannot be written ({error.strerror}); write it to another place") from error


def prepare_output() -> None:
    """Let streams write each character that their encoding lacks as its number, such as ``#f6``, not as an error.

    Streams that the shell has closed (``>&-``) become /dev/null.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - as long as the process
        elif isinstance(stream, io.TextIOWrapper):
            with suppress(OSError, ValueError):  # closed, or with a reader that has ended: the next text shows that
                stream.reconfigure(errors="backslashreplace")


def end_output() -> None:
    """Write the rest, such as an option's help; without a reader it is lost."""
    try:
        sys.stdout.flush()
    except OSError:
        _discard()


def _discard() -> None:
    """Redirect stdout to /dev/null: flushing its buffer at exit would fail again, with exit code 120."""
    with suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
