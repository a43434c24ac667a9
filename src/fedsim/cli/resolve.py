"""The settings and the data of fits, as they would begin now, for a process without torch.

``python -m fedsim.cli.resolve FILE`` reads a JSON list of command lines, without ``fedsim fit``, from standard input.
It writes a JSON list into the file: for each command its ``settings`` and the digest of its ``data``, or the ``error``.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

from fedsim.cli.app import run_command
from fedsim.cli.data.configs import data_of
from fedsim.core.errors import FedSimError
from fedsim.evaluation.summary import MAX_LISTED
from fedsim.parsing.documents import parse_yaml

_FIRST = "seed_everything:"
"""begin of the settings: a module of the user's may print before them, when it is imported"""


def resolved(words: list[str]) -> dict[str, Any]:
    """Return the settings of a fit with these options, and the digest of its data; or the error."""
    output, errors = io.StringIO(), io.StringIO()
    code = 0
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            code = run_command(["fit", *words, "--print_config"])
        except SystemExit:  # the parser's way to end
            code = 0
        if code:
            return {"error": errors.getvalue().strip()}
        settings = parse_yaml(_FIRST + output.getvalue().rpartition(f"\n{_FIRST}")[2], "the settings")
        return {"settings": settings, "data": _digest_of(json.dumps({"data": settings["data"]}))}


@cache
def _digest_of(data: str) -> str | None:
    """Return the digest of the data that a section names; None if they are not there (any more)."""
    try:
        return str(data_of(data).identity(MAX_LISTED)["digest"])
    except FedSimError:
        return None


if __name__ == "__main__":
    with open(0, encoding="utf-8") as commands:
        answer = [resolved(words) for words in json.load(commands)]
    Path(sys.argv[1]).write_text(json.dumps(answer), encoding="utf-8")
