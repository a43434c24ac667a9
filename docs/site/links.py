"""Links between files of the repository, as links between pages of the site.

The Markdown is written for GitHub: its links are paths in the repository. On the site a linked Markdown file is a page,
and so is any other file of text, shown as it is. So no link leaves the site.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FENCE = r"^(?P<ticks> *(?:`{3,}|~{3,}))[^\n]*\n.*?^(?P=ticks) *$"
TOKEN = re.compile(rf"{FENCE}|`+[^`\n]+`+|\]\((?P<target>[^)\s#]*)(?P<anchor>#[^)\s]*)?\)", re.MULTILINE | re.DOTALL)
METHOD = re.compile(r"src/fedsim/methods/(?!base|pruned|reference)([a-z]\w*)\.py")
PLACES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/peers/README.md": "records/peers.md",
    "benchmarks/results": "records/index.md",
}
SHOWN = {".md", ".png", ".jpg"}  # files of docs/ that are on the site as they are


def page_of(path: str) -> str:
    """Return the place on the site, relative to its root, of a file or folder of the repository."""
    name = Path(path)
    if path in PLACES:
        return PLACES[path]
    if match := METHOD.fullmatch(path):
        return f"methods/{match[1]}.md"
    if path.startswith("benchmarks/results/") and name.suffix == ".md":
        return f"records/{name.name}"
    if path.startswith("docs/") and name.suffix in SHOWN:
        return path.removeprefix("docs/")
    if path.startswith("docs/tutorials/") and name.suffix == ".ipynb":
        return f"tutorials/{name.stem}.md"
    return f"files/{path}/index.md" if (ROOT / path).is_dir() else f"files/{path}.md"


def targets(text: str, source: str) -> Iterator[str]:
    """Yield the files and folders of the repository that the Markdown file ``source`` links to."""
    for match in TOKEN.finditer(text):
        if (path := _resolve(match["target"], source)) is not None:
            yield path


def rewrite(text: str, source: str) -> str:
    """Return the text of the Markdown file ``source`` with links to pages of the site; code stays as it is."""

    def link(match: re.Match[str]) -> str:
        path = _resolve(match["target"], source)
        if path is None:
            return match[0]
        place = posixpath.relpath(page_of(path), posixpath.dirname(page_of(source)) or ".")
        return f"]({place}{match['anchor'] or ''})"

    return TOKEN.sub(link, text)


def _resolve(target: str | None, source: str) -> str | None:
    """Return the path in the repository that a link leads to; None if it is none, or nothing is there."""
    if not target or "://" in target:
        return None
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    return path if not path.startswith("..") and (ROOT / path).exists() else None
