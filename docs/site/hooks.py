"""MkDocs calls these functions: which pages there are, and how their Markdown is read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify

from fedsim.__main__ import COMMANDS
from generated import api_pages, describe_page, file_pages, method_pages, records_page
from links import PLACES, ROOT, TOKEN, page_of, rewrite, targets
from notebooks import as_page
from reference import command_pages, settings_page

DOCS = ROOT / "docs"
TABLE_END = re.compile(r"^( *\|.*\|)\n(?=- )", re.MULTILINE)
OF_DEVELOPERS = re.compile(r"(api|decisions|files|records)/|(architecture|changelog|contributing|testing)\.md")
"""pages that the search lists below those for users; a word in a title has 1,000 times the weight of one in the text"""
NARROW = re.compile(r"^ {2,3}(?=\S)", re.MULTILINE)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Name headings as GitHub does, and put generated pages into the navigation."""
    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")
    config.nav = [_filled(item) for item in config.nav or []]
    return config


def _filled(item: Any) -> Any:
    """Return an item of the navigation with lists of pages in the place of folders."""
    if isinstance(item, str):
        return item
    ((title, value),) = item.items()
    if isinstance(value, list):
        return {title: [_filled(part) for part in value]}
    return {title: _contents(value)} if value.endswith("/") else item


def _contents(folder: str) -> list[Any]:
    """Return the pages of a folder of the site."""
    if folder == "decisions/":
        return [f"decisions/{path.name}" for path in sorted((DOCS / "decisions").glob("*.md"), reverse=True)]
    if folder == "records/":
        names = [page_of(str(path.relative_to(ROOT))) for path in sorted(_records(), reverse=True)]
        return ["records/index.md", *names, "records/peers.md"]
    if folder == "reference/":
        return ["reference/index.md", *(f"reference/{command}.md" for command in sorted(COMMANDS))]
    if folder == "methods/":
        return sorted((place for place, _ in method_pages()), key=lambda place: place != "methods/index.md")
    pages: dict[str, list[str]] = {}
    for place, _ in api_pages():
        pages.setdefault(place.split("/")[1], []).append(place)
    rooms = [
        {room: sorted(found, key=lambda p: not p.endswith("index.md"))}
        for room, found in pages.items()
        if len(found) > 1
    ]
    return ["api/index.md", *rooms]


def _records() -> list[Path]:
    """Return the dated records of measurements."""
    return list((ROOT / "benchmarks" / "results").glob("*.md"))


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that do not stand in docs/."""
    outside = [ROOT / name for name in PLACES if name.endswith(".md")] + _records()
    for path in outside:
        place = page_of(str(path.relative_to(ROOT)))
        files.append(File.generated(config, place, content=path.read_text()))
    for path in sorted((DOCS / "tutorials").glob("*.ipynb")):
        text, pictures = as_page(path)
        files.append(File.generated(config, f"tutorials/{path.stem}.md", content=text))
        for name, picture in pictures.items():
            files.append(File.generated(config, f"tutorials/{name}", content=picture))
    linked = {path for source, text in _sources() for path in targets(text, source)}
    pages = [*method_pages(), *api_pages(), *file_pages(linked), describe_page(), records_page(_records())]
    pages += [settings_page(), *command_pages()]
    for place, text in pages:
        files.append(File.generated(config, place, content=text))
    return files


def _sources() -> list[tuple[str, str]]:
    """Return path and text of all Markdown of the repository that is on the site, notebooks too."""
    inside = [path for path in DOCS.rglob("*") if path.suffix in {".md", ".ipynb"}]
    outside = [ROOT / name for name in PLACES if name.endswith(".md")] + _records()
    return [(str(path.relative_to(ROOT)), path.read_text()) for path in inside + outside]


ORIGINS = {page_of(source): source for source, _ in _sources()}


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Rank the page for the search, lead links to pages, and write what GitHub reads as Python-Markdown reads it."""
    page.meta.setdefault("search", {"boost": 1e-4 if OF_DEVELOPERS.match(page.file.src_uri) else 1})
    source = ORIGINS.get(page.file.src_uri)
    if source is None:
        return markdown
    return _indented(rewrite(markdown, source))


def _indented(text: str) -> str:
    """Return Markdown, outside code, as Python-Markdown wants it.

    Nested lines begin with four blanks instead of GitHub's two or three, and a blank line ends a table.
    """
    parts, end = [], 0
    for match in TOKEN.finditer(text):
        if match["ticks"] is not None:
            parts += [_wide(text[end : match.start()]), match[0]]
            end = match.end()
    return "".join([*parts, _wide(text[end:])])


def _wide(prose: str) -> str:
    return NARROW.sub("    ", TABLE_END.sub(r"\1\n\n", prose))
