"""``fedsim data ...``: typed functions, whose arguments are the options."""

from __future__ import annotations

from fedsim.cli.commands import run_subcommand

_FOLDER = {"check": "--root", "splits": "--folder"}  # the option that may be given without its name


def run(args: list[str]) -> str:
    """Run ``fedsim data COMMAND [options]``, and return the text to print."""
    if len(args) > 1 and args[0] in _FOLDER and not args[1].startswith("-"):
        args = [args[0], _FOLDER[args[0]], *args[1:]]
    return run_subcommand("data", args)
