"""Commands that need no trainer: each is a module with a function ``run``, imported when the command is called.

Most are typed functions, whose arguments are the options.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from importlib import import_module
from typing import Any

from jsonargparse import ArgumentParser

from fedsim.cli.config_files import join_configs, with_shipped
from fedsim.cli.papers.files import with_paper
from fedsim.cli.verdicts import parsed
from fedsim.core.errors import ConfigError

_MODULES = {
    "augment": "fedsim.cli.augment.command",
    "data": "fedsim.cli.data",
    "doctor": "fedsim.cli.doctor.command",
    "export": "fedsim.cli.export",
    "init": "fedsim.cli.init",
    "rank": "fedsim.cli.rank",
    "report": "fedsim.cli.report.command",
    "sweep": "fedsim.cli.sweep.command",
}


def plain_command(command: str) -> Callable[[list[str]], str]:
    """Import a command; it takes the words that follow its name, and returns what is to be printed."""
    run: Callable[[list[str]], str] = import_module(_MODULES[command]).run
    return run


def run_subcommand(group: str, commands: Mapping[str, Callable[..., str]], args: list[str]) -> str:
    """Run ``fedsim GROUP COMMAND [options]``, see :func:`call`; raise ConfigError if there is no such command."""
    if args and args[0] in ("-h", "--help"):
        return f"usage: fedsim {group} {{{','.join(commands)}}} [options]; fedsim {group} COMMAND --help says more"
    if not args or args[0] not in commands:
        close = get_close_matches(args[0], commands, n=1) if args else []
        guess = f"did you mean {close[0]}? " if close else ""
        raise ConfigError(
            f"fedsim {group}: there is no command {args[0] if args else '(none)'}; {guess}"
            f"choose from {', '.join(commands)}"
        )
    return call(commands[args[0]], join_configs(with_shipped(with_paper(args[1:]))), f"{group} {args[0]}")


def call(command: Callable[..., Any], args: list[str], name: str) -> str:
    """Parse the options of ``fedsim NAME``, which are a typed function's arguments; return what the function says."""
    # not jsonargparse's auto_cli: that keeps an argument called config for itself
    description = (command.__doc__ or "").partition("\n\n    Args:")[0]
    parser = ArgumentParser(exit_on_error=False, allow_abbrev=False, prog=f"fedsim {name}", description=description)
    parser.add_function_arguments(command, as_group=False)
    return str(command(**parsed(parser, args).as_dict()) or "")
