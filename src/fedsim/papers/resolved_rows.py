"""All settings of papers' rows, as ``fedsim fit --paper`` resolves them, without its parser and torch.

``make rows`` writes the files in ``resolved``, and a test compares them with the parser. A row that has changed since
is refused, so a comparison is never with an outdated one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from fedsim.core.errors import DataError
from fedsim.papers.files import Config, Paper, read_paper


def find_run(paper: Paper, run: str) -> tuple[Paper, str]:
    """Return the paper and the name of the row that ``run`` names: a row of this paper, or PAPER/ROW of another."""
    key, _, name = run.rpartition("/")
    return (read_paper(key) if key else paper), name


def resolved_row(paper: Paper, name: str) -> Config:
    """Return all settings of a row, nested as in a run's ``config.yaml``, without ``run_dir``.

    Raises:
        DataError: if the row has changed since its settings were resolved.
    """
    content = _read(paper.key)
    row = content["rows"].get(name)
    if row is None or row["of"] != digest_of(paper, name):
        raise DataError(f"papers/{paper.key}.yaml: {name} has changed since its settings were resolved; run make rows")
    base = {setting: value for setting, value in content["base"].items() if setting not in row["gone"]}
    return _nested({**base, **row["changes"]})


def digest_of(paper: Paper, name: str) -> str:
    """Return a hash of the configurations of which a row consists."""
    return hashlib.sha256(json.dumps(paper.configs(name)).encode()).hexdigest()[:12]


@cache
def _read(key: str) -> Mapping[str, Any]:
    json_text = (resources.files("fedsim") / "papers" / "resolved" / f"{key}.json").read_text()
    return dict(json.loads(json_text))


def _nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with dotted names as nested sections."""
    content: dict[str, Any] = {}
    for name, value in settings.items():
        section = content
        *path, last = name.split(".")
        for part in path:
            section = section.setdefault(part, {})
        section[last] = value
    return content
