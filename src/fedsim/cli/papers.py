"""``fedsim papers``: which papers there are, their rows and sweeps, and one of them in full."""

from __future__ import annotations

import sys
import textwrap
from argparse import ArgumentParser
from collections.abc import Iterator
from typing import Any

import yaml

from fedsim.core.errors import FedSimError
from fedsim.papers.files import Paper, list_papers, no_such_name, read_paper

_WIDTH = 120


class _Dumper(yaml.SafeDumper):
    """Writes out what the file says once and names again."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - the signature of YAML's
        return True


def run_papers_command(args: list[str]) -> int:
    """Run ``fedsim papers [PAPER | PAPER/NAME]``; return the exit code: 0, or 2 if there is no such paper or name."""
    parser = ArgumentParser(prog="fedsim papers", description="List papers, or show one, with its printed numbers.")
    parser.add_argument("which", nargs="?", help="a paper, such as 003; or what begins with a name: 003/table5")
    given, others = parser.parse_known_args(args)
    which = given.which
    if others:
        sys.stderr.write(
            f"fedsim: error: papers: cannot use {' '.join(others)}; give one paper, or one name, or nothing\n"
        )
        return 2
    keys = list_papers() if which is None else [which]
    try:
        text = _part(which) if "/" in (which or "") else "\n\n".join("\n".join(_overview(key)) for key in keys)
    except FedSimError as error:
        sys.stderr.write(f"fedsim: error: {error}\n")
        return 2
    sys.stdout.write(f"{text}\n")
    return 0


def _overview(key: str) -> Iterator[str]:
    """A paper in a few lines, then a line for each row, sweep and printed table."""
    paper = read_paper(key, "fedsim papers")
    yield f"{key}: {paper.content['title']}"
    yield from (f"  {text}" for text in (paper.content["source"], *(f"- {note}" for note in paper.content["notes"])))
    lines = [("row", name, row["notes"]) for name, row in paper.rows.items()]
    lines += [("sweep", name, sweep["notes"]) for name, sweep in paper.sweeps.items()]
    lines += [("printed", name, table["title"]) for name, table in paper.content["tables"].items()]
    for kind, name, said in lines:
        start = f"  {kind:<7} {key}/{name}"
        yield f"{start:<38}  {textwrap.shorten(said, _WIDTH - 40, placeholder=' ...')}"


def _part(which: str) -> str:
    """All rows, sweeps and tables whose names begin so, as the file has them, with what holds for all tables."""
    key, _, name = which.partition("/")
    paper = read_paper(key, "fedsim papers")
    found = {
        kind: {known: said for known, said in paper.content[kind].items() if known.startswith(name)}
        for kind in ("rows", "sweeps", "tables")
    }
    if not any(found.values()):
        raise no_such_name("fedsim papers", which, [known for kind in found for known in paper.content[kind]])
    of_rows = {row.partition("_")[0] for row in found["rows"]}  # table5_batch_64 is of table5
    found["tables"] = {
        known: _with_common(paper, table)
        for known, table in paper.content["tables"].items()
        if known in {*found["tables"], *of_rows}
    }
    shown = {kind: parts for kind, parts in found.items() if parts}
    return yaml.dump(shown, Dumper=_Dumper, sort_keys=False, width=_WIDTH, default_flow_style=None).rstrip()


def _with_common(paper: Paper, table: dict[str, Any]) -> dict[str, Any]:
    common = {name: table.get(name, paper.content[name]) for name in ("columns", "clients")}
    return {**table, **common, "settings": {**paper.content["settings"], **table.get("settings", {})}}
