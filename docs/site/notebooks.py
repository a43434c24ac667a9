"""Notebooks as Markdown pages, so that they are searched and look like the others."""

from __future__ import annotations

import re
from pathlib import Path

from nbconvert import MarkdownExporter

TERMINAL = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def as_page(path: Path) -> tuple[str, dict[str, bytes]]:
    """Return a notebook's page in Markdown, and its pictures by name."""
    text, resources = MarkdownExporter().from_filename(str(path))
    outputs: dict[str, bytes] = resources["outputs"]
    names = {name: f"{path.stem}_{name}" for name in outputs}
    for name, longer in names.items():
        text = text.replace(f"({name})", f"({longer})")
    title, _, rest = TERMINAL.sub("", text).strip().partition("\n")
    link = f'<a href="{path.name}" download>This page as a notebook</a>; the tests run it.'
    page = f"{title}\n\n{link}\n{rest}\n"
    return page, {longer: outputs[name] for name, longer in names.items()}
