"""Help on one screen: the usual options of commands that train or score, all options of other commands in brief.

And ``fedsim list``: the classes that a config can name, with one line each, from the table of settings.
"""

from __future__ import annotations

import shutil
import textwrap
from argparse import SUPPRESS, Action, ArgumentParser
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from fedsim.core.errors import ConfigError
from fedsim.core.names import did_you_mean
from fedsim.parsing.config_files import shipped_configs
from fedsim.parsing.options import own_options
from fedsim.settings.table import KnownClass, Setting, argument_of, classes_below, section, setting_at, walk

SCREEN = 62
"""Number of lines that fit on one screen."""
_WIDTH = 118
_COLUMN = 38


def short_help(command: str, summary: str) -> str:
    """Return the help of a command on one screen; ``summary`` describes the command in one line."""
    usual = {
        name: setting
        for name, setting in own_options(command).items()
        if command in (setting.facts.commands or (command,))
    }
    usual |= {f"trainer.{name}": setting for name, setting in section("trainer").arguments.items()}
    lines = [f"usage: fedsim {command} --config FILE [options]: {summary}", "", *_lines(usual)]
    for name in ("model", "data"):
        options = {option: setting for option, setting in _with_arguments() if option.startswith(f"{name}.")}
        lines += ["", *_lines(options), *_others(name)]
    lines += [
        "",
        *_others("trainer"),
        "",
        f"fedsim {command} --help all           all options with their fields",
        f"fedsim {command} --model.method.help FedPav   options of a class; fedsim list: all classes",
    ]
    return "\n".join(lines)


def _with_arguments() -> Iterator[tuple[str, Setting]]:
    """Yield all settings, and the arguments of a class that one takes by default."""
    for option, setting in walk():
        yield option, setting
        made = setting.default.get("init_args", {}) if isinstance(setting.default, dict) else {}
        for name, default in made.items():
            yield f"{option}.{name}", replace(argument_of(setting.base, name), default=default)


def _lines(settings: Mapping[str, Setting]) -> Iterator[str]:
    for option, setting in settings.items():
        if setting.facts.usage is not None:
            is_number = isinstance(setting.default, int | float | list) and not isinstance(setting.default, bool)
            default = f" (default: {setting.default})" if is_number else ""
            text = textwrap.shorten(setting.text.rstrip("."), _WIDTH - _COLUMN - 2 - len(default), placeholder=" ...")
            yield f"  {f'--{option} {setting.facts.usage}':<{_COLUMN}}{text}{default}"


def _others(name: str) -> list[str]:
    names = [field for field, setting in section(name).arguments.items() if setting.facts.usage is None]
    return textwrap.wrap(f"  --{name}. also has {', '.join(names)}", _WIDTH, subsequent_indent=" " * 4)


def needs_short_help(parser: ArgumentParser, args: Sequence[str]) -> bool:
    """Return whether ``--help`` without ``all`` is requested and the whole help is longer than one screen."""
    positions = [position for position, word in enumerate(args) if word in ("-h", "--help")]
    if not positions or args[positions[0] + 1 : positions[0] + 2] == ["all"]:
        return False
    return parser.format_help().count("\n") > SCREEN


def screen_of(parser: ArgumentParser) -> str:
    """Return a command's options on one screen: at most two lines each, only names in sections such as ``--training``.

    An option that takes a value is listed with its default if that is a word or a number.
    """
    actions = [action for action in parser._actions if action.help != SUPPRESS and "help" not in action.dest]
    positional = [action for action in actions if not action.option_strings]
    names = " ".join(
        f"{action.dest.upper()}..." if action.nargs == "+" else action.dest.upper() for action in positional
    )
    lines = [f"usage: {parser.prog} {names} [options]".replace("  ", " ")]
    lines += [*textwrap.wrap(" ".join((parser.description or "").split()), _WIDTH), ""]
    sections = dict.fromkeys(action.dest.partition(".")[0] for action in actions if "." in action.dest)
    for action in actions:
        if action.dest.partition(".")[0] not in sections:
            lines += _entry(_name(action), _text(action))
    for group in parser._action_groups:
        lines += [line for section in sections for line in _section(section, str(group.title), group._group_actions)]
    return "\n".join([*lines, "", f"{parser.prog} --help all   all options with types and defaults"])


