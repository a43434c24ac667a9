"""Names of data sets and clients, which come from users, as names of files."""

from __future__ import annotations

import hashlib
import re

# also lone surrogates, by which Python shows bytes that are not UTF-8
_UNSAFE = re.compile(rb'^\.|[\x00-\x1f\x7f"*/:<>?@\\|%]|\xed[\xa0-\xbf][\x80-\xbf]')
_LONGEST = 100  # bytes; file systems take 255, for two names, a suffix and the mark of partial files


def file_name(name: str) -> str:
    """Return a name of a file for ``name``: a single part of a path, valid UTF-8, different for different names.

    Bytes that mean something in a path become %XX, also a dot at the beginning, @ and the percent sign itself. A name
    of more than 100 bytes ends with a SHA-256 in the place of its rest. Usual names stay as they are.
    """
    quoted = _UNSAFE.sub(_quote, name.encode(errors="surrogatepass")) or b"%"
    if len(quoted) > _LONGEST:
        # %- begins no quoted byte, so that no short name looks like this
        digest = hashlib.sha256(quoted).hexdigest()
        return f"{quoted[: _LONGEST - 66].decode(errors='ignore')}%-{digest}"
    return quoted.decode()


def printable(text: str) -> str:
    r"""Return a text with escapes for what no terminal shows: line ends, and bytes of names that are no UTF-8.

    >>> printable("stra\udcdfe")
    'stra\\udcdfe'
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def is_text(name: str) -> bool:
    r"""Whether a name can be written into files of the run, all of which are UTF-8.

    >>> is_text("Köln"), is_text("stra\udcdfe")
    (True, False)
    """
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _quote(match: re.Match[bytes]) -> bytes:
    return b"".join(b"%%%02X" % byte for byte in match[0])
