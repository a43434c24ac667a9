"""Configurations setting by setting, and the one comparison of two of them.

Equal values are equal however they are spelled: null and the value that it stands for, 1 and 1.0 where one is
valid, a class by two paths, an option that is left out and its default, a client's own value and the common one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedsim.settings.effects import COUNTED, STRONGER, Flat, SettingValue, is_section, with_effects
from fedsim.settings.facts import Effect, Group
from fedsim.settings.table import (
    LIBRARIES,
    MISSING,
    UNKNOWN,
    KnownClass,
    Setting,
    class_at,
    is_foreign,
    only_watches,
    section,
    sections,
    setting_at,
    short_of,
)

_GROUP_OF_SECTION: dict[str, Group] = {"data": "data"}


class Difference(NamedTuple):
    """A setting with different values in two configurations."""

    option: str
    old: Any
    """:data:`MISSING` if the first configuration has no such setting"""
    new: Any
    effect: Effect
    group: Group
    setting: Setting


def flat(config: Mapping[str, Any]) -> Flat:
    """Return the settings of a configuration, those that it leaves out with their defaults.

    Args:
        config: sections and plain values, as ``config.yaml`` has them.

    >>> entries = flat({"model": {"method": "fedsim.methods.Ditto"}})
    >>> entries["model.method"].value, entries["model.method.lam"].value, entries["model.threads"].effect
    ('Ditto', 0.1, 'rounding')
    """
    reader = _Reader()
    names = sections()
    reader.fields("", section(""), {name: value for name, value in config.items() if name not in names}, "training")
    for name in names:
        content = config.get(name)
        content = content if isinstance(content, Mapping) else {}
        reader.fields(name, section(name), content, _GROUP_OF_SECTION.get(name, "training"), name in config)
    return with_effects(reader.entries)


def flat_part(option: str, value: Any) -> Flat:
    """Return a setting that has this value, and those below it; effects are those of the facts alone.

    >>> list(flat_part("model.server_optimizer", "torch.optim.Adagrad"))[:2]
    ['model.server_optimizer', 'model.server_optimizer.lr']
    """
    reader = _Reader()
    reader.read(option, value, setting_at(option), "training", True)
    return reader.entries


class _Reader:
    """Collects the settings of a configuration; effects are those of the facts alone."""

    def __init__(self) -> None:
        self.entries: Flat = {}

    def fields(
        self, prefix: str, cls: KnownClass | None, content: Mapping[str, Any], group: Group, is_given: bool = True
    ) -> None:
        """Read what a section or class takes: its arguments, and whatever else the configuration gives it."""
        arguments = {} if cls is None else cls.arguments
        for name in dict.fromkeys((*arguments, *content)):
            setting = arguments.get(name, UNKNOWN)
            value = content.get(name, setting.default)
            if value is not MISSING:
                option = f"{prefix}.{name}".lstrip(".")
                self.read(option, value, setting, setting.facts.group or group, is_given and name in content)

    def read(self, option: str, value: Any, setting: Setting, group: Group, is_given: bool) -> None:
        """Read a setting, and those below it."""
        if isinstance(value, str):
            value = setting.default if value == setting.default_from else setting.facts.spellings.get(value, value)
        if setting.form == "classes" and value is not None:
            self.classes(option, value if isinstance(value, list | tuple) else [value], setting, group, is_given)
        elif setting.form == "names" and isinstance(value, Mapping):
            common = {name: entry for name, entry in self.entries.items() if name.startswith(setting.facts.overrides)}
            for name, inner in value.items():
                of_name = _Reader()
                of_name.named(f"{option}.{name}", inner, setting, group, is_given)
                if setting.facts.overrides:
                    of_name.drop_repeats(f"{option}.{name}.", f"{setting.facts.overrides}.", common)
                self.entries |= of_name.entries
        elif (named := _class_of(value, setting)) is not None:
            self.enter(option, short_of(named), setting, group, is_given, is_foreign(named))
            self.fields(option, class_at(named), _arguments(value), group, is_given)
        elif isinstance(value, Mapping):
            cls = class_at(setting.base) if setting.base else None
            self.enter(option, cls.name if cls else "set", setting, group, is_given)
            self.fields(option, cls, value, group, is_given)
        else:
            self.enter(option, _plain(value, setting), setting, group, is_given)

    def classes(self, option: str, values: Sequence[Any], setting: Setting, group: Group, is_given: bool) -> None:
        """Read several classes; those that only watch are left out."""
        named = [(path, value) for value in values if (path := _class_of(value, setting)) and not only_watches(path)]
        if setting.facts.is_set:
            named.sort(key=lambda pair: json.dumps(pair[1], sort_keys=True, default=str))
        counts: dict[str, int] = {}
        entries = []
        for path, value in named:
            name = short_of(path)
            counts[name] = counts.get(name, 0) + 1
            entries.append((name if counts[name] == 1 else f"{name}-{counts[name]}", path, value))
        plain = [_plain(value, setting) for value in values if _class_of(value, setting) is None]
        has_foreign = any(is_foreign(path) for path, _ in named)
        self.enter(option, [name for name, _, _ in entries] + plain, setting, group, is_given, has_foreign)
        for name, path, value in entries:
            self.fields(f"{option}.{name}", class_at(path), _arguments(value), group, is_given)

    def named(self, option: str, value: Any, setting: Setting, group: Group, is_given: bool) -> None:
        """Read what a setting of several names has for one of them."""
        if isinstance(value, Mapping):
            self.fields(option, class_at(setting.base) if setting.base else None, value, group, is_given)
        else:
            self.enter(option, _plain(value, _inner(setting)), setting, group, is_given)

    def drop_repeats(self, prefix: str, of_common: str, common: Flat) -> None:
        """Drop the values that repeat those of ``common``; a class as a whole, or not at all."""
        kept_class = "\n"
        for option in [*self.entries]:
            repeated = of_common + option.removeprefix(prefix)
            entry, shared = self.entries.get(option), common.get(repeated)
            if entry is None or shared is None or None in (entry.value, shared.value) or option.startswith(kept_class):
                continue
            if is_section(entry.setting) or (not entry.setting.base and _are_equal(entry.value, shared.value)):
                del self.entries[option]
            elif entry.setting.base and (block := _below(self.entries, option)) == _below(common, repeated):
                self.entries = {name: v for name, v in self.entries.items() if name.removeprefix(option) not in block}
            elif entry.setting.base:
                kept_class = f"{option}."

    def enter(
        self, option: str, value: Any, setting: Setting, group: Group, is_given: bool, has_foreign: bool = False
    ) -> None:
        """Enter a value; a class that is not known may change results, wherever it stands."""
        effect: Effect = "results" if has_foreign else setting.facts.effect
        self.entries[option] = SettingValue(value, effect, group, setting, is_given)


def _below(entries: Flat, option: str) -> dict[str, str]:
    """Return a setting and those below it, by the rest of their names; values as text, so that true is not 1."""
    names = (name for name in entries if name == option or name.startswith(f"{option}."))
    return {name.removeprefix(option): repr(entries[name].value) for name in names}


def _class_of(value: Any, setting: Setting) -> str | None:
    """Return the path of the class that a value names, with or without arguments."""
    if isinstance(value, Mapping):
        path = value.get("class_path")
        return None if path is None else str(path)
    is_named = isinstance(value, str) and (setting.base or setting.form == "classes")
    return value if is_named else None


def _arguments(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        return {}
    parts = (value.get("init_args"), value.get("dict_kwargs"))
    return {name: inner for part in parts if isinstance(part, Mapping) for name, inner in part.items()}


def _plain(value: Any, setting: Setting) -> Any:
    """Return a value in the one spelling that it has here."""
    value = setting.facts.null if value is None else value
    if isinstance(value, list | tuple):
        plain = [_plain(inner, _inner(setting)) for inner in value]
        return sorted(plain, key=str) if setting.facts.is_set else plain
    if not setting.has_counts and isinstance(value, float) and value.is_integer():
        return int(value)
    return setting.facts.spellings.get(str(value), value) if setting.facts.spellings else value


def _inner(setting: Setting) -> Setting:
    """Return the facts of the values in a list or mapping."""
    return Setting(has_counts=setting.has_counts)


def compare(old: Flat, new: Flat) -> Iterator[Difference]:
    """Yield the settings with different values in two configurations.

    Where a part has another class, or is not there, only the settings that both have are compared.
    """
    changed: list[str] = []
    for option in dict.fromkeys((*old, *new)):
        in_both = option in old and option in new
        if not in_both and any(option.startswith(f"{part}.") for part in changed):
            continue
        if not in_both and _is_default(old.get(option) or new[option]):
            continue
        before = old[option].value if option in old else MISSING
        after = new[option].value if option in new else MISSING
        if in_both and (_have_one_value(old[option], new[option]) or (old[option].is_null and new[option].is_null)):
            continue
        changed.append(option)
        # a setting with an effect in one of both has one
        entry = max((e for e in (old.get(option), new.get(option)) if e), key=lambda entry: STRONGER[entry.effect])
        yield Difference(option, before, after, entry.effect, entry.group, entry.setting)


def _have_one_value(old: SettingValue, new: SettingValue) -> bool:
    """Return whether two settings have one value; 1 is 1.0, unless both take either with another meaning."""
    if old.setting.has_counts == new.setting.has_counts:
        return _are_equal(old.value, new.value)
    return _are_equal(_plain(old.value, Setting()), _plain(new.value, Setting()))


def _is_default(entry: SettingValue) -> bool:
    """Return whether a setting has its default: a configuration without it has the same value."""
    default = entry.setting.default
    return default is not MISSING and _are_equal(_plain(default, entry.setting), entry.value)


def _are_equal(old: Any, new: Any) -> bool:
    """Return whether two values are equal; true is not 1."""
    if old is new or repr(old) == repr(new):
        return True
    texts = (json.dumps(value, sort_keys=True, default=str) for value in (old, new))
    return type(old) is type(new) and len({*texts}) == 1


def fingerprint_of(config: Mapping[str, Any]) -> str:
    """Return a hash of the settings that results depend on; runs that differ in a seed alone have the same."""
    return fingerprint_from(flat(config))


def fingerprint_from(entries: Flat) -> str:
    """Return the fingerprint of a configuration; see :func:`fingerprint_of`."""
    return digest(values_of_experiment(entries))


def values_of_experiment(entries: Flat) -> dict[str, Any]:
    """Return the values in which experiments differ; not defaults, so that an option of a later version changes none.

    For the same reason it is no difference whether a setting at its default has an effect beside the others.
    """
    return {
        option: "a file" if names_file(entry) else entry.value
        for option, entry in entries.items()
        if entry.effect in COUNTED and not entry.setting.facts.is_repeated and not _is_default(entry)
    }


def is_of_experiment(entry: SettingValue | Difference) -> bool:
    """Return whether a setting makes two experiments; a file makes them by its content."""
    return entry.effect in COUNTED and not entry.setting.facts.is_repeated and not names_file(entry)


def names_file(entry: SettingValue | Difference) -> bool:
    """Return whether a setting is a path, in both configurations, and neither nothing nor weights by their name."""
    values = (entry.old, entry.new) if isinstance(entry, Difference) else (entry.value,)
    facts = entry.setting.facts
    suffixes = tuple(facts.suffixes) or ("",)
    return facts.is_file and all(isinstance(value, str) and value.lower().endswith(suffixes) for value in values)


def missing_settings(entries: Flat) -> list[str]:
    """Return the settings with an effect on results that a configuration leaves out; of a section, its name alone."""
    gone: list[str] = []
    for option, entry in entries.items():
        is_new = not any(option.startswith(f"{section}.") for section in gone)
        if not entry.is_given and is_new and is_of_experiment(entry):
            gone.append(option)
    return gone


def idle_settings(entries: Flat) -> Iterator[str]:
    """Yield the settings that are given another value than their default, and have no effect beside the others.

    A class stands for its arguments.
    """
    classes: list[str] = []
    for option, entry in entries.items():
        if not entry.is_idle or not entry.is_given or any(option.startswith(f"{name}.") for name in classes):
            continue
        is_value = not is_section(entry.setting) or entry.value is None or is_foreign(str(entry.value))
        if is_value and entry.setting.base:
            classes.append(option)
        if is_value and entry.setting.facts.effect != "nothing" and not _has_default_below(option, entries):
            yield option


def _has_default_below(option: str, entries: Flat) -> bool:
    """Return whether a setting has its default; of a class, all its arguments."""
    default = entries[option].setting.default
    if not isinstance(default, Mapping) or "class_path" not in default:
        return _is_default(entries[option])
    expected = flat_part(option, default)
    return all(name in entries and _are_equal(entries[name].value, entry.value) for name, entry in expected.items())


def line_of_idle(config: Mapping[str, Any]) -> str:
    """Return a line on the settings that :func:`idle_settings` yields; empty without any."""
    entries = flat(config)
    texts = [f"{option} {text_of(entries[option].value)}" for option in idle_settings(entries)]
    return f"without effect beside the other settings: {', '.join(texts)}" if texts else ""


def without_folders(value: Any) -> Any:
    """Return settings without private paths: an absolute path is shortened to its last part."""
    if isinstance(value, Mapping):
        return {name: without_folders(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_folders(inner) for inner in value]
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value


def digest(content: Any) -> str:
    """Return a hash of plain values, 12 hexadecimal digits."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:12]


def text_of(value: Any) -> str:
    """Return a value as text for readers; a library's class, and a path from the root, by the last part.

    >>> text_of(None), text_of(True), text_of([0.5, "torch.optim.SGD"]), text_of({"lr": 0.1})
    ('none', 'true', '[0.5, SGD]', 'lr 0.1')
    """
    if value is None or value is MISSING:
        return "none" if value is None else "not there"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(text_of, value))}]"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {text_of(inner)}" for name, inner in value.items()) or "{}"
    text = str(value)
    if text.startswith("/"):
        return text.rstrip("/").rpartition("/")[2]
    return text.rpartition(".")[2] if text.partition(".")[0] in LIBRARIES else text
