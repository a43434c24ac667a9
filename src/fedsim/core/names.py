"""Names of data sets, clients and runs, which come from users: refused, or quoted for files and metrics."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable
from difflib import get_close_matches

from fedsim.core.errors import ConfigError

# also lone surrogates, by which Python shows bytes that are not UTF-8, and what some disks drop at the end
_UNSAFE = re.compile(rb'^[.~-]|[. ]$|[\x00-\x1f\x7f"*/:<>?@\\|%]|\xed[\xa0-\xbf][\x80-\xbf]')
_LONGEST = 100  # bytes; file systems take 255, for two names, a suffix and the mark of partial files
_LONGEST_NAME = 500  # bytes; a column of metrics.csv has two names
_JOINERS = "\u200c\u200d"  # of Persian, of Indian languages and of emoji: the only invisible characters of names
_KINDS = {"Cc": "a control character", "Zl": "a line break", "Zp": "a line break", "Cf": "an invisible character"}
"""category of Unicode -> the characters in it"""
_QUOTED_SLASH, _QUOTED_PERCENT = "%2F", "%25"


def check_name(name: object, field: str, remedy: str = "rename it") -> None:
    r"""Refuse a name that is none: see :func:`problem_of_name`.

    Raises:
        ConfigError: with the ``field`` that holds the name, the problem and the ``remedy``.

    >>> check_name("site/a", "data.unseen")
    >>> check_name("a\nb", "data.unseen")
    Traceback (most recent call last):
    fedsim.core.errors.ConfigError: data.unseen: 'a\nb' holds a control character (U+000A); rename it
    """
    if problem := problem_of_name(name):
        raise ConfigError(f"{field}: {problem}; {'write it in quotes' if not isinstance(name, str) else remedy}")


def problem_of_name(name: object) -> str | None:
    """Return why a value cannot be the name of a data set, client or run; None if it can.

    A name is a text, of any language and with any sign that can be seen. It is not blank, has at most 500 bytes, and is
    neither ``.`` nor ``..``.

    >>> problem_of_name(2021)
    '2021 is a number, not a name'
    """
    if not isinstance(name, str):
        noun = "true or false" if isinstance(name, bool) else "a number" if isinstance(name, int | float) else "no text"
        return f"{'null' if name is None else name} is {noun}, not a name"
    if not name.strip():
        return "the name is empty" if not name else f"the name {name!r} is blank"
    if name in (".", ".."):
        return f"{name!r} stands for a folder, and is not a name"
    is_plain = name.isascii() and name.isprintable()  # most are, and federations may have millions of names
    if not is_plain and (character := next(filter(_kind_of, name), None)):
        code = f" (U+{ord(character):04X})" if unicodedata.category(character) != "Cs" else ""
        return f"{ascii(name) if len(name) <= _LONGEST else 'the name'} holds {_kind_of(character)}{code}"
    if (length := len(name.encode())) > _LONGEST_NAME:
        return f"the name {name[:20]!r}... has {length} bytes, more than {_LONGEST_NAME}"
    return None


def _kind_of(character: str) -> str | None:
    """Return the kind of a character that a name must not have; None for other characters."""
    if character.isascii():
        return None if character.isprintable() else _KINDS["Cc"]
    category = unicodedata.category(character)
    if category == "Cs":
        return "bytes that are not UTF-8"
    if ord(character) & 0xFFFE == 0xFFFE or 0xFDD0 <= ord(character) <= 0xFDEF:
        return "a number that is no character"
    return None if character in _JOINERS else _KINDS.get(category)


def check_text(text: str, field: str) -> None:
    """Refuse a path, or another value of an option, that no config can hold: configs are UTF-8.

    Raises:
        ConfigError: with the ``field``.
    """
    if any(unicodedata.category(character) == "Cs" for character in text):
        raise ConfigError(f"{field}: {printable(text)} holds bytes that are not UTF-8, as configs are; rename it")


def check_filled(value: object, field: str, remedy: str = "give a value, or leave it out") -> None:
    """Refuse an empty or blank text, or a list with one: raise ConfigError with the ``field`` and the ``remedy``.

    >>> check_filled("town1", "--client")
    >>> check_filled("", "--client")
    Traceback (most recent call last):
    fedsim.core.errors.ConfigError: --client: is empty; is a variable of your command not set? give a value, or ...
    """
    texts = value if isinstance(value, list | tuple) else [value]
    if any(isinstance(text, str) and not text.strip() for text in texts):
        raise ConfigError(f"{field}: is empty; is a variable of your command not set? {remedy}")


def printable(text: str) -> str:
    r"""Return a text with escapes for what no terminal shows: line ends, and bytes of names that are no UTF-8.

    >>> printable("stra\udcdfe")
    'stra\\udcdfe'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def one_line(message: str, length: int = 500) -> str:
    """Join the lines of a message, write out what no terminal shows, and shorten it to ``length`` characters."""
    text = printable(re.sub(r"\s+", " ", message).strip())
    return text if len(text) <= length else text[: length - 3] + "..."


