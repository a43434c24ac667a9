"""Lines that gloo writes to the terminal, past Python, when torch before 2.15 connects ranks."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

_NOISE = b"[Gloo] Rank "
_STDOUT = 1
"""the descriptor to which C++ writes"""


@contextmanager
def without_gloo_lines(is_noisy: bool = True) -> Iterator[None]:
    """Drop gloo's lines on connected ranks from what a block writes to the standard output; all else follows after it.

    ``is_noisy``: False leaves the output alone.
    """
    if not is_noisy or sys.stdout is None:
        yield
        return
    sys.stdout.flush()
    with tempfile.TemporaryFile() as file:
        try:
            terminal = os.dup(_STDOUT)
        except OSError:  # it is closed
            yield
            return
        os.dup2(file.fileno(), _STDOUT)
        try:
            yield
        finally:
            sys.stdout.flush()
            os.dup2(terminal, _STDOUT)
            os.close(terminal)
            file.seek(0)
            for line in file:
                if not line.startswith(_NOISE):
                    os.write(_STDOUT, line)
