"""Commands that need only the table of settings, and not torch: short help, lists, shell completion."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Mapping

from fedsim.core.errors import ConfigError
from fedsim.core.extras import load_extra
from fedsim.parsing.options import all_options
from fedsim.parsing.short_help import classes_of, kinds, short_help
from fedsim.parsing.short_help import run as run_list
from fedsim.settings.options import WITH_TRAINER

_SHELLS = ("bash", "zsh", "tcsh")
_PATHS = ("FILE", "FOLDER", "RUN_DIR")
"""forms of values that are names of files"""


def run_light(args: list[str], commands: Mapping[str, str]) -> str:
    """Run a command that needs no torch; ``commands``: name -> description. Return the text to print."""
    command, *words = args
    if command == "list":
        return run_list(words)
    return completion(words, commands) if command == "completion" else short_help(command, commands[command])


def completion(words: list[str], commands: Mapping[str, str]) -> str:
    """Return a script that completes commands, options, classes and files in a shell.

    Raises:
        ConfigError: if the shell is unknown, or shtab is not installed.
    """
    if words[:1] in (["-h"], ["--help"]):
        return f"usage: fedsim completion {{{' | '.join(_SHELLS)}}}: {commands['completion']}"
    if len(words) != 1 or words[0] not in _SHELLS:
        raise ConfigError(f"fedsim completion: name your shell, one of {', '.join(_SHELLS)}")
    shtab = load_extra("shtab", "fedsim completion", "completion")
    from fedsim.cli.commands import GROUPS  # which imports the parser of commands: a fifth of a second

    parser = ArgumentParser(prog="fedsim", allow_abbrev=False)
    subparsers = parser.add_subparsers()
    for command, description in commands.items():
        subparser = subparsers.add_parser(command, help=description, add_help=command not in WITH_TRAINER)
        if command == "list":
            subparser.add_argument("kind", choices=[*kinds(), "configs"])
        elif command == "completion":
            subparser.add_argument("shell", choices=_SHELLS)
        elif command in GROUPS:
            subparser.add_argument("command", choices=[*GROUPS[command]])
        for name, setting in all_options(command).items() if command in WITH_TRAINER else ():
            choices = [cls.name for cls in classes_of(name)] if setting.facts.kind else None
            option = subparser.add_argument(f"--{name}", choices=choices)
            if setting.facts.usage in _PATHS or setting.facts.is_file:
                option.complete = shtab.FILE  # type: ignore[attr-defined] # shtab reads this attribute
    return str(shtab.complete(parser, shell=words[0]))
