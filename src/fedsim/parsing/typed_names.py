"""Names that YAML takes for other values: 007 is an octal number, no is false, 2021-01-01 a date, null is nothing.

In a setting that takes a text, names or a mapping of names, a name is a name, also without quotes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TypeGuard

import yaml

from fedsim.parsing.documents import SafeLoader
from fedsim.settings.table import Setting, argument_of, class_at, setting_at

_NULL, _TEXT = "tag:yaml.org,2002:null", "tag:yaml.org,2002:str"
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_NUMBER = re.compile(r"[-+.]?[0-9]")  # also those that other readers of YAML take for numbers, such as 1e3


def with_quotes(yaml_text: str, option: str = "") -> str:
    """Return YAML in which each name is a text.

    Args:
        yaml_text: YAML, also JSON; other texts are returned unchanged.
        option: the option whose value it is; empty: it is a config, or a sweep.

    >>> with_quotes("model: {clients: {007: {batch_size: 8}}}")
    'model: {clients: {"007": {batch_size: 8}}}'
    >>> with_quotes("[no, town, null]", "data.unseen")
    '["no", town, "null"]'
    """
    if not any(sign in yaml_text for sign in ":[{"):
        return yaml_text
    try:
        root = yaml.compose(yaml_text, SafeLoader)
    except (yaml.YAMLError, ValueError):  # its reader has the message
        return yaml_text
    above: set[int] = set()
    nodes = [(setting_at(option), root)] if option and root else _settings_of(root)
    names = [name for setting, node in nodes for name in _names(node, setting, above)]
    for node in sorted(names, key=lambda node: -node.start_mark.index):
        begin, end = node.start_mark.index, node.end_mark.index
        if yaml_text[begin:end] == node.value:  # not one with an anchor or a tag
            yaml_text = f"{yaml_text[:begin]}{json.dumps(node.value)}{yaml_text[end:]}"
    return yaml_text


def _settings_of(root: yaml.Node | None) -> Iterator[tuple[Setting, yaml.Node]]:
    """Yield the settings and sections of a config with their values; of a sweep, its parameters with each value."""
    for name, node in _entries(root):
        if name != "parameters":
            yield setting_at(name), node
        for option, range_ in _entries(node) if name == "parameters" else ():
            for key, values in _entries(range_):
                inner = values.value if key == "values" and isinstance(values, yaml.SequenceNode) else [values]
                yield from ((setting_at(option), value) for value in inner if key in ("value", "values"))


def _entries(node: yaml.Node | None) -> Iterator[tuple[str, yaml.Node]]:
    """Yield the keys and values of a mapping; of other nodes nothing."""
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        if isinstance(key, yaml.ScalarNode):
            yield key.value, value


def _names(node: yaml.Node, setting: Setting, above: set[int]) -> Iterator[yaml.ScalarNode]:
    """Yield the names in a setting that YAML takes for another value; ``above`` are nodes that an alias may repeat."""
    if isinstance(node, yaml.ScalarNode):
        is_in_base_60 = not node.style and ":" in node.value and node.tag in _NUMBERS  # 1:30, which is 90 there
        if is_in_base_60 or (setting.form == "text" and _is_typed(node) and node.tag != _NULL):
            yield node
    elif id(node) not in above:
        above.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            yield from _names_of_list(node, setting, above)
        elif setting.form == "names":
            yield from (key for key, _ in node.value if _is_typed(key))
            for _, value in _entries(node):
                yield from _names(value, Setting(base=setting.base), above)
        else:
            entries = dict(_entries(node))
            path = str(entries["class_path"].value) if "class_path" in entries else ""
            base = path if class_at(path) is not None else setting.base
            for name, value in entries.items():
                is_within = name in ("init_args", "dict_kwargs")
                yield from _names(value, Setting(base=base) if is_within else argument_of(base, name), above)


def _names_of_list(node: yaml.SequenceNode, setting: Setting, above: set[int]) -> Iterator[yaml.ScalarNode]:
    for value in node.value:
        if setting.form == "texts" and _is_typed(value) and (value.tag != _NULL or setting.facts.is_list_of_names):
            yield value
        else:
            yield from _names(value, Setting(base=setting.base), above)


def _is_typed(node: yaml.Node) -> TypeGuard[yaml.ScalarNode]:
    """Whether YAML takes a word without quotes for something else than a text."""
    if not isinstance(node, yaml.ScalarNode) or node.style or not node.value or node.value == "<<":
        return False
    return node.tag != _TEXT or _NUMBER.match(node.value) is not None
