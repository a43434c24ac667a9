"""``fedsim papers``: lists papers with their rows and sweeps, or prints one in full."""

from __future__ import annotations

import textwrap
from argparse import ArgumentParser
from collections.abc import Iterator
from typing import Any

import yaml
from tabulate import tabulate

from fedsim.core.errors import ConfigError
from fedsim.papers.contradictions import lines_of
from fedsim.papers.files import Paper, list_papers, no_such_name, read_paper

_WIDTH = 120


class _Dumper(yaml.SafeDumper):
    """Writes repeated parts of a file in full, instead of as aliases."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - YAML's signature
        return True


def run_papers_command(args: list[str]) -> str:
    """Run ``fedsim papers [PAPER | PAPER/NAME]``, and return the text to print; raise ConfigError for a wrong name."""
    parser = ArgumentParser(prog="fedsim papers", description="List papers, or show one, with its printed numbers.")
    parser.add_argument(
        "which", nargs="?", help="a paper, such as 003; or its parts whose names begin with a text: 003/table5"
    )
    arguments, unknown = parser.parse_known_args(args)
    name = arguments.which
    if unknown:
        raise ConfigError(f"papers: cannot use {' '.join(unknown)}; give one paper, or one name, or nothing")
    keys = list_papers() if name is None else [name]
    output = _part(name) if "/" in (name or "") else "\n\n".join("\n".join(_overview(key)) for key in keys)
    if name in keys and "/" not in name:
        output = "\n".join([output, *_printed(read_paper(name))])
    return output


def _overview(key: str) -> Iterator[str]:
    """Yield a few lines on a paper, then a line for each row, sweep and printed table."""
    paper = read_paper(key, "fedsim papers")
    yield f"{key}: {paper.content['title']}"
    yield from (
        f"  {remark}" for remark in (paper.content["source"], *(f"- {note}" for note in paper.content["notes"]))
    )
    lines = [("row", name, row["notes"]) for name, row in paper.rows.items()]
    lines += [("sweep", name, sweep["notes"]) for name, sweep in paper.sweeps.items()]
    lines += [("printed", name, table["title"]) for name, table in paper.content["tables"].items()]
    for section, name, remark in lines:
        start = f"  {section:<7} {key}/{name}"
        yield f"{start:<38}  {textwrap.shorten(remark, _WIDTH - 40, placeholder=' ...')}"


def _printed(paper: Paper) -> Iterator[str]:
    """Yield the tables of left-out data sets with every printed row, then the contradictions between tables.

    Other tables are wider than a terminal: ``fedsim papers PAPER/TABLE`` shows them.
    """
    rotation_of = {run: name for name, runs in paper.rotations.items() for run in runs.values()}
    for table in paper.tables:
        if not table.left_out:
            continue
        lines = []
        for row in table.rows:
            numbers = [*(row.scores.get(name, {}).values() for name in table.test_sets), row.mean]
            cells = [" / ".join(f"{value:.{table.digits}f}" for value in values) or "-" for values in numbers]
            runs = sorted({rotation_of.get(run, run) for run in row.runs})
            lines.append([row.name, *cells, row.status, ", ".join(runs) or "-"])
        metrics = " / ".join(paper.content["tables"][table.name].get("columns", paper.content["columns"]))
        headers = ["row", *table.test_sets, "mean", "status", "run"]
        sides = ("left", *["right"] * (len(table.test_sets) + 1), "left", "left")
        yield f"\n{paper.key}/{table.name}: {table.title}; {metrics} in percent\n"
        yield tabulate(lines, headers, disable_numparse=True, colalign=sides if lines else None)
    if remarks := [f"  {name}: {entry.remark}" for name, entry in paper.test_sets.items() if entry.remark]:
        yield from ("\ndata sets, as the paper has them:", *remarks)
    if contradictions := list(lines_of(paper)):
        yield "\nprinted tables that contradict each other:"
        yield from (f"  {contradiction}" for contradiction in contradictions)


def _part(name: str) -> str:
    """Return the rows, sweeps and tables whose names begin with PREFIX of ``PAPER/PREFIX``, with common fields."""
    key, _, prefix = name.partition("/")
    paper = read_paper(key, "fedsim papers")
    parts = {
        section: {entry: content for entry, content in paper.content[section].items() if entry.startswith(prefix)}
        for section in ("rows", "sweeps", "tables")
    }
    if not any(parts.values()):
        raise no_such_name("fedsim papers", name, [entry for section in parts for entry in paper.content[section]])
    of_rows = {row.partition("_")[0] for row in parts["rows"]}  # table5_batch_64 is of table5
    parts["tables"] = {
        entry: table | {name: table.get(name, paper.content[name]) for name in ("columns", "clients")}
        for entry, table in paper.content["tables"].items()
        if entry in {*parts["tables"], *of_rows}
    }
    shown = {section: entries for section, entries in parts.items() if entries}
    return yaml.dump(shown, Dumper=_Dumper, sort_keys=False, width=_WIDTH, default_flow_style=None).rstrip()
