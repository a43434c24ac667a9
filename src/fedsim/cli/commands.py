"""Commands that need no trainer: each is a module with a function ``run``, imported when the command is called.

Most are typed functions, whose arguments are the options.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from jsonargparse import ArgumentParser

from fedsim.core.errors import ConfigError
from fedsim.core.names import did_you_mean
from fedsim.papers.files import with_paper
from fedsim.parsing.config_files import join_configs, with_shipped
from fedsim.parsing.error_lines import parsed

_MODULES = {
    "augment": "fedsim.cli.augment.fit",
    "data": "fedsim.cli.data.command",
    "doctor": "fedsim.cli.doctor.command",
    "export": "fedsim.cli.export",
    "init": "fedsim.cli.init.command",
    "rank": "fedsim.cli.rank",
    "report": "fedsim.cli.report",
    "slurm": "fedsim.cli.init.slurm",
    "sweep": "fedsim.cli.sweep",
}
_FOLDERS, _CONFIGS = "fedsim.cli.data.folders", "fedsim.cli.data.configs"
GROUPS = {
    "augment": {
        "fit": "fedsim.cli.augment.fit",
        "preview": "fedsim.cli.augment.images",
        "write": "fedsim.cli.augment.images",
    },
    "data": {
        "check": _FOLDERS,
        "convert": _FOLDERS,
        "cut": _FOLDERS,
        "manifest": _CONFIGS,
        "prepare": _CONFIGS,
        "preview": _CONFIGS,
        "splits": _FOLDERS,
    },
}
"""command -> word that follows it -> the module with its function of that name"""


def plain_command(command: str, words: list[str]) -> Callable[[list[str]], str]:
    """Import the modules of ``fedsim COMMAND WORDS``; return the command: a function from words to the text to print.

    Of a group of commands, only the module of the command that the first word names is imported.
    """
    run: Callable[[list[str]], str] = import_module(_MODULES[command]).run
    if words and (module := GROUPS.get(command, {}).get(words[0])):
        import_module(module)
    return run


def run_subcommand(group: str, args: list[str]) -> str:
    """Run ``fedsim GROUP COMMAND [options]``, see :func:`call`; raise ConfigError if there is no such command."""
    modules = GROUPS[group]
    if args and args[0] in ("-h", "--help"):
        return f"usage: fedsim {group} {{{','.join(modules)}}} [options]; see fedsim {group} COMMAND --help"
    if not args or args[0] not in modules:
        named = args[0] if args else "(none)"
        remedy = did_you_mean(named, modules, f"choose from {', '.join(modules)}")
        raise ConfigError(f"fedsim {group}: there is no command {named}; {remedy}")
    command: Callable[..., str] = getattr(import_module(modules[args[0]]), args[0])
    return call(command, join_configs(with_shipped(with_paper(args[1:]))), f"{group} {args[0]}")


def add_options(
    parser: ArgumentParser, function: Callable[..., Any], flags: Sequence[str], skip: Sequence[str] = ()
) -> None:
    """Add a function's arguments as options, with the texts of its docstring; ``flags`` take no value."""
    from docstring_parser import parse  # slow to import

    texts = {argument.arg_name: argument.description or "" for argument in parse(function.__doc__ or "").params}
    parser.add_function_arguments(function, skip={*skip, *flags})
    for name in flags:
        parser.add_argument(f"--{name}", action="store_true", help=" ".join(texts[name].split()).rstrip("."))


def with_option(args: list[str], option: str) -> list[str]:
    """Return words in which the first has the name of its option, which may be left out."""
    return [option, *args] if args and not args[0].startswith("-") else args


def call(command: Callable[..., Any], args: list[str], name: str) -> str:
    """Parse the options of ``fedsim NAME``, which are a typed function's arguments; return the function's text."""
    # not jsonargparse's auto_cli, which reserves the argument config
    description = (command.__doc__ or "").partition("\n\n    Args:")[0]
    parser = ArgumentParser(exit_on_error=False, allow_abbrev=False, prog=f"fedsim {name}", description=description)
    parser.add_function_arguments(command, as_group=False)
    return str(command(**parsed(parser, args).as_dict()) or "")
