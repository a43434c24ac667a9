"""``fedsim data ...``: typed functions, whose arguments are the options."""

from __future__ import annotations

from importlib import import_module

from fedsim.cli.commands import call, run_subcommand, with_option
from fedsim.core.errors import ConfigError

_FOLDER = {"check": "--root", "splits": "--folder"}  # the option that may be given without its name
_OF_SOURCES = ("check", "preview")  # the commands that also take settings of the section data
_SETTING = "--data."


def run(args: list[str]) -> str:
    """Run ``fedsim data COMMAND [options]``, and return the text to print."""
    if args and args[0] in _FOLDER:
        args = [args[0], *with_option(args[1:], _FOLDER[args[0]])]
    settings, remaining = split_settings(args)
    if not settings:
        return run_subcommand("data", args)
    if args[0] not in _OF_SOURCES:
        option = settings[0].partition("=")[0]
        raise ConfigError(f"fedsim data {args[0]}: takes no {option}; write it into a file for --config")
    command = getattr(import_module("fedsim.cli.data.configs"), f"{remaining[0]}_source_of")
    return call(command(settings), remaining[1:], f"data {remaining[0]}")


def split_settings(args: list[str]) -> tuple[list[str], list[str]]:
    """Return the words of settings of the section data, with their values, and all other words.

    >>> split_settings(["check", "--data.source", "own.Table", "--picture", "a.png", "--data.source.table=b.csv"])
    (['--data.source', 'own.Table', '--data.source.table=b.csv'], ['check', '--picture', 'a.png'])
    """
    settings: list[str] = []
    remaining: list[str] = []
    for position, word in enumerate(args):
        last = args[position - 1] if position else ""
        is_value = last.startswith(_SETTING) and "=" not in last and not word.startswith("--")
        (settings if word.startswith(_SETTING) or is_value else remaining).append(word)
    return settings, remaining
