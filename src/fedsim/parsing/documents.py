"""YAML and JSON of any origin as plain values: no text ends in a traceback, fills the memory, or takes for ever."""

from __future__ import annotations

import json
import math
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from fedsim.core.errors import DataError
from fedsim.core.names import one_line

SafeLoader: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's if it is installed: eight times as fast"""
DEEPEST = 50
"""sections within sections; fedsim's own configs have ten, and Python's stack has room for some hundreds"""
_LINES_BACK = 20
"""lines before that of libyaml's message in which a fault is looked for"""
LARGEST = 200_000
"""values after every alias is replaced by its anchor: a minute for the parser"""
_LONG = re.compile(r"[-+]?[0-9][0-9a-fA-FxXo_]{256,}")
"""a whole number that may be beyond all floats, decimal or with a base"""


def read_text(path: Path, document: str, remedy: str = "does the file exist?") -> str:
    """Return the text of a file; raise DataError, with name and remedy of the ``document``, if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # also of a name that is no text
        remedy = "save it in UTF-8" if isinstance(error, UnicodeDecodeError) else remedy
        raise DataError(f"{one_line(str(path))}: cannot read {document} ({one_line(str(error))}); {remedy}") from error


def parse_yaml(yaml_text: str, name: str) -> Any:
    """Return the content of a YAML text as plain values.

    Args:
        yaml_text: the YAML.
        name: the file or option, with which messages begin.

    Raises:
        DataError: if it is not YAML of plain values, a key is given twice in one section, an alias repeats a section
            that contains it, or it is too deep or too large.
    """
    try:
        check_yaml(yaml_text, name)
        loader = SafeLoader(yaml_text)
        node = loader.get_single_node()
        _check_keys(name, node)
        return None if node is None else loader.construct_document(node)
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or getattr(error, "reason", "it holds no text")
        raise DataError(
            f"{name}: line {_wrong_line(yaml_text, error)} is not valid YAML ({problem}); correct it"
        ) from error
    except DataError:
        raise
    # PyYAML's own errors end here; Python's are of a day, number or tag (!!bool x) that it cannot read
    except (ValueError, OverflowError, KeyError, AttributeError, TypeError) as error:
        raise DataError(
            f"{name}: holds a value that cannot be read ({one_line(str(error), 200)}); quote it, or correct it"
        ) from error


def _check_keys(name: str, node: yaml.Node | None, section: str = "") -> None:
    """Refuse a key that is given twice in one section: PyYAML would silently take the last value."""
    lines: dict[str, int] = {}
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        if not isinstance(key, yaml.ScalarNode):
            continue
        field, line_number = f"{section}.{key.value}".lstrip("."), key.start_mark.line + 1
        if key.value in lines:
            twice = f"is given twice, in lines {lines[key.value]} and {line_number}"
            raise DataError(f"{name}: {field}: {twice}; remove one of them")
        lines[key.value] = line_number
        _check_keys(name, value, field)
    for value in node.value if isinstance(node, yaml.SequenceNode) else ():
        _check_keys(name, value, section)


def _wrong_line(yaml_text: str, error: yaml.YAMLError) -> int:
    """Return the number of the first line with which no beginning of the text is YAML: libyaml names a later one."""
    end = getattr(error, "problem_mark", None)
    if end is None:  # of a character, with its place
        return yaml_text.count("\n", 0, getattr(error, "position", 0)) + 1
    lines, begin = yaml_text.splitlines(), getattr(error, "context_mark", None) or end
    last = min(end.line + 1, len(lines))
    for number in range(last, max(begin.line + 1, last - _LINES_BACK), -1):
        with suppress(yaml.YAMLError):
            for _ in yaml.parse("\n".join(lines[: number - 1]), SafeLoader):
                pass
            return number
    return int(begin.line) + 1


def check_yaml(yaml_text: str, name: str) -> None:
    """Refuse a YAML text that expands without end, or holds a number beyond all floats; read once, without recursion.

    Raises:
        DataError: as :func:`parse_yaml`.
        yaml.YAMLError: if it is not YAML.
    """
    sizes: dict[str, int] = {}
    """anchor -> number of values below it, all aliases replaced"""
    total, opened = 0, list[tuple[str | None, int]]()
    for event in yaml.parse(yaml_text, SafeLoader):
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, before = opened.pop()
            if anchor is not None:
                sizes[anchor] = total - before
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor in (anchor for anchor, _ in opened):
                raise DataError(f"{name}: *{event.anchor} repeats the section in which it stands; write its values out")
            total += sizes.get(event.anchor or "", 1)
        elif isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent):
            total += 1
            _check_number(event, name)
            if isinstance(event, yaml.CollectionStartEvent):
                opened.append((event.anchor, total - 1))
        if len(opened) > DEEPEST:
            raise _too_deep(name)
        if total > LARGEST:
            raise DataError(f"{name}: holds more than {LARGEST} values, aliases included; remove repetitions")


def _check_number(event: yaml.Event, name: str) -> None:
    if isinstance(event, yaml.ScalarEvent) and _LONG.fullmatch(event.value) and _is_beyond_floats(event.value):
        subject = f"line {event.start_mark.line + 1} has" if event.start_mark else "has"
        raise DataError(f"{name}: {subject} a number of hundreds of digits; write a smaller one")


def _is_beyond_floats(number: str) -> bool:
    try:
        return math.isinf(float(number))
    except ValueError:  # of another base, or no number
        with suppress(ValueError):
            return abs(int(number, 0)) > sys.float_info.max
        return False


def parse_json(json_text: str | bytes, name: str) -> Any:
    """Return the content of a JSON text; raise DataError if it is not JSON, or too deep."""
    try:
        content = json.loads(json_text)
    except RecursionError as error:
        raise _too_deep(name) from error
    except ValueError as error:  # also of bytes that are not UTF-8, and of whole numbers of thousands of digits
        raise DataError(f"{name}: is not JSON ({one_line(str(error), 200)}); was it edited?") from error
    level = [content]
    for _ in range(DEEPEST + 1):
        level = [inner for value in level for inner in _below(value)]
        if not level:
            return content
    raise _too_deep(name)


_ESCAPED = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
"""characters that JSON leaves as they are, and YAML refuses or takes for line ends, which are blanks within quotes"""


def as_yaml(value: Any) -> str:
    r"""Return plain values as a line of YAML, in the style of JSON, whose escapes of emoji YAML does not read.

    >>> as_yaml(["a", "😀", None])
    '["a", "😀", null]'
    >>> as_yaml("a\x85b")
    '"a\\u0085b"'
    """
    return _ESCAPED.sub(lambda match: f"\\u{ord(match[0]):04x}", json.dumps(value, ensure_ascii=False))


def _below(value: Any) -> list[Any]:
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [inner for inner in values if isinstance(inner, dict | list)]


def _too_deep(name: str) -> DataError:
    return DataError(f"{name}: has more than {DEEPEST} sections within each other; write it flatter")
