"""Names that YAML takes for other values: 007 is an octal number, no is false, 2021-01-01 a date, null is nothing.

In the fields below a name is a name, as the folder has it, also without quotes.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from typing import TypeGuard

import yaml

from fedsim.parsing.documents import SafeLoader

_LISTS = r"data\.(unseen|source\.([\w.]+\.)?(names|alphabets))|clients|sets"
"""fields with a list of names: null in it is a name, too"""
_LOGGER = r"trainer\.logger\.(name|project|group|run_name|experiment_name)"
_SINGLE = rf"data\.(public|manifest|cache_dir|(source\.([\w.]+\.)?|generated\.)root)|run_dir|ckpt_path|{_LOGGER}"
"""fields with one name, or the path of a folder or file: null is none"""
_OF_CLIENTS = r"model\.(hardware\.)?clients"
"""fields whose keys are names"""
_WITHIN = ("init_args", "dict_kwargs")
_NULL, _TEXT = "tag:yaml.org,2002:null", "tag:yaml.org,2002:str"
_NUMBER = re.compile(r"[-+.]?[0-9]")  # also those that other readers of YAML take for numbers, such as 1e3
_OPENING = ("[", "{")
_OPTION = re.compile(r"--([\w.]+)\+?$")


def with_quotes(text: str, field: str = "") -> str:
    """Return YAML in which each name is a text.

    Args:
        text: YAML, also JSON; other texts are returned unchanged.
        field: the option whose value it is; empty: it is a config, or a sweep.

    >>> with_quotes("model: {clients: {007: {batch_size: 8}}}")
    'model: {clients: {"007": {batch_size: 8}}}'
    >>> with_quotes("[no, town, null]", "data.unseen")
    '["no", town, "null"]'
    """
    if not any(sign in text for sign in ":[{"):
        return text
    try:
        root = yaml.compose(text, SafeLoader)
    except (yaml.YAMLError, ValueError):  # its reader has the message
        return text
    for node in sorted(_names(root, field, set()), key=lambda node: -node.start_mark.index):
        begin, end = node.start_mark.index, node.end_mark.index
        if text[begin:end] == node.value:  # not one with an anchor or a tag
            text = f"{text[:begin]}{json.dumps(node.value)}{text[end:]}"
    return text


def words_with_quotes(words: Sequence[str]) -> list[str]:
    """Return a command line in which the names in lists and sections are texts; single values are texts already.

    >>> words_with_quotes(["--data.unseen", "[2021]", "--data.public=no", "--model.clients={no: {batch_size: 8}}"])
    ['--data.unseen', '["2021"]', '--data.public=no', '--model.clients={"no": {batch_size: 8}}']
    """
    quoted = []
    for before, word in itertools.pairwise(["", *words]):
        name, _, value = word.partition("=")
        if joined := _OPTION.match(name):
            is_list = joined[1] != "config" and value.lstrip()[:1] in _OPENING
            quoted.append(f"{name}={with_quotes(value, joined[1])}" if value and is_list else word)
        else:
            option = _OPTION.match(before)
            is_list = option is not None and option[1] != "config" and word.lstrip()[:1] in _OPENING
            quoted.append(with_quotes(word, option[1]) if option and is_list else word)
    return quoted


def _names(node: yaml.Node | None, field: str, above: set[int]) -> Iterator[yaml.ScalarNode]:
    """Yield the names below a field that YAML takes for another value; ``above`` are nodes that an alias may repeat."""
    if node is None or id(node) in above:
        return
    above.add(id(node))
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if re.fullmatch(_OF_CLIENTS, field) and _is_typed(key):
                yield key
            yield from _names(value, _below(field, key), above)
    elif isinstance(node, yaml.SequenceNode):
        is_list = re.fullmatch(_LISTS, field) is not None
        for value in node.value:
            if is_list and _is_typed(value):
                yield value
            yield from _names(value, field.removesuffix(".values"), above)
    elif re.fullmatch(_SINGLE, field) and _is_typed(node) and node.tag != _NULL:
        yield node


def _below(field: str, key: yaml.Node) -> str:
    """Return the field below another one; in a sweep, that of the option whose ``value`` or ``values`` it is."""
    name = str(key.value) if isinstance(key, yaml.ScalarNode) else ""
    if field.startswith("parameters.") and name in ("value", "values"):
        option = field.removeprefix("parameters.")
        return option if name == "value" else f"{option}.values"
    return field if name in _WITHIN else f"{field}.{name}".lstrip(".")


def _is_typed(node: yaml.Node) -> TypeGuard[yaml.ScalarNode]:
    """Whether YAML takes a word without quotes for something else than a text."""
    if not isinstance(node, yaml.ScalarNode) or node.style or not node.value or node.value == "<<":
        return False
    return node.tag != _TEXT or _NUMBER.match(node.value) is not None