def did_you_mean(name: str, names: Iterable[str], otherwise: str = "", prefix: str = "") -> str:
    """Suggest the most similar of ``names``, with a ``prefix``; then, or if none is similar, another remedy.

    >>> did_you_mean("max_epocs", ["max_steps", "max_epochs"])
    'did you mean max_epochs?'
    >>> did_you_mean("wandb", ["CSVLogger", "WandbLogger"])
    'did you mean WandbLogger?'
    """
    names = list(names)
    beginning = [long for long in names if len(name) > 2 and long.lower().startswith(name.lower())]
    close = get_close_matches(name, names, n=1) or beginning[:1]
    return " ".join([*(f"did you mean {prefix}{best}?" for best in close), *([otherwise] if otherwise else [])])


def file_name(name: str) -> str:
    """Return a name of a file for ``name``: a single part of a path, valid UTF-8, different for different names.

    Bytes that mean something in a path or to a shell become %XX: also a dot, - or ~ at the beginning, dots and blanks
    at the end, @ and the percent sign itself. A name of more than 100 bytes ends with a SHA-256 in the place of its
    rest. Usual names stay as they are. Disks may take two of these for one: see :func:`file_names`.
    """
    unsafe = name.encode(errors="surrogatepass")
    quoted = _UNSAFE.sub(lambda match: b"".join(b"%%%02X" % byte for byte in match[0]), unsafe) or b"%"
    return _marked(quoted) if len(quoted) > _LONGEST else quoted.decode()


def file_names(names: Iterable[str], begins: tuple[str, ...] = ()) -> dict[str, str]:
    """Return name -> name of a file, for all names of one folder; no disk takes two of them for one.

    They are those of :func:`file_name`. Names that differ only in the case of letters, or in how Unicode composes
    these, also end with a SHA-256, since many disks do not distinguish them. ``begins`` are those, in small letters,
    of further files in the folder: the first letter of a name that begins so becomes %XX, too.

    >>> file_names(["town", "Köln", "site/a"])
    {'town': 'town', 'Köln': 'Köln', 'site/a': 'site%2Fa'}
    >>> file_names(["pca", "pca-a"], begins=("pca-",))
    {'pca': 'pca', 'pca-a': '%70ca-a'}
    """
    files = {name: file_name(name) for name in names}
    for name, file in files.items() if begins else ():
        files[name] = _quoted_first(file) if _folded(file).startswith(begins) else file
    count = Counter(map(_folded, files.values()))
    return {name: file if count[_folded(file)] == 1 else _marked(file.encode()) for name, file in files.items()}


def is_caseless(name: str) -> bool:
    """Whether no other spelling of a name is one for some disk: its file needs no look at other names."""
    return _folded(name) == name


def metric_name(*parts: str) -> str:
    """Join parts to the name of a metric; a slash in a part becomes ``%2F``, and a literal ``%2F`` ``%252F``.

    >>> metric_name("val", "global", "site/a", "mAP")
    'val/global/site%2Fa/mAP'
    """
    return "/".join(map(_quoted_part, parts))


def metric_parts(name: str) -> list[str]:
    """Return the parts that :func:`metric_name` has joined.

    >>> metric_parts("val/global/site%2Fa/mAP")
    ['val', 'global', 'site/a', 'mAP']
    """
    return [re.sub("%(2F|25)", lambda match: "/" if match[1] == "2F" else "%", part) for part in name.split("/")]


def _quoted_part(part: str) -> str:
    """Return a part of a metric's name; most parts have nothing to quote, and a round joins hundreds of them."""
    if "%" in part:
        part = re.sub("%(?=2F|25)", _QUOTED_PERCENT, part)
    return part.replace("/", _QUOTED_SLASH)


def _quoted_first(file: str) -> str:
    return "".join(f"%{byte:02X}" for byte in file[0].encode()) + file[1:]


def _folded(name: str) -> str:
    """Return a text that is the same for all spellings that some disk takes for one name."""
    return unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", name).upper().casefold())


def _marked(quoted: bytes) -> str:
    """Return the begin of a quoted name, and the SHA-256 of all of it; %- begins no quoted byte."""
    return f"{quoted[: _LONGEST - 66].decode(errors='ignore')}%-{hashlib.sha256(quoted).hexdigest()}"
