"""The settings of fits, as the parser resolves them: ``python -m fedsim.cli.resolve`` for a process without torch.

Standard input is a JSON list of command lines, without ``fedsim fit``; the output is a JSON list with the configuration
of each, or the text of its error.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from typing import Any

from fedsim.cli.app import run_command
from fedsim.parsing.documents import parse_yaml


def resolved(words: list[str]) -> Any:
    """Return all settings of a fit with these options; a text if they are wrong."""
    output, errors = io.StringIO(), io.StringIO()
    code = 0
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            code = run_command(["fit", *words, "--print_config"])
        except SystemExit:  # the parser's way to end
            code = 0
    return errors.getvalue().strip() if code else parse_yaml(output.getvalue(), "the settings")[0]


if __name__ == "__main__":
    with open(0, encoding="utf-8") as commands:
        json.dump([resolved(words) for words in json.load(commands)], sys.stdout)
