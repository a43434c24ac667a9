"""``fedsim papers``: which papers there are, their rows and sweeps, and one of them in full."""

from __future__ import annotations

import sys
import textwrap
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml
from tabulate import tabulate

from fedsim.cli.papers.files import Paper, list_papers, no_such_name, read_paper
from fedsim.cli.papers.published import Row, Table, as_text
from fedsim.core.errors import FedSimError

__all__ = ["run_papers_command"]

_WIDTH = 120


def run_papers_command(args: list[str]) -> int:
    """Run ``fedsim papers [PAPER | PAPER/NAME]``.

    Returns:
        exit code: 0, or 2 if there is no such paper or name.
    """
    parser = ArgumentParser(prog="fedsim papers", description="List papers, or show one, with its printed numbers.")
    parser.add_argument("which", nargs="?", help="a paper, such as 003; or what begins with a name: 003/table5")
    which = parser.parse_args(args).which
    try:
        text = _all_papers() if which is None else _one(which)
    except FedSimError as error:
        sys.stderr.write(f"fedsim: error: {error}\n")
        return 2
    sys.stdout.write(f"{text}\n")
    return 0


def _all_papers() -> str:
    return "\n\n".join("\n".join(_overview(read_paper(key))) for key in list_papers())


def _overview(paper: Paper) -> Iterator[str]:
    """A paper in a line, then a line for each row, sweep and printed table."""
    yield f"{paper.key}: {paper.content['title']}"
    lines = [("", name, row["notes"]) for name, row in paper.rows.items()]
    lines += [("sweep", name, sweep["notes"]) for name, sweep in paper.sweeps.items()]
    lines += [("printed", name, table["title"]) for name, table in paper.content["tables"].items()]
    for kind, name, said in lines:
        start = f"  {kind:<7} {paper.key}/{name}"
        yield f"{start:<38}  {textwrap.shorten(said, _WIDTH - 40, placeholder=' ...')}"


def _one(which: str) -> str:
    """A paper, or all of its rows, sweeps and tables whose names begin so."""
    key, _, name = which.partition("/")
    paper = read_paper(key)
    if not name:
        notes = [f"- {note}" for note in paper.content.get("notes", ())]
        return "\n".join([*_overview(paper), "", paper.content["source"], *notes])
    tables = {table.name: table for table in paper.tables}
    known = [*paper.rows, *paper.sweeps, *tables]
    found = [other for other in known if other.startswith(name)]
    if not found:
        raise no_such_name("fedsim papers", which, known)
    of_rows = [row.partition("_")[0] for row in found]  # table5_batch_64 is of table5
    rows = [_row(paper, row) for row in paper.rows if row in found]
    sweeps = [_sweep(paper, sweep) for sweep in paper.sweeps if sweep in found]
    printed = [_table(table, paper.content) for table in tables.values() if table.name in (*found, *of_rows)]
    return "\n\n".join([*rows, *sweeps, *printed])


def _row(paper: Paper, name: str) -> str:
    row, (data, *_) = paper.rows[name], paper.content["data"]
    before = [row.get("data", data), f"protocol {row['protocol']}" if "protocol" in row else "protocol"]
    lines = [f"{paper.key}/{name}", textwrap.fill(row["notes"], _WIDTH)]
    lines += [f"after: {', '.join([*before, *row.get('after', ())])}", _as_yaml(row.get("overrides", {}))]
    return "\n".join(filter(None, lines))


def _sweep(paper: Paper, name: str) -> str:
    sweep = paper.sweeps[name]
    rows = [f"rows: {', '.join(sweep['rows'])}"] if "rows" in sweep else []
    notes = textwrap.fill(sweep["notes"], _WIDTH)
    return "\n".join(filter(None, [f"sweep {paper.key}/{name}", notes, *rows, _as_yaml(sweep.get("parameters", {}))]))


def _as_yaml(content: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(content), sort_keys=False).rstrip() if content else ""


def _table(table: Table, content: Mapping[str, Any]) -> str:
    """The numbers as printed, and for each row what a run of it is told to be."""
    metrics = content["tables"][table.name].get("columns", content["columns"])
    cells = [[name, *(_cell(row, name, metrics, content["digits"]) for row in table.rows)] for name in table.test_sets]
    headers = ["data set", *(textwrap.fill(row.name, 16) for row in table.rows)]
    text = tabulate(cells, headers, disable_numparse=True, colalign=("left", *["right"] * len(table.rows)))
    numbers = [f"{' / '.join(metrics)} in percent", "", text, ""] if cells else []
    return "\n".join([f"printed {table.name}: {table.title}", *numbers, *_settings(table)])


def _cell(row: Row, name: str, metrics: Sequence[str], digits: int) -> str:
    scores = row.scores.get(name, {})
    return " / ".join(f"{scores[m]:.{digits}f}" if m in scores else "-" for m in metrics) if scores else "-"


def _settings(table: Table) -> Iterator[str]:
    """What all rows have in common, then the rest of each."""
    yield from (f"- {note}" for note in table.notes)
    first, *others = (row.settings for row in table.rows)
    common = {name: v for name, v in first.items() if all(name in o and o[name] == v for o in others)}
    yield textwrap.fill(f"settings: {_listed(common)}", _WIDTH, subsequent_indent="  ")
    for row in table.rows:
        own = {name: value for name, value in row.settings.items() if name not in common}
        said = [row.model, row.status, row.note, _listed(own)]
        yield textwrap.fill(f"{row.name}: {'; '.join(filter(None, said))}", _WIDTH, subsequent_indent="  ")


def _listed(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {as_text(value)}" for name, value in settings.items())
