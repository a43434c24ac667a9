"""``fedsim list``: the classes that a config can name, with one line each, from the table of settings."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable

from fedsim.core.errors import ConfigError
from fedsim.core.names import did_you_mean
from fedsim.parsing.config_files import shipped_configs
from fedsim.settings.table import KnownClass, classes_below, setting_at, walk


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
    """Return a title, and a line for each name and its text."""
    texts = dict(entries)
    width, room = max(map(len, texts)), shutil.get_terminal_size((100, 24)).columns
    return "\n".join(
        [title]
        + [
            f"  {name:<{width}}  {textwrap.shorten(description, max(room - width - 4, 40), placeholder=' ...')}"
            for name, description in texts.items()
        ]
    )