def _entry(name: str, description: str) -> list[str]:
    """Lines of an option and its description, which is cut after two lines."""
    room, indent = _WIDTH - _COLUMN - 2, " " * (_COLUMN + 2)
    lines = textwrap.wrap(description, room, max_lines=2, placeholder=" ...") or [""]
    return [f"  {name:<{_COLUMN}}{lines[0]}", *(f"{indent}{line}" for line in lines[1:])]


def _name(action: Action) -> str:
    if not action.option_strings:
        return action.dest.upper()
    option = next(name for name in action.option_strings if name.startswith("--"))
    with_value = f"{option} {action.metavar or action.dest.upper()}"
    return option if action.nargs == 0 else with_value.replace(" \b", "")  # the parser marks optional values by it


def _text(action: Action) -> str:
    default = f" (default: {action.default})" if isinstance(action.default, int | float | str) else ""
    is_complete = action.nargs == 0 or isinstance(action.default, bool) or "default" in (action.help or "")
    return (action.help or "") + ("" if is_complete else default)


def _section(section: str, title: str, actions: Sequence[Action]) -> Iterator[str]:
    names = [action.dest.partition(".")[2] for action in actions if action.dest.startswith(f"{section}.")]
    if names:
        yield from textwrap.wrap(f"  --{section}.NAME: {title}: {', '.join(names)}", _WIDTH, subsequent_indent=" " * 4)


def kinds() -> dict[str, str]:
    """Return each kind of classes, such as ``methods`` -> the setting that takes one."""
    return {setting.facts.kind: option for option, setting in walk() if setting.facts.kind}


def classes_of(option: str) -> list[KnownClass]:
    """Return fedsim's classes that a setting can name, sorted by name, without the base class of all."""
    base = setting_at(option).base
    return [cls for cls in classes_below(base) if cls.path.startswith("fedsim.") and cls.path != base]


def run(args: list[str]) -> str:
    """Run ``fedsim list [KIND ...]``, and return the text to print."""
    names = [*kinds(), "configs"]
    if args[:1] in (["-h"], ["--help"]):
        return f"usage: fedsim list [{' | '.join(kinds())}] ...: what a config can name; without a kind, all of it"
    for kind in args:
        if kind not in names:
            remedy = did_you_mean(kind, names, f"choose from {', '.join(names)}")
            raise ConfigError(f"fedsim list: there is no list of {kind}; {remedy}")
    return "\n\n".join(_configs() if kind == "configs" else _classes(kind) for kind in args or names)


def _configs() -> str:
    """List the configs that come with fedsim, each with the comment in its first line."""
    firsts = {name: path.read_text(encoding="utf-8").partition("\n")[0] for name, path in shipped_configs().items()}
    texts = ((name, comment.lstrip("# ")) for name, comment in firsts.items())
    return _table("configs (--config NAME; later ones win)", texts)


def _classes(kind: str) -> str:
    option = kinds()[kind]
    title = f"{kind} (--{option}; --{option}.help NAME explains the options)"
    return _table(title, ((cls.name, cls.line) for cls in classes_of(option)))


def _table(title: str, entries: Iterable[tuple[str, str]]) -> str:
    texts = dict(entries)
    width, room = max(map(len, texts)), shutil.get_terminal_size((100, 24)).columns
    return "\n".join(
        [title]
        + [
            f"  {name:<{width}}  {textwrap.shorten(description, max(room - width - 4, 40), placeholder=' ...')}"
            for name, description in texts.items()
        ]
    )
